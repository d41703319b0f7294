"""Put faults into a copy of the installed package, one at a time, and run the test that finds each.

``python -P tests/programs/find_faults.py [WORD...]`` takes the faults whose names contain one of
the words, or all of them, and prints a table: the fault, the module, the test, and what pytest
said. It ends with an error if a test passes with its fault, fails without it, or is left out by the
README's command. All faults take 5 minutes.
"""

import dataclasses
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jax_nvfp4_moe

TESTS = pathlib.Path(__file__).parents[1]
PACKAGE = pathlib.Path(jax_nvfp4_moe.__file__).parent


@dataclasses.dataclass(frozen=True)
class Fault:
    """One wrong line.

    Attributes:
      name: what is wrong.
      module: file in the package.
      right: text that occurs in the file.
      wrong: text that takes its place.
      test: the test that finds the fault, from the folder of tests on.
    """

    name: str
    module: str
    right: str
    wrong: str
    test: str


def _dropped(what, wrong, test):
    """Return faults of both records of attention, which drop an option over a block of queries."""
    options = dict.fromkeys(("sinks", "window", "chunk"))
    given = ", ".join(f"{name}={name if name != wrong else None}" for name in options)
    blocks = (
        ("reference", "_REFERENCE_QUERIES", "_attend_to_all"),
        ("attention_cpu", "QUERIES", "_attend_block"),
    )
    return [
        Fault(
            f"{record}: {what} dropped over {size}",
            "backends/attention.py",
            f"return map_queries(attend_block, q, positions, {size})",
            f"return map_queries(lambda q, at: {function}(q, positions=at, k=k, v=v, scale=scale, "
            f"{given}), q, positions, {size})",
            test.format(record=record),
        )
        for record, size, function in blocks
    ]


