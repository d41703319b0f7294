"""Check an installed release wheel; needs no GPU. Run: python -I .ci/installed.py."""

# The Python of a new environment runs this file. The environment has the wheel, the packages that
# it depends on, and nothing else. The option -I and check_files keep the source tree out of it.

import importlib.metadata
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.backends import _ffi

BACKENDS = {
    (nvfp4.Target("cpu"), "w4a16"): "moe_w4a16_cpu",
    (nvfp4.Target("cuda", (8, 0)), "w4a16"): "moe_w4a16_sm80",
    (nvfp4.Target("cuda", (9, 0)), "w4a16"): "moe_w4a16_sm90",
    (nvfp4.Target("cuda", (10, 0)), "w4a4"): "moe_w4a4_sm100",
    (nvfp4.Target("cuda", (12, 0)), "w4a4"): "moe_w4a4_sm120",
}


def check_files():
    """Check that the package is in this environment, with all licenses and its type marker."""
    package = pathlib.Path(nvfp4.__file__).parent
    assert package.is_relative_to(sys.prefix), f"{package} is not in this environment"
    files = {path.name for path in importlib.metadata.files("jax-nvfp4-moe")}
    assert {"LICENSE", "LICENSE.cutlass", "LICENSE.nanobind"} <= files, files
    assert (package / "py.typed").is_file()  # else type checkers ignore the annotations


def check_kernels():
    """Check that both extensions are complete, and which backends devices would choose."""
    lacking = {"amx", "avx512"}.difference(_ffi.load("_nvfp4_cpu").isa_levels())
    missing = dict(_ffi.missing((*_ffi.EXTENSIONS, *_ffi.PARTS)))
    assert missing.keys() == {f"_nvfp4_cpu.attention_{isa}" for isa in lacking}, missing
    for (target, scheme), backend in BACKENDS.items():
        choice = nvfp4.explain(nvfp4.Problem("moe_mlp", nvfp4.Scheme(scheme), target))
        assert choice.backend == backend, str(choice)


def check_layer():
    """Check a layer on this CPU against the reference, and that it lowers for a GPU."""
    key = jax.random.key(0)
    params = nvfp4.testing.random_moe_params(key, num_experts=8, hidden=64, intermediate=32)
    routing = nvfp4.testing.random_routing(key, tokens=5, num_experts=8, top_k=2)
    x = jax.random.normal(key, (5, 64), jnp.float32)

    def layer(backend, target=None):
        return jax.jit(
            lambda x: nvfp4.ops.moe_mlp(
                x, params, *routing, scheme="w4a16", backend=backend, target=target
            )
        )

    expected = np.asarray(layer("reference")(x))
    worst = np.abs(np.asarray(layer("moe_w4a16_cpu")(x)) - expected).max()
    assert worst < 1e-5 * np.abs(expected).max(), worst
    traced = layer(None, nvfp4.Target("cuda", (9, 0))).trace(x.astype(jnp.bfloat16))
    assert "nvfp4_moe_w4a16_sm90" in traced.lower(lowering_platforms=("cuda",)).as_text()


def check_command():
    """Check that the command completes some Python as it does in float32.

    The text has 24 tokens. For each of them, rounding to bfloat16 moves the distance between the
    two likeliest tokens by at most 0.3 of that distance, and so does not change the likeliest one.
    Greedy text is therefore the same on each machine, whatever its order of summation, and with
    the drafting layer of the example model.
    """
    command = pathlib.Path(sys.prefix, "bin", "jax-nvfp4-moe")
    arguments = ["generate", "--prompt", "def softmax(x", "--max-new-tokens", "24"]
    expected = pathlib.Path(__file__).with_name("greedy.txt").read_text()
    for draft in ((), ("--draft", "mtp")):
        whole = [command, *arguments, *draft]
        done = subprocess.run(whole, capture_output=True, text=True, check=True)
        assert done.stdout == expected, (draft, done.stdout)


if __name__ == "__main__":
    for check in (check_files, check_kernels, check_layer, check_command):
        check()
    version = sys.version.split()[0]
    print(f"ok: Python {version}, jax {jax.__version__}, {pathlib.Path(nvfp4.__file__).parent}")
