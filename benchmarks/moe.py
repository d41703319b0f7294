"""Time the expert layer on one NVIDIA GPU, beside its floor, its targets and its peers.

    python benchmarks/moe.py [--case qwen3-30b-a3b ...] [--tokens 1 16 ...] [--backend NAME ...]
        [--scheme w4a16 w4a4 ...] [--marlin _moe_C.so] [--humming FOLDER] [--tokamax [FOLDER]]
        [--ragged-dot] [--targets] [--output FILE]
    python benchmarks/moe.py --plot-only benchmarks/results/moe.NVIDIA-H200.json

One row is one call of the layer in bfloat16 under `jax.jit`. A program holds 2 to 16 calls in a
CUDA graph. The calls have different tokens and expert ids, so that small calls read weights from
memory and not from the L2 cache. Weights are random bytes, and routing is uniform.

All contestants get the same ids. Each runs in its own process, one after the other, on the same
machine. The ceilings are measured in the same run; `moe_cases.floor_us` computes the floor of a row
from them. Clocks are not locked, so that only ratios of one run should be compared.

Peers: `--marlin` takes the file ``_moe_C*.so`` of an unpacked vLLM wheel (0.25.1). `--humming`
takes the folder of an unpacked humming-kernels wheel (0.1.19), and times its two GEMMs alone,
without routing, activation and combine. `--tokamax` takes a folder to import tokamax from, if it is
not installed.

Prints a table for each case. Writes ``benchmarks/results/moe.DEVICE.json``, and a plot beside it.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

from moe_cases import CASES, REAL_CASES, TARGETS, TOKENS, Ceilings, active_experts, floor_us
from provenance import provenance
from rich.console import Console
from rich.table import Table

HERE = pathlib.Path(__file__).resolve().parent
# Layers run in CUDA graphs, in program order: calls of one program must not overlap.
GRAPHS = (
    "--xla_gpu_enable_command_buffer=CUSTOM_CALL,FUSION --xla_gpu_graph_min_graph_size=1 "
    "--xla_gpu_command_buffer_scheduling_mode=SERIALIZE"
)
HOST_BOUND = 0.9  # with a larger host_share, the time is that of the host


def run_contestant(module, arguments, *, flags=""):
    """Start ``python -m module`` and yield its JSON lines.

    If the program fails, one more line says so.
    """
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(HERE), *filter(None, [environment.get("PYTHONPATH")])]
    )
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}".strip()
    command = [sys.executable, "-P", "-m", module, *map(str, arguments)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
            else:
                print(line, end="", file=sys.stderr)
    if process.returncode:
        yield {"contestant": module.rpartition(".")[2], "error": f"exit {process.returncode}"}


def contestants(arguments):
    """Return the module, arguments and XLA flags of each program to run, ours first."""
    cells = ["--case", *arguments.case, "--tokens", *arguments.tokens]
    small = ["--small-ceilings"] if arguments.small_ceilings else []
    own = ["--backend", *arguments.backend, "--scheme", *arguments.scheme]
    found = [("layer", [*cells, *small, *own], GRAPHS)]
    if arguments.marlin:
        found.append(("peers.marlin", [*cells, "--library", arguments.marlin.resolve()], ""))
    if arguments.humming:
        found.append(("peers.humming", [*cells, "--folder", arguments.humming.resolve()], ""))
    if arguments.tokamax is not None:
        folder = ["--folder", pathlib.Path(arguments.tokamax).resolve()]
        found.append(("peers.tokamax", [*cells, *(folder if arguments.tokamax else [])], ""))
    if arguments.ragged_dot:
        found.append(("peers.ragged_dot", cells, ""))
    return found


def measure(arguments):
    """Run all contestants and return the result to write."""
    result, lines = {"rows": [], "errors": []}, []
    for module, own, flags in contestants(arguments):
        for line in run_contestant(module, own, flags=flags):
            print(json.dumps(line), file=sys.stderr, flush=True)
            if "device" in line:
                result = provenance(arguments.commit) | line | result
            elif "error" in line:
                result["errors"].append(line)
            else:
                lines.append(line)
    if "device" not in result:
        raise SystemExit("our own layer did not start; its output above says why")
    result["rows"] = [describe(line, Ceilings(**result["ceilings"])) for line in lines]
    return result


def describe(line, ceilings):
    """Return one row: the measured times, with rates and the floor."""
    case, tokens, us = CASES[line["case"]], line["tokens"], line["us"]
    active = active_experts(case, tokens)
    floor = floor_us(case, tokens, active, ceilings)
    return line | {
        "active_experts": active,
        "tb_per_s": case.packed_bytes(active) / us * 1e-6,
        "tflop_per_s": case.flops(tokens) / us * 1e-6,
        "floor_us": floor,
        "of_floor": floor / us,
    }


def by_cell(rows, case):
    """Return the rows of one case, by contestant and number of tokens."""
    found = {}
    for row in rows:
        if row["case"] == case:
            found.setdefault(row["contestant"], {})[row["tokens"]] = row
    return found


def is_ours(contestant):
    return contestant.startswith("moe_")


def make_table(rows, case, ours):
    """Return the table of one case and one of our backends, with the ratio of each peer to it."""
    cells = by_cell(rows, case)
    peers = [name for name in cells if not is_ours(name)]
    table = Table(title=f"{case}: {ours}")
    for heading in ("tokens", "us", "spread us", "TB/s", "TFLOP/s", "floor us", "of floor"):
        table.add_column(heading, justify="right")
    for peer in peers:
        table.add_column(f"{peer} us", justify="right")
        table.add_column("ratio", justify="right")
    for tokens, row in sorted(cells[ours].items()):
        mark = "*" if row["host_share"] > HOST_BOUND else ""
        figures = [
            f"{tokens}",
            f"{row['us']:.1f}{mark}",
            f"{row['low']:.1f} to {row['high']:.1f}",
            f"{row['tb_per_s']:.2f}",
            f"{row['tflop_per_s']:.0f}",
            f"{row['floor_us']:.1f}",
            f"{row['of_floor']:.2f}",
        ]
        for peer in peers:
            us = cells[peer].get(tokens, {}).get("us")
            figures += [f"{us:.1f}", f"{us / row['us']:.2f}"] if us else ["-", "-"]
        table.add_row(*figures)
    return table


def times_of(rows, contestant):
    """Return the microseconds of a contestant by (case, tokens)."""
    own = [row for row in rows if row["contestant"] == contestant]
    return {(row["case"], row["tokens"]): row["us"] for row in own}


def check_targets(rows, backend):
    """Return (case, tokens, microseconds, target) for each cell of `TARGETS` that was timed."""
    timed = {
        (row["case"], row["tokens"]): row["us"] for row in rows if row["contestant"] == backend
    }
    return [
        (case, tokens, timed[case, tokens], target)
        for case, targets in TARGETS.items()
        for tokens, target in targets.items()
        if (case, tokens) in timed
    ]


def slower_than_peers(rows, backend):
    """Return (case, tokens, peer, ratio) for each cell in which a peer is faster."""
    peers = [row for row in rows if not is_ours(row["contestant"])]
    ours = times_of(rows, backend)
    return [
        (peer["case"], peer["tokens"], peer["contestant"], peer["us"] / us)
        for peer in peers
        if (us := ours.get((peer["case"], peer["tokens"]))) and peer["us"] < us
    ]


def show(result, console, *, targets):
    """Print all tables, and then what is missing or failed."""
    rows, ceilings = result["rows"], Ceilings(**result["ceilings"])
    ours = sorted({row["contestant"] for row in rows if is_ours(row["contestant"])})
    console.print(f"{result['device']}: {ceilings}")
    for case in CASES:
        for backend in ours:
            if by_cell(rows, case).get(backend):
                console.print(make_table(rows, case, backend))
    for note in notes(result):
        console.print(note, markup=False)
    for backend in ours if targets else []:
        show_targets(rows, backend, console)


def notes(result):
    """Yield what a reader of the tables must know: doubtful rows, missing columns, and failures."""
    rows = result["rows"]
    if any(row.get("host_share", 0) > HOST_BOUND for row in rows):
        yield "* bound by the host, not by the device"
    for peer, option in PEERS.items():
        if not any(row["contestant"].startswith(peer) for row in rows):
            yield f"no column for {peer}: {option} was not given, or the peer failed"
    for error in result["errors"]:
        yield f"failed: {error}"


PEERS = {
    "marlin": "--marlin",
    "humming": "--humming",
    "tokamax": "--tokamax",
    "ragged_dot": "--ragged-dot",
}


def show_targets(rows, backend, console):
    """Print which targets are met, and which peers are faster."""
    checked = check_targets(rows, backend)
    table = Table(title=f"targets on one H200: {backend}")
    for heading in ("case", "tokens", "us", "at most", ""):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for case, tokens, us, target in checked:
        verdict = "pass" if us <= target else f"miss by {us / target - 1:.0%}"
        table.add_row(case, str(tokens), f"{us:.1f}", str(target), verdict)
    console.print(table)
    passed = sum(us <= target for _, _, us, target in checked)
    console.print(f"{backend}: {passed} of {len(checked)} targets met")
    for case, tokens, peer, ratio in slower_than_peers(rows, backend):
        console.print(f"{backend} is slower than {peer} at {case}, {tokens} tokens: {ratio:.2f}")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(REAL_CASES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument(
        "--backend", nargs="+", default=[], help="default: the backend for this device"
    )
    parser.add_argument("--scheme", nargs="+", default=["w4a16"], help="schemes of our own layers")
    parser.add_argument("--marlin", type=pathlib.Path, help="_moe_C*.so of a vLLM wheel")
    parser.add_argument("--humming", type=pathlib.Path, help="folder of a humming-kernels wheel")
    parser.add_argument("--tokamax", nargs="?", const="", help="folder that holds tokamax")
    parser.add_argument("--ragged-dot", action="store_true", help="lax.ragged_dot, two ways")
    parser.add_argument("--targets", action="store_true", help="print which targets are met")
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    parser.add_argument("--output", type=pathlib.Path, help="default: results/moe.DEVICE.json")
    parser.add_argument(
        "--plot-only", type=pathlib.Path, metavar="FILE", help="show and plot FILE only"
    )
    parser.add_argument("--small-ceilings", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def draw_plot(result, path):
    """Draw the plot beside `path`, if matplotlib is installed."""
    try:
        from moe_plot import draw
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
        return
    draw(result, path.with_suffix(".png"))


def main():
    arguments = parse_arguments()
    path = arguments.plot_only
    if path:
        result = json.loads(path.read_text(encoding="utf-8"))
    else:
        result = measure(arguments)
        name = result["device"].replace(" ", "-")
        path = arguments.output or HERE / "results" / f"moe.{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    wide = None if sys.stdout.isatty() else 160
    show(result, Console(width=wide), targets=arguments.targets)
    draw_plot(result, path)


if __name__ == "__main__":
    main()
