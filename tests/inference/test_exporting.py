"""Test `jax.export`: another process runs an exported layer and decoding step with equal bits."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.files.given import CHECKPOINTS, EXAMPLE
from support.models.exported import layer_arguments, step_arguments

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.inference import exporting
from jax_nvfp4_moe.models.decoder import Cache
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import DenseExperts
from jax_nvfp4_moe.testing import random_routing

# Runs the exported program in a process that has traced nothing.
AGAIN = """
import pathlib, sys
import jax, jax.numpy as jnp, numpy as np
import jax_nvfp4_moe as nvfp4
from support.models.exported import {arguments} as arguments

folder = pathlib.Path(sys.argv[1])
exported = nvfp4.load_exported((folder / "program").read_bytes())
for index, leaf in enumerate(jax.tree.leaves(exported.call(*arguments()))):
    np.save(folder / f"{{index}}.npy", np.asarray(leaf).view(np.uint8))
"""


def export(function, arguments, **options):
    checks = nvfp4.export_checks()
    return jax.export.export(jax.jit(function), disabled_checks=checks, **options)(*arguments)


def assert_same_again(tmp_path, function, arguments):
    """Export `function`, run it in a new process, and compare its bits with the result here."""
    (tmp_path / "program").write_bytes(export(function, arguments()).serialize())
    code = AGAIN.format(arguments=arguments.__name__)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    here = jax.tree.leaves(jax.jit(function)(*arguments()))
    for index, leaf in enumerate(here):
        there = np.load(tmp_path / f"{index}.npy")
        np.testing.assert_array_equal(there, np.asarray(leaf).view(np.uint8))
    assert any(np.asarray(leaf).any() for leaf in here)


def layer(x, params, ids, weights):
    return nvfp4.ops.moe_mlp(x, params, ids, weights, scheme="w4a4")


def test_a_layer_in_a_new_process(tmp_path):
    """The prepared experts are arguments, and their layout is part of the pytree's structure."""
    assert_same_again(tmp_path, layer, layer_arguments)


def test_a_decoding_step_in_a_new_process(tmp_path):
    graph, state = nnx.split(nvfp4.load_model(EXAMPLE))
    structure = jax.tree.structure(state)

    def step(leaves, input_ids, cache):
        return nnx.merge(graph, jax.tree.unflatten(structure, leaves))(input_ids, cache)

    assert_same_again(tmp_path, step, step_arguments)


def test_generate_as_an_exported_program():
    """Prompts, lengths and weights are arguments; the lengths of the rows come back, too."""
    model = nvfp4.load_model(CHECKPOINTS / "qwen3moe-modelopt-w4a16", dtype=jnp.float32)
    leaves, structure = jax.tree.flatten(model)
    ids, lengths = jnp.asarray([[5, 6, 7], [9, 1, 0]], jnp.int32), jnp.asarray([3, 2], jnp.int32)
    stop = int(nvfp4.generate(model, ids, lengths=lengths, max_new_tokens=3)[0, 2])
    how = {"max_new_tokens": 6, "stop_ids": (stop,), "stats": True}

    def run(leaves, ids, lengths):
        model = jax.tree.unflatten(structure, leaves)
        return nvfp4.generate(model, ids, lengths=lengths, **how)

    program = nvfp4.load_exported(export(run, (leaves, ids, lengths)).serialize())
    tokens, stats = program.call(leaves, ids, lengths)
    assert isinstance(stats, nvfp4.GenerationStats)
    assert stats.lengths[0] <= 3
    expected = nvfp4.generate(model, ids, lengths=lengths, **how)
    jax.tree.map(np.testing.assert_array_equal, (tokens, stats), expected)


def test_for_a_gpu_from_a_machine_without():
    """Lowering needs no GPU. Loading says what is missing to run the program here."""
    target = nvfp4.Target("cuda", (9, 0))
    x, params, ids, weights = layer_arguments()
    params = nvfp4.prepare(params, target=target, scheme="w4a16")

    def forward(x, params, ids, weights):
        return nvfp4.ops.moe_mlp(x, params, ids, weights, scheme="w4a16", target=target)

    exported = export(forward, (x, params, ids, weights), platforms=("cuda",))
    assert exported.platforms == ("cuda",)
    assert "custom_call @nvfp4_moe_w4a16_sm90" in exported.mlir_module()
    serialized = exported.serialize()
    if dict(_ffi.missing(("_nvfp4_cuda",))):
        with pytest.raises(nvfp4.NoBackendError, match=r"nvfp4_moe_w4a16_sm90: the extension"):
            nvfp4.load_exported(serialized)
    else:
        assert nvfp4.load_exported(serialized).in_tree == exported.in_tree


