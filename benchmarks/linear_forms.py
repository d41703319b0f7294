"""Time each way to run an NVFP4 linear layer with few rows on a Hopper GPU.

    python benchmarks/linear_forms.py [--rows 1 4 16] [--sizes 28672x4096 ...] [--output FILE]

Compiles ``linear_forms.cu`` with the nvcc of PATH. Prints a table, and writes it to
``benchmarks/results/linear_forms.{device}.json``. The choices in ``ffi/cuda/layers/forms.h`` and in
``CutLinearSm90`` rest on it. "as chosen" is the form that they take.

The floor is the time to read the weights at the bandwidth of a copy, which the same run measures.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile

from provenance import provenance

HERE = pathlib.Path(__file__).resolve().parent
KERNELS = HERE.parent / "ffi" / "cuda" / "gemm"
# n x k: queries, keys and values, outputs, gate and up, and down of Llama-3.1-8B; two layers of
# Qwen3-30B-A3B; the head of Qwen3.6-35B-A3B.
SIZES = (
    "6144x4096",
    "4096x4096",
    "28672x4096",
    "4096x14336",
    "12288x2048",
    "2048x4096",
    "248320x2048",
)


def build(folder):
    """Compile ``linear_forms.cu`` and the kernels that it calls; return the program."""
    program = folder / "linear_forms"
    kernels = [KERNELS / f"{name}.cu" for name in ("linear_few", "linear_few_wide", "linear_row")]
    options = (
        "-std=c++17",
        "-O3",
        "-gencode=arch=compute_90a,code=sm_90a",
        "--threads=4",
        f"-I{HERE.parent / 'ffi'}",
    )
    subprocess.run(
        ["nvcc", *options, HERE / "linear_forms.cu", *kernels, "-o", program], check=True
    )
    return program


def measure(program, sizes):
    """Return (TB/s of copies, rows of the table) for ``sizes``, which are (rows, n, k)."""
    done = subprocess.run(
        [program, *(str(number) for size in sizes for number in size)],
        check=True,
        capture_output=True,
        text=True,
    )
    first, *lines = done.stdout.splitlines()
    bandwidth, table = float(first), []
    for line in lines:
        rows, n, k, us, form = line.split(" ", 4)
        floor = int(n) * int(k) * 9 / 16 / (bandwidth * 1e6)
        table.append(
            {
                "rows": int(rows),
                "n": int(n),
                "k": int(k),
                "form": form,
                "us": float(us),
                "floor_us": round(floor, 3),
                "over_floor": round(float(us) / floor, 3),
            }
        )
    return bandwidth, table


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="NxK")
    parser.add_argument("--commit", help="the commit to record; git is asked by default")
    parser.add_argument("--output", type=pathlib.Path)
    given = parser.parse_args()
    sizes = [(rows, *map(int, size.split("x"))) for size in given.sizes for rows in given.rows]
    with tempfile.TemporaryDirectory() as folder:
        bandwidth, table = measure(build(pathlib.Path(folder)), sizes)
    query = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0")
    device = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    print(f"{device}, copy {bandwidth:.2f} TB/s")
    print("| rows | n x k | form | us | over the floor |\n| --- | --- | --- | --- | --- |")
    for row in table:
        sizes = f"{row['rows']} | {row['n']} x {row['k']}"
        print(f"| {sizes} | {row['form']} | {row['us']:.2f} | {row['over_floor']:.2f} x |")
    result = {**provenance(given.commit), "device": device, "copy_tb_per_s": bandwidth}
    name = f"linear_forms.{device.replace(' ', '-')}.json"
    output = given.output or HERE / "results" / name
    output.write_text(json.dumps({**result, "table": table}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
