"""Load a synthetic NVFP4 checkpoint, and show time, speed and peak memory.

    python benchmarks/load.py [--gigabytes 20] [--experts 128] [--layers 48] [--folder DIR]
    python benchmarks/load.py --checkpoint DIR [--write]

The files are dropped from the page cache before they are read, so that the time includes the disk.

The peak memory of the host is anonymous resident memory above what the imports and a first program
took. It is sampled every 2 ms while `load_model` runs in its own process. ``runtime_bytes`` is what
that first program took; on a GPU, these are its context and libraries. The peak memory of a GPU is
its ``peak_bytes_in_use``. The bound of both is 1.1 times the prepared bytes plus one layer.

The second table says where the time of the loading thread goes: in the headers, in the empty model
and its tensors' places, in tracing the conversions of the weights, in waiting until threads have
compiled them, in waiting for the thread that reads, in copies to the device, and in waiting for the
device, which converts. "Reading" is how long the thread that reads did so. A part of it is hidden
behind the rest.

Prints the tables and writes ``benchmarks/results/load.DEVICE.json``. The exit status is 1 if a peak
is above its bound.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
import unittest.mock

from provenance import provenance

BOUND = 1.1


def anonymous_bytes():
    """Return the bytes of resident memory of this process that no file backs (Linux)."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no line RssAnon")


class Peak:
    """Records the highest anonymous memory while its context is entered."""

    def __enter__(self):
        self.start = self.highest = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.002):
            self.highest = max(self.highest, anonymous_bytes())

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    @property
    def growth(self):
        return self.highest - self.start