def test_the_checks_are_those_of_all_kernels():
    """Every target that an extension registers is named; without that, JAX refuses the program."""
    named = set(exporting._extensions())
    for extension in _ffi.EXTENSIONS:
        module = _ffi.load(extension)
        registered = set(module.registrations()) if module else set()
        assert registered <= named
    with pytest.raises(ValueError, match="custom calls whose targets have no"):
        jax.export.export(jax.jit(layer))(*layer_arguments())


def test_structures_come_back():
    """The structure that an export writes includes layouts and padded sizes."""
    _, params, _, _ = layer_arguments()
    canonical = params.to_layout("canonical")
    padded = canonical.to_layout("mma_64x64")
    exported = export(lambda p: p.down.global_scale, (padded,))
    again = nvfp4.load_exported(exported.serialize())
    assert again.in_tree == exported.in_tree
    np.testing.assert_array_equal(again.call(padded), padded.down.global_scale)
    with pytest.raises(ValueError, match="structure"):
        again.call(canonical)


@pytest.mark.parametrize(
    "value",
    [
        FP8Tensor(np.ones((4, 8), jnp.float8_e4m3fn), np.ones(4, np.float32)),
        DenseExperts(np.ones((2, 8, 4), np.float32), np.ones((2, 4, 4), np.float32)),
        DenseExperts(
            FP8Tensor(np.ones((2, 8, 4), jnp.float8_e4m3fn), np.ones((2, 8), np.float32)),
            FP8Tensor(np.ones((2, 4, 4), jnp.float8_e4m3fn), np.ones((2, 4), np.float32)),
            gate_up_input_scale=np.ones(2, np.float32),
            multiply_by_reciprocal=True,
        ),
        Cache(({"k": np.ones((1, 1, 4, 2), np.float32)},), np.zeros(1, np.int32), 4),
    ],
    ids=["FP8Tensor", "DenseExperts", "FP8 experts", "Cache"],
)
def test_each_class_may_be_an_argument(value):
    exported = export(lambda tree: jax.tree.leaves(tree)[-1], (value,))
    again = nvfp4.load_exported(exported.serialize())
    assert again.in_tree == exported.in_tree
    np.testing.assert_array_equal(again.call(value), jax.tree.leaves(value)[-1])


def symbolic_tokens(top_k=2):
    """Return the shapes of `layer_arguments` with a symbolic number of tokens."""
    (t,) = jax.export.symbolic_shape("t")
    _, params, _, _ = layer_arguments()
    return (
        jax.ShapeDtypeStruct((t, 64), jnp.bfloat16),
        params.to_layout("canonical"),
        jax.ShapeDtypeStruct((t, top_k), jnp.int32),
        jax.ShapeDtypeStruct((t, top_k), jnp.float32),
    )


@pytest.fixture
def on_cpu():
    """Make a CPU the default device, even on a machine with a GPU."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_layer_for_any_number_of_tokens(backend):
    def forward(x, params, ids, weights):
        return nvfp4.ops.moe_mlp(x, params, ids, weights, scheme="w4a4", backend=backend)

    exported = export(forward, symbolic_tokens(), platforms=("cpu",))
    params = symbolic_tokens()[1]
    for tokens in (1, 5, 300):
        keys = jax.random.split(jax.random.key(tokens), 2)
        x = jax.random.normal(keys[0], (tokens, 64), jnp.bfloat16)
        given = x, params, *random_routing(keys[1], tokens, 4, 2)
        np.testing.assert_array_equal(exported.call(*given), jax.jit(forward)(*given))


@pytest.mark.usefixtures("on_cpu")
def test_a_product_for_any_number_of_rows():
    weight = nvfp4.quantize(jax.random.normal(jax.random.key(0), (48, 64)))
    x = jax.random.normal(jax.random.key(1), (7, 64), jnp.bfloat16)

    def forward(x):
        return nvfp4.ops.linear(x, weight)

    exported = export(forward, symbolic_tokens()[:1], platforms=("cpu",))
    np.testing.assert_array_equal(exported.call(x), jax.jit(forward)(x))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_a_gpu_kernel_says_that_it_needs_a_number_of_tokens(capability):
    target = nvfp4.Target("cuda", capability)
    weight = nvfp4.quantize(jnp.ones((48, 64)))

    def forward(x, params, ids, weights):
        return nvfp4.ops.moe_mlp(x, params, ids, weights, scheme="w4a4", target=target)

    def product(x):
        return nvfp4.ops.linear(x, weight, target=target)

    message = r"x: expected a known number of tokens, .* nvfp4_.* got the symbolic size t"
    with pytest.raises(ValueError, match=message):
        export(forward, symbolic_tokens(), platforms=("cuda",))
    with pytest.raises(ValueError, match=message):
        export(product, symbolic_tokens()[:1], platforms=("cuda",))
