"""Load a synthetic checkpoint over several processes, and show what each process reads and holds.

    python benchmarks/load_processes.py [--processes 1 2 4] [--gigabytes 1.5] [--experts 64]
        [--layers 12] [--mesh expert=4 expert=2,tensor=2 ...] [--output FILE]

All processes run on this host, with one CPU device each, and use Gloo for collectives. The peak is
anonymous resident memory above what the imports took, as in `load.py`. Its bound is 1.1 times the
share of the process, which is the prepared bytes of its shards. Weights other than experts
(embedding, norms, attention) are replicated along `expert` and count in the share. The bytes read
are those of `read` calls (rchar of Linux).

Writes ``benchmarks/results/load_processes.json``. The exit status is 1 if a peak is above its
bound.
"""

import argparse
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

from load import BOUND, Peak, write_checkpoint
from provenance import provenance

HERE = pathlib.Path(__file__).resolve().parent


def read_bytes():
    """Return the bytes that this process has read by system calls (Linux)."""
    with open("/proc/self/io", encoding="ascii") as io:
        return int(next(line for line in io if line.startswith("rchar:")).split()[1])


def measure(folder, processes, process_id, port, mesh):
    """Load in this process, which is one of several, and print its figures."""
    import jax
    from flax import nnx

    import jax_nvfp4_moe as nvfp4
    from jax_nvfp4_moe.parallel import processes as distributed

    expert_mesh = None
    if processes > 1:
        distributed.join(f"127.0.0.1:{port}", processes, process_id)
        expert_mesh = distributed.make_mesh(mesh)
    jax.devices()
    with Peak() as peak:
        before, start = read_bytes(), time.perf_counter()
        model = nvfp4.load_model(folder, mesh=expert_mesh)
        jax.block_until_ready(nnx.state(model))
        seconds, read = time.perf_counter() - start, read_bytes() - before
    leaves = jax.tree.leaves(nnx.state(model))
    share = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    print(
        json.dumps(
            {
                "processes": processes,
                "mesh": mesh or f"expert={processes}",
                "process": process_id,
                "share_bytes": share,
                "read_bytes": read,
                "peak_bytes": peak.growth,
                "seconds": seconds,
            }
        ),
        flush=True,
    )


def run(folder, processes, mesh):
    """Return the figures of each process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = [sys.executable, __file__, "--folder", str(folder), "--port", str(port)]
    own += ["--processes", str(processes), *(["--mesh", mesh] if mesh else [])]
    children = [
        subprocess.Popen([*own, "--process", str(index)], stdout=subprocess.PIPE, text=True)
        for index in range(processes)
    ]
    found = []
    for child in children:
        text, _ = child.communicate()
        if child.returncode:
            raise SystemExit(f"a process ended with status {child.returncode}")
        found += [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    for row in found:
        row["bound_bytes"] = int(BOUND * row["share_bytes"])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--mesh", nargs="+", help="such as expert=2,tensor=2; default: all along expert"
    )
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process is not None:
        (count,) = arguments.processes
        (mesh,) = arguments.mesh or [None]
        measure(arguments.folder, count, arguments.process, arguments.port, mesh)
        return
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        write_checkpoint(folder, arguments.gigabytes, arguments.experts, arguments.layers)
        for count in arguments.processes:
            for mesh in (arguments.mesh or [None]) if count > 1 else [None]:
                rows += run(folder, count, mesh)
    print("| mesh | process | share MB | read MB | peak MB | bound MB | seconds |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        sizes = (row[name] / 1e6 for name in ("share_bytes", "read_bytes", "peak_bytes"))
        cells = [f"{size:.0f}" for size in (*sizes, row["bound_bytes"] / 1e6)]
        cells = [row["mesh"], str(row["process"]), *cells, f"{row['seconds']:.1f}"]
        print(f"| {' | '.join(cells)} |")
    output = arguments.output or HERE / "results" / "load_processes.json"
    result = {**provenance(arguments.commit), "rows": rows}
    output.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(any(row["peak_bytes"] > row["bound_bytes"] for row in rows))


if __name__ == "__main__":
    main()