class Shares:
    """Adds up the seconds that the loading thread spends in each part of a load.

    Attributes:
      seconds: the name of a part -> its seconds.
      reading: seconds that the other thread reads.
    """

    PARTS = ("headers", "model", "tracing", "compiling", "waiting for reads", "copies", "device")

    def __init__(self):
        self.seconds, self.reading = dict.fromkeys(self.PARTS, 0.0), 0.0
        self._patches = contextlib.ExitStack()

    def __enter__(self):
        import jax

        from jax_nvfp4_moe.models import loading
        from jax_nvfp4_moe.nn.building import filling

        for owner, function, part in (
            (loading, "open_checkpoint", "headers"),
            (loading, "find_model", "model"),
            (filling, "lower_conversions", "tracing"),
            (jax, "device_put", "copies"),
            (jax, "block_until_ready", "device"),
        ):
            self._patch(owner, function, self._timed(getattr(owner, function), part))
        compiling, read_ahead = filling.compiling, filling.read_ahead

        @contextlib.contextmanager
        def timed_compiling(programs):
            with compiling(programs) as wait:
                yield self._timed(wait, "compiling")

        def timed_read(read):
            start = time.perf_counter()
            try:
                return read()
            finally:
                self.reading += time.perf_counter() - start

        def timed_reads(reads):
            results = read_ahead(functools.partial(timed_read, read) for read in reads)
            take = self._timed(lambda: next(results, results), "waiting for reads")
            with contextlib.closing(results):
                yield from iter(take, results)

        self._patch(filling, "compiling", timed_compiling)
        self._patch(filling, "read_ahead", timed_reads)
        return self

    def __exit__(self, *_):
        self._patches.close()

    def _patch(self, owner, name, function):
        self._patches.enter_context(unittest.mock.patch.object(owner, name, function))

    def _timed(self, function, part):
        def run(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start

        return run


def measure(folder):
    """Load `folder` in this process and return the figures of the table."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jax_nvfp4_moe as nvfp4

    imported = anonymous_bytes()
    jax.block_until_ready(jax.jit(jnp.negative)(jnp.zeros(4)))
    with Shares() as shares, Peak() as peak:
        start = time.perf_counter()
        model = nvfp4.load_model(folder)
        jax.block_until_ready(nnx.state(model))
        seconds = time.perf_counter() - start
    leaves = jax.tree.leaves(nnx.state(model))
    prepared = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    stored = sum(path.stat().st_size for path in pathlib.Path(folder).glob("*.safetensors"))
    return {
        "device": jax.devices()[0].device_kind,
        "stored_bytes": stored,
        "prepared_bytes": prepared,
        "seconds": seconds,
        "gigabytes_per_second": stored / seconds / 1e9,
        "shares": {part: spent / seconds for part, spent in shares.seconds.items()},
        "reading": shares.reading / seconds,
        "peak_bytes": peak.growth,
        "runtime_bytes": peak.start - imported,
        "device_peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0),
    }


def write_checkpoint(folder, gigabytes, experts, layers):
    """Write a checkpoint of about `gigabytes`, with the width of Qwen3-30B-A3B."""
    from jax_nvfp4_moe.checkpoint.writing.synthetic import SyntheticSizes, write_synthetic

    hidden, step = 2048, 64
    column = layers * experts * 3 * hidden * 9 // 16  # bytes for each unit of the intermediate size
    intermediate = max(1, round(gigabytes * 1e9 / column / step)) * step
    write_synthetic(
        folder, SyntheticSizes(layers, experts, 8, hidden, intermediate, 32000, 32, 4, 128)
    )


def layer_bytes(folder):
    """Return the bytes of the experts of one layer."""
    config = json.loads((folder / "config.json").read_text())
    sizes = (config[name] for name in ("num_experts", "hidden_size", "moe_intermediate_size"))
    return math.prod(sizes) * 3 * 9 // 16


def forget(folder):
    """Write the files of `folder` to the disk, and drop them from the page cache (Linux)."""
    os.sync()
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run(folder, commit):
    """Measure in a new process, so that no other memory counts."""
    forget(folder)
    command = [sys.executable, __file__, "--measure", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures = {**provenance(commit), **json.loads(done.stdout)}
    figures["layer_bytes"] = layer_bytes(folder)
    figures["bound_bytes"] = int(BOUND * figures["prepared_bytes"]) + figures["layer_bytes"]
    peaks = figures["peak_bytes"], figures["device_peak_bytes"]
    figures["within_bound"] = max(peaks) <= figures["bound_bytes"]
    return figures


def print_table(figures):
    mega = {k: v / 1e6 for k, v in figures.items() if k.endswith("_bytes")}
    print("| stored MB | prepared MB | seconds | GB/s | peak MB | on the device | bound MB |")
    print("|---|---|---|---|---|---|---|")
    print(
        f"| {mega['stored_bytes']:.0f} | {mega['prepared_bytes']:.0f} | {figures['seconds']:.2f} | "
        f"{figures['gigabytes_per_second']:.2f} | {mega['peak_bytes']:.0f} | "
        f"{mega['device_peak_bytes']:.0f} | {mega['bound_bytes']:.0f} |"
    )
    shares = figures["shares"]
    print(f"\n| {' | '.join(shares)} | other | reading |")
    print("|---" * (len(shares) + 2) + "|")
    other = 1 - sum(shares.values())
    cells = [f"{share:.0%}" for share in (*shares.values(), other, figures["reading"])]
    print(f"| {' | '.join(cells)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--folder", type=pathlib.Path, help="where to write the checkpoint")
    parser.add_argument(
        "--checkpoint",
        type=pathlib.Path,
        help="folder of an existing checkpoint, or of the one to write",
    )
    parser.add_argument("--write", action="store_true", help="write --checkpoint and stop")
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    parser.add_argument("--output", type=pathlib.Path, help="default: results/load.DEVICE.json")
    parser.add_argument("--measure", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    sizes = (arguments.gigabytes, arguments.experts, arguments.layers)
    if arguments.write:
        write_checkpoint(arguments.checkpoint, *sizes)
        return
    if arguments.checkpoint:
        figures = run(arguments.checkpoint, arguments.commit)
    else:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            write_checkpoint(pathlib.Path(folder), *sizes)
            figures = run(pathlib.Path(folder), arguments.commit)
    print_table(figures)
    name = f"load.{figures['device'].replace(' ', '-')}.json"
    output = arguments.output or pathlib.Path(__file__).parent / "results" / name
    output.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(0 if figures["within_bound"] else 1)


if __name__ == "__main__":
    main()