DEFAULT = "models/test_default_dtype.py::test_the_default_is_as_exact_as_bfloat16"
LOGITS = "models/test_default_dtype.py::test_logits"
ATTENTION = "ops/test_attention.py::test_float32"
FAULTS = (
    Fault(
        "Mamba-2: step negated unless float32",
        "backends/mamba2.py",
        "y, state = scan(x, dt,",
        "y, state = scan(x, dt if inputs.dtype == jnp.float32 else -dt,",
        f"{DEFAULT}[nemotron_h-modelopt-w4a16]",
    ),
    Fault(
        "gated delta net: decay negated unless float32",
        "backends/gated_delta.py",
        "g = -rate *",
        "g = (-rate if inputs.dtype == jnp.float32 else rate) *",
        f"{DEFAULT}[qwen3_next-modelopt-w4a16]",
    ),
    *_dropped("window", "window", ATTENTION + "[whole-window and sinks-{record}]"),
    *_dropped("chunk", "chunk", ATTENTION + "[whole-chunk-{record}]"),
    *_dropped("sinks", "sinks", ATTENTION + "[whole-window and sinks-{record}]"),
    Fault(
        "generate: room for 64 tokens",
        "inference/generation.py",
        "room = flatten_model(model), round_up(max_new_tokens, NEW_STEP)",
        "room = flatten_model(model), NEW_STEP",
        "models/test_long_text.py::test_a_long_text_of_the_example",
    ),
    Fault(
        "generate: one position too many",
        "inference/generation.py",
        "> positions:",
        "> positions + 1:",
        "models/test_long_text.py::test_the_last_position_is_the_last_that_is_taken",
    ),
    Fault(
        "model: one position too many",
        "models/decoder.py",
        "if end > positions:",
        "if end > positions + 1:",
        "models/test_long_text.py::test_the_last_position_is_the_last_that_is_taken",
    ),
    Fault(
        "cache: scales of keys and values swapped",
        "checkpoint/table.py",
        "scales = {name: reader",
        "scales = {{'k': 'v', 'v': 'k'}[name]: reader",
        f"{LOGITS}[qwen3_moe-ct-w4a4-kv8]",
    ),
    Fault(
        "attention: chunks begin one token early",
        "backends/attention.py",
        "keys // chunk == queries // chunk",
        "(keys + 1) // chunk == (queries + 1) // chunk",
        f"{LOGITS}[llama4_text-modelopt-w4a16]",
    ),
    Fault(
        "experts: scales of gate and up swapped",
        "checkpoint/experts.py",
        "else (at[0], part)",
        "else (at[0], 1 - part)",
        "models/test_architectures.py::test_each_block_is_exact[qwen3_moe-modelopt-w4a4-faults]",
    ),
    Fault(
        "generate: a tiny temperature draws at random",
        "inference/generation.py",
        "greedy = heat is not None and heat < _COLD",
        "greedy = heat == 0",
        "inference/test_generate.py::test_a_tiny_temperature_is_greedy[small-1e-38]",
    ),
    Fault(
        "generate: a length without the stop id",
        "inference/generation.py",
        "first + 1, jnp.int32(length)",
        "first, jnp.int32(length)",
        "inference/test_generate.py::test_the_stop_ids_of_the_model_are_the_default[3]",
    ),
    Fault(
        "generate: the first stop id is not one",
        "inference/generation.py",
        "sampling.stop_ids[None, :]",
        "sampling.stop_ids[None, 1:]",
        "inference/test_generate.py::test_a_stop_id_ends_its_row_and_repeats",
    ),
    Fault(
        "swigluoai: another limit",
        "numerics/activations.py",
        '"swigluoai": Activation(True, _silu, True, parametrised=True, alpha=1.702, beta=1.0, '
        "limit=7.0)",
        '"swigluoai": Activation(True, _silu, True, parametrised=True, alpha=1.702, beta=1.0, '
        "limit=6.0)",
        "numerics/test_activations.py::test_gated[swigluoai]",
    ),
    Fault(
        "FP8 cache: keys 2 % too large",
        "backends/attention.py",
        "k, v = widen(k, k_scale, q.dtype)",
        "k, v = widen(k, k_scale if k_scale is None else 1.02 * k_scale, q.dtype)",
        f"{LOGITS}[qwen3_moe-ct-w4a4-kv8]",
    ),
)


def put(fault: Fault, package: pathlib.Path) -> None:
    """Write the wrong line into `package`."""
    path = package / fault.module
    text = path.read_text()
    if fault.right not in text:
        raise SystemExit(f"{fault.name}: {fault.module} has no {fault.right!r}; name today's place")
    path.write_text(text.replace(fault.right, fault.wrong, 1))


@functools.cache
def _passes_without(test, folder):
    return run(test, folder) == 0


def run(test: str, folder: pathlib.Path) -> int:
    """Run `test` with the package in `folder`, and return the exit status of pytest."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", str(TESTS / test)]
    command += ["-m", "not slow and not notebook", "-o", f"cache_dir={folder.parent / 'cache'}"]
    paths = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=TESTS.parent, env=os.environ | paths, capture_output=True, text=True
    )
    if done.returncode > 1:
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
    return done.returncode


def main(words: list[str]) -> int:
    """Run the chosen faults and return the number of those that nothing finds."""
    missed = 0
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    with tempfile.TemporaryDirectory() as name:
        right = pathlib.Path(name) / "right"
        shutil.copytree(PACKAGE, right / "jax_nvfp4_moe")
        for number, fault in enumerate(chosen):
            wrong = pathlib.Path(name) / f"wrong{number}"
            shutil.copytree(PACKAGE, wrong / "jax_nvfp4_moe")
            put(fault, wrong / "jax_nvfp4_moe")
            found = run(fault.test, wrong) == 1 and _passes_without(fault.test, right)
            missed += not found
            said = "found" if found else "NOT FOUND"
            print(fault.name, fault.module, fault.test, said, sep=" | ", flush=True)
    return missed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
