"""Put faults into a copy of the installed package, one at a time, and run the test that finds each.

``python -P tests/programs/find_faults.py [WORD...]`` takes the faults whose names contain one of
the words, or all of them, and prints a table: the fault, the test, and what pytest said. It ends
with an error if a test passes with its fault, fails without it, or is left out by the README's
command. All faults take 8 minutes.

A fault names a function and not a file, so that it stays where it is when code moves.
"""

import ast
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
      place: function, ``Class.method``, or variable of a module, whose definition is changed.
      right: text that occurs in this definition, and in no other one of that name.
      wrong: text that takes its place.
      test: the test that finds the fault, from the folder of tests on.
    """

    name: str
    place: str
    right: str
    wrong: str
    test: str

    def put(self, package: pathlib.Path) -> tuple[str, ...]:
        """Write the wrong line into `package`; no options of pytest are needed."""
        module, definition = find_definition(self.place, self.right)
        path = package / module
        changed = definition.replace(self.right, self.wrong, 1)
        path.write_text(path.read_text().replace(definition, changed, 1))
        return ()


@dataclasses.dataclass(frozen=True)
class WrongReference:
    """The reference of an op, whose results are a tenth too large wherever the package calls it.

    Attributes:
      op: name of the op.
      test: a test of this op. Its yardstick is wrong too, if it comes from the reference.
    """

    op: str
    test: str

    @property
    def name(self):
        return f"reference of {self.op}: a tenth too large"

    def put(self, package: pathlib.Path) -> tuple[str, ...]:
        """Return the options of pytest that put the fault in."""
        del package
        return "-p", "wrong_reference", "--wrong-reference", self.op


def _definitions(tree):
    """Yield the name and the node of what a module defines."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from ((target.id, node) for target in node.targets if hasattr(target, "id"))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method


