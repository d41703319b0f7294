"""Compare decoding with drafts to decoding without, for every test checkpoint.

``python tests/programs/drafting_sweep.py [--new 300] [--dtype float32 bfloat16] [--batch 1 8]
[--only NAME ...] [--seconds N] [--jobs N]`` decodes the same prompts without drafts, and with
drafts that are always right, always wrong, of both kinds, and wrong in one row. In float32, all
tokens must be equal. In bfloat16, kernels round a token differently if others are read with it; the
program then counts the texts that part, and the tokens up to there. It prints a line for each case,
and its exit status is 1 if a token of a float32 case differs or a case fails. With ``--jobs``, that
many processes each take a checkpoint: most of the time goes to compilations.
"""

import argparse
import concurrent.futures
import pathlib
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from support.files.given import CHECKPOINTS, EXAMPLE
from support.models.drafters import MODES, Oracle

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.inference import drafting

DRAFTS = 3
_KNOWN = dict(drafting.DRAFTERS)


def folders(only):
    """Return the checkpoints that are models, of those whose names have a part in `only`."""
    found = [EXAMPLE, *sorted(CHECKPOINTS.iterdir())]
    return [
        path
        for path in found
        if (path / "config.json").exists() and (not only or any(part in path.name for part in only))
    ]


def draw_prompts(model, batch):
    """Return prompts of unequal lengths, as arguments of `generate`."""
    rng = np.random.default_rng(batch)
    ids = rng.integers(model.config.vocab_size, size=(batch, 12), dtype=np.int32)
    return {"input_ids": ids, "lengths": rng.integers(3, 13, size=batch), "stop_ids": ()}


def count_until_parted(plain, drafted):
    """Return how many rows differ, and the tokens of all rows before their first difference."""
    differs = plain != drafted
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), plain.shape[1])
    return int(differs.any(axis=1).sum()), int(first.sum())


def run(model, batch, new):
    """Yield the mode, what `count_until_parted` returns, and the accepted share of the drafts."""
    given = draw_prompts(model, batch)
    given["max_new_tokens"] = min(new, model.config.max_positions - 12)
    plain = np.asarray(nvfp4.generate(model, **given))
    for mode in MODES:
        drafting.DRAFTERS = {**_KNOWN, mode: Oracle(plain, mode)}
        tokens, stats = nvfp4.generate(model, **given, draft=mode, draft_tokens=DRAFTS, stats=True)
        share = float(stats.accepted.sum()) / max(1, float(stats.drafted.sum()))
        yield mode, *count_until_parted(plain, np.asarray(tokens)), share


def run_side_by_side(given):
    """Run this program once for each checkpoint, and return whether one of them fails."""
    began, options = time.monotonic(), ["--new", str(given.new), "--dtype", *given.dtype]
    options += ["--batch", *map(str, given.batch)]

    def run_folder(folder):
        left = given.seconds - (time.monotonic() - began)
        if left <= 0:
            return f"{folder.name}: not begun, stopped by --seconds", False
        command = [sys.executable, __file__, "--only", folder.name, *options]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=min(left, 1e6), check=False
            )
        except subprocess.TimeoutExpired as stopped:
            lines = (stopped.stdout or b"").decode()
            return f"{lines}{folder.name}: not ended, stopped by --seconds", False
        return done.stdout + done.stderr * bool(done.returncode), bool(done.returncode)

    failed = False
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as processes:
        for text, failed_here in processes.map(run_folder, folders(given.only)):
            print(text.rstrip(), flush=True)
            failed |= failed_here
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new", type=int, default=300)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--jobs", type=int, default=1)
    given, faults, began = parser.parse_args(), 0, time.monotonic()
    if given.jobs > 1:
        sys.exit(run_side_by_side(given))
    for folder in folders(given.only):
        for dtype in given.dtype:
            if time.monotonic() - began > given.seconds:
                print("stopped by --seconds")
                sys.exit(bool(faults))
            try:
                model = nvfp4.load_model(folder, dtype=dtype)
            except CheckpointError as error:
                print(f"{folder.name}: not loaded: {error.problems[0]:.80}")
                break
            for batch in given.batch:
                for mode, parted, tokens, share in run(model, batch, given.new):
                    faults += parted > 0 and dtype == "float32"
                    print(
                        f"{folder.name} {dtype} batch {batch} {mode}: {parted} of {batch} texts "
                        f"part, {tokens} tokens before, {share:.0%} of drafts kept",
                        flush=True,
                    )
            jax.clear_caches()
    print(f"{faults} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
