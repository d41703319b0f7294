"""Time the expert layer on one NVIDIA GPU against its floor, its targets and its peers.

    python benchmarks/moe.py [--case qwen3-30b-a3b ...] [--tokens 1 16 ...] [--backend NAME ...]
        [--scheme w4a16 w4a4 ...] [--marlin _moe_C.so] [--humming FOLDER] [--tokamax [FOLDER]]
        [--ragged-dot] [--targets] [--output FILE]
    python benchmarks/moe.py --plot-only benchmarks/results/moe.NVIDIA-H200.json

One row is one layer call in bfloat16 under `jax.jit`. A program holds 2 to 16 calls with different
tokens and expert ids in a CUDA graph, so that small ones read weights from memory and not from L2;
weights are random bytes, routing is uniform. Every contestant gets the same ids and runs in a
process of its own, one after the other, on the same machine; ceilings are measured in the same run
(`moe_cases.floor_us` says what bounds a row). Clocks are not locked: a claim against a peer is a
ratio taken in one run.

Peers: `--marlin` takes the file ``_moe_C*.so`` of an unpacked vLLM wheel (0.25.1), `--humming` the
folder of an unpacked humming-kernels wheel (0.1.19; its two products alone, without routing,
activation and combine), `--tokamax` a folder to import it from if it is not installed.

Prints a table for each case and writes ``benchmarks/results/moe.DEVICE.json`` with a plot beside.
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
# Layers go into CUDA graphs, in program order: calls of one program must not overlap.
GRAPHS = (
    "--xla_gpu_enable_command_buffer=CUSTOM_CALL,FUSION --xla_gpu_graph_min_graph_size=1 "
    "--xla_gpu_command_buffer_scheduling_mode=SERIALIZE"
)
HOST_BOUND = 0.9  # a host_share above says that the host was timed


def run_contestant(module, arguments, *, flags=""):
    """Start ``python -m module`` and yield its JSON lines; its end with an error is one more."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(HERE), *filter(None, [environment.get("PYTHONPATH")])]
    )
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}".strip()
    command = [sys.executable, "-m", module, *map(str, arguments)]
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
    """Return (module, its arguments, XLA flags) of every program to run, ours first."""
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
    """Run all contestants; returns the result that is written."""
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
        raise SystemExit("our own layer did not start: see above")
    result["rows"] = [describe(line, Ceilings(**result["ceilings"])) for line in lines]
    return result


def describe(line, ceilings):
    """Return one row: what was timed, with rates and the floor."""
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
    """Return contestant -> tokens -> row, of one case."""
    found = {}
    for row in rows:
        if row["case"] == case:
            found.setdefault(row["contestant"], {})[row["tokens"]] = row
    return found


def is_ours(contestant):
    return contestant.startswith("moe_")


def make_table(rows, case, ours):
    """Return the table of one case and one of our backends; peers with their ratio to it."""
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
    """Return (case, tokens) -> microseconds."""
    own = [row for row in rows if row["contestant"] == contestant]
    return {(row["case"], row["tokens"]): row["us"] for row in own}


def check_targets(rows, backend):
    """Return (case, tokens, microseconds, target) of each cell of `TARGETS` that was timed."""
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
    """Return (case, tokens, peer, ratio) of each cell at which a peer is faster."""
    peers = [row for row in rows if not is_ours(row["contestant"])]
    ours = times_of(rows, backend)
    return [
        (peer["case"], peer["tokens"], peer["contestant"], peer["us"] / us)
        for peer in peers
        if (us := ours.get((peer["case"], peer["tokens"]))) and peer["us"] < us
    ]


def show(result, console, *, targets):
    """Print all tables, then what is missing or failed."""
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
    """Return what a reader of the tables must know: doubtful rows, missing columns, failures."""
    rows = result["rows"]
    if any(row.get("host_share", 0) > HOST_BOUND for row in rows):
        yield "* bound by the host, not by the device"
    for peer, option in PEERS.items():
        if not any(row["contestant"].startswith(peer) for row in rows):
            yield f"no column for {peer}: not given ({option}) or failed"
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
    parser.add_argument("--backend", nargs="+", default=[], help="default: that of this device")
    parser.add_argument("--scheme", nargs="+", default=["w4a16"], help="of our own layers")
    parser.add_argument("--marlin", type=pathlib.Path, help="_moe_C*.so of a vLLM wheel")
    parser.add_argument("--humming", type=pathlib.Path, help="folder of a humming-kernels wheel")
    parser.add_argument("--tokamax", nargs="?", const="", help="folder that holds tokamax")
    parser.add_argument("--ragged-dot", action="store_true", help="lax.ragged_dot, two ways")
    parser.add_argument("--targets", action="store_true", help="say which targets are met")
    parser.add_argument("--commit", help="where there is no git to ask")
    parser.add_argument("--output", type=pathlib.Path, help="default: results/moe.DEVICE.json")
    parser.add_argument("--plot-only", type=pathlib.Path, metavar="FILE", help="show and plot it")
    parser.add_argument("--small-ceilings", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def draw_plot(result, path):
    """Draw the plot beside `path` if matplotlib is there."""
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