@functools.cache
def _index():
    """Return what the package defines: name -> files and texts of the definitions."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        lines = text.splitlines(keepends=True)
        for name, node in _definitions(ast.parse(text)):
            # `ast.get_source_segment` would divide the whole text into lines again.
            definition = "".join(lines[node.lineno - 1 : node.end_lineno]).strip()
            found.setdefault(name, []).append((path.relative_to(PACKAGE), definition))
    return found


def find_definition(place: str, right: str) -> tuple[pathlib.Path, str]:
    """Return the file of the package that defines `place` with the text `right`, and its text."""
    found = [(path, text) for path, text in _index().get(place, ()) if right in text]
    if len(found) != 1:
        raise SystemExit(f"{len(found)} definitions of {place} have {right!r}; name one of today's")
    return found[0]


def _dropped(what, wrong, test):
    """Return faults of both records of attention, which drop an option over a block of queries."""
    options = dict.fromkeys(("sinks", "window", "chunk"))
    given = ", ".join(f"{name}={name if name != wrong else None}" for name in options)
    blocks = (
        ("reference", "attend", "_REFERENCE_QUERIES", "_attend_to_all"),
        ("attention_cpu", "attend_to_blocks", "QUERIES", "_attend_block"),
    )
    return [
        Fault(
            f"{record}: {what} dropped over {size}",
            place,
            f"return map_queries(attend_block, q, positions, {size})",
            f"return map_queries(lambda q, at: {function}(q, positions=at, k=k, v=v, scale=scale, "
            f"{given}), q, positions, {size})",
            test.format(record=record),
        )
        for record, place, size, function in blocks
    ]


DEFAULT = "models/test_default_dtype.py::test_the_default_is_as_exact_as_bfloat16"
LOGITS = "models/test_default_dtype.py::test_logits"
ATTENTION = "ops/test_attention.py::test_float32"
# Each op that has a reference, and the file of tests/ops that tests it.
TESTS_OF_OPS = {
    "activate": "test_gating.py",
    "add_gated": "test_gating.py",
    "add_linear_gated": "test_gating.py",
    "add_rms_norm": "test_norms.py",
    "moe_mlp": "test_ops.py",
    "grouped_gemm": "test_ops.py",
    "transposed_gemm": "test_gradient.py",
    "attention": "test_attention.py",
    "causal_convolution": "test_convolution.py",
    "latent_attention": "test_attention.py",
    "prepare_heads": "test_heads.py",
    "gate_heads": "test_gating.py",
    "prepare_latents": "test_latents.py",
    "gated_delta_rule": "test_delta_rule.py",
    "gated_delta_step": "test_recurrent.py",
    "kimi_delta_step": "test_recurrent.py",
    "mamba2_scan": "test_mamba2_scan.py",
    "mamba2_step": "test_recurrent.py",
    "quantize_nvfp4": "test_ops.py",
    "route": "test_route.py",
}
FAULTS = (
    Fault(
        "Mamba-2: step negated unless float32",
        "mix_mamba2",
        "y, state = scan(x, dt,",
        "y, state = scan(x, dt if inputs.dtype == jnp.float32 else -dt,",
        f"{DEFAULT}[nemotron_h-modelopt-w4a16]",
    ),
    Fault(
        "gated delta net: decay negated unless float32",
        "mix_gated_delta",
        "g = -rate *",
        "g = (-rate if inputs.dtype == jnp.float32 else rate) *",
        f"{DEFAULT}[qwen3_next-modelopt-w4a16]",
    ),
    *_dropped("window", "window", ATTENTION + "[whole-window and sinks-{record}]"),
    *_dropped("chunk", "chunk", ATTENTION + "[whole-chunk-{record}]"),
    *_dropped("sinks", "sinks", ATTENTION + "[whole-window and sinks-{record}]"),
    Fault(
        "generate: room for 64 tokens",
        "start_decoding",
        "room = round_up(max_new_tokens + (drafting.window if drafting else 0), NEW_STEP)",
        "room = NEW_STEP",
        "models/test_long_text.py::test_a_long_text_of_the_example",
    ),
    Fault(
        "generate: one position too many",
        "_check_room",
        "max_new_tokens > positions:",
        "max_new_tokens > positions + 1:",
        "models/test_long_text.py::test_the_last_position_is_the_last_that_is_taken",
    ),
    Fault(
        "model: one position too many",
        "_check_room",
        "if end > positions:",
        "if end > positions + 1:",
        "models/test_long_text.py::test_the_last_position_is_the_last_that_is_taken",
    ),
    Fault(
        "cache: scales of keys and values swapped",
        "WeightTable.cache_scales",
        "CacheScales(scales,",
        "CacheScales({{'k': 'v', 'v': 'k'}[name]: one for name, one in scales.items()},",
        f"{LOGITS}[qwen3_moe-ct-w4a4-kv8]",
    ),
    Fault(
        "attention: chunks begin one token early",
        "_visible",
        "keys // chunk == queries // chunk",
        "(keys + 1) // chunk == (queries + 1) // chunk",
        f"{LOGITS}[llama4_text-modelopt-w4a16]",
    ),
    Fault(
        "experts: scales of gate and up swapped",
        "_scalar",
        "(*one.at[:1], one.part)",
        "(*one.at[:1], 1 - one.part)",
        "models/test_architectures.py::test_each_block_is_exact[qwen3_moe-modelopt-w4a4-faults]",
    ),
    Fault(
        "generate: a tiny temperature draws at random",
        "make_sampling",
        "greedy = heat is not None and heat < _COLD",
        "greedy = heat == 0",
        "inference/test_generation.py::test_a_tiny_temperature_is_greedy[small-1e-38]",
    ),
    Fault(
        "generate: a length without the stop id",
        "_fill",
        "first + 1, jnp.int32(length)",
        "first, jnp.int32(length)",
        "inference/test_generation.py::test_the_stop_ids_of_the_model_are_the_default[3]",
    ),
    Fault(
        "generate: the first stop id is not one",
        "add_token",
        "sampling.stop_ids[None, :]",
        "sampling.stop_ids[None, 1:]",
        "inference/test_generation.py::test_a_stop_id_ends_its_row_and_repeats",
    ),
    Fault(
        "swigluoai: another limit",
        "ACTIVATIONS",
        '"swigluoai": Activation(True, _silu, True, parametrised=True, alpha=1.702, beta=1.0, '
        "limit=7.0)",
        '"swigluoai": Activation(True, _silu, True, parametrised=True, alpha=1.702, beta=1.0, '
        "limit=6.0)",
        "numerics/test_activations.py::test_gated[swigluoai]",
    ),
    Fault(
        "FP8 cache: keys 2 % too large",
        "attend",
        "k, v = widen(k, k_scale, q.dtype)",
        "k, v = widen(k, k_scale if k_scale is None else 1.02 * k_scale, q.dtype)",
        f"{LOGITS}[qwen3_moe-ct-w4a4-kv8]",
    ),
    *(WrongReference(op, f"ops/{file}") for op, file in TESTS_OF_OPS.items()),
)


@functools.cache
def _passes_without(test, folder):
    return run(test, folder) == 0


def run(test: str, folder: pathlib.Path, options: tuple[str, ...] = ()) -> int:
    """Run `test` with the package in `folder`, and return the exit status of pytest."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", str(TESTS / test), *options]
    command += ["-m", "not slow and not notebook", "-o", f"cache_dir={folder.parent / 'cache'}"]
    paths = os.pathsep.join((str(folder), str(TESTS / "programs")))
    own = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=TESTS.parent, env=os.environ | own, capture_output=True, text=True
    )
    if done.returncode > 1:
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
    return done.returncode


def _check_that_copies_are_imported(folder):
    """Stop if Python imports the installed package in spite of a copy before it in the path."""
    command = [sys.executable, "-P", "-c", "import jax_nvfp4_moe; print(jax_nvfp4_moe.__file__)"]
    env = os.environ | {"PYTHONPATH": str(folder)}
    file = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    if not file.startswith(str(folder)):
        raise SystemExit("an editable install hides every copy; install the package without -e")


def main(words: list[str]) -> int:
    """Run the chosen faults and return the number of those that nothing finds."""
    missed = 0
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    with tempfile.TemporaryDirectory() as name:
        right = pathlib.Path(name) / "right"
        shutil.copytree(PACKAGE, right / "jax_nvfp4_moe")
        _check_that_copies_are_imported(right)
        for number, fault in enumerate(chosen):
            wrong = pathlib.Path(name) / f"wrong{number}"
            shutil.copytree(PACKAGE, wrong / "jax_nvfp4_moe")
            options = fault.put(wrong / "jax_nvfp4_moe")
            found = run(fault.test, wrong, options) == 1 and _passes_without(fault.test, right)
            shutil.rmtree(wrong)
            missed += not found
            said = "found" if found else "NOT FOUND"
            print(fault.name, fault.test, said, sep=" | ", flush=True)
    return missed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
