"""Load a synthetic NVFP4 checkpoint and show time, speed and peak memory.

    python benchmarks/load.py [--gigabytes 2] [--folder DIR]

Peak memory is anonymous resident memory above what the imports took, sampled every 2 ms while
`load_model` runs in a process of its own; the bound is 1.1 x the prepared bytes plus one layer.
Prints a table and writes benchmarks/results/load.json.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

BOUND = 1.1


def anonymous_bytes():
    """Bytes of resident memory that no file backs, of this process (Linux)."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no line RssAnon")


class Peak:
    """The highest anonymous memory while it is entered."""

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


def measure(folder, backend):
    """Load `folder` in this process; returns what the table shows."""
    import jax
    from flax import nnx

    import jax_nvfp4_moe as nvfp4

    jax.devices()
    with Peak() as peak:
        start = time.perf_counter()
        model = nvfp4.load_model(folder, backend=backend)
        jax.block_until_ready(nnx.state(model))
        seconds = time.perf_counter() - start
    leaves = jax.tree.leaves(nnx.state(model))
    prepared = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    stored = sum(path.stat().st_size for path in pathlib.Path(folder).glob("*.safetensors"))
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "stored_bytes": stored,
        "prepared_bytes": prepared,
        "seconds": seconds,
        "gigabytes_per_second": stored / seconds / 1e9,
        "peak_bytes": peak.growth,
    }


def write_checkpoint(folder, gigabytes):
    """Write a model of about `gigabytes` with experts of Qwen3-30B-A3B's sizes."""
    from jax_nvfp4_moe.checkpoint.synthetic import SyntheticSizes, write_synthetic

    expert = 3 * 2048 * 768 * 9 // 16
    layer = 64 * expert
    layers = max(1, round(gigabytes * 1e9 / layer))
    write_synthetic(folder, SyntheticSizes(layers, 64, 8, 2048, 768, 32000, 16, 4, 128))
    return layer


def run(folder, backend):
    """Measure in a fresh process, so that nothing else counts."""
    command = [sys.executable, __file__, "--measure", str(folder), "--backend", backend or ""]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=pathlib.Path, help="where to write the checkpoint")
    parser.add_argument("--measure", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.backend or None)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        layer = write_checkpoint(folder, arguments.gigabytes)
        os.sync()  # so that writing it back does not count as reading
        figures = run(folder, None)
    figures["layer_bytes"] = layer
    figures["bound_bytes"] = int(BOUND * figures["prepared_bytes"]) + layer
    figures["within_bound"] = figures["peak_bytes"] <= figures["bound_bytes"]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    figures["commit"] = commit
    mega = {k: v / 1e6 for k, v in figures.items() if k.endswith("_bytes")}
    print("| stored MB | prepared MB | seconds | GB/s | peak MB | bound MB |")
    print("|---|---|---|---|---|---|")
    print(
        f"| {mega['stored_bytes']:.0f} | {mega['prepared_bytes']:.0f} | {figures['seconds']:.2f} | "
        f"{figures['gigabytes_per_second']:.2f} | {mega['peak_bytes']:.0f} | "
        f"{mega['bound_bytes']:.0f} |"
    )
    results = pathlib.Path(__file__).parent / "results" / "load.json"
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(0 if figures["within_bound"] else 1)


if __name__ == "__main__":
    main()
