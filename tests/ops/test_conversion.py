"""Test the warning of weights that each call converts: once a line of code, with what to write."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.ops.conversion import forget_reports

# The messages name the kernels that a CPU lacks.
pytestmark = pytest.mark.usefixtures("on_cpu")

SIZES = {"num_experts": 4, "hidden": 64, "intermediate": 64}
CPU, HOPPER = nvfp4.Target("cpu"), nvfp4.Target("cuda", (9, 0))


@pytest.fixture(autouse=True)
def said(caplog):
    """Return a function that returns the warnings since its last call."""
    forget_reports()
    caplog.set_level(logging.WARNING, logger="jax_nvfp4_moe")

    def find():
        found = [r.getMessage() for r in caplog.records if "converts weights" in r.getMessage()]
        caplog.clear()
        return found

    return find


def weights():
    return nvfp4.quantize(jax.random.normal(jax.random.key(0), (64, 64)))


def written(message):
    return message.rpartition("before the calls: ")[2]


def lower(run, *args, target):
    return jax.jit(run).trace(*args).lower(lowering_platforms=(target.platform,))


def test_once_for_each_line_that_calls(said):
    weight, x = weights(), jnp.ones((2, 64))
    for _ in range(2):
        nvfp4.ops.linear(x, weight, target=CPU)
        nvfp4.ops.linear(x, weight, target=CPU)
    found = said()
    assert len(found) == 2
    assert all(f"{__file__}:" in message for message in found)
    assert len(set(found)) == 2


def test_a_line_inside_jit(said):
    @jax.jit
    def run(x, weight):
        return nvfp4.ops.linear(x, weight, target=CPU)

    for rows in (1, 2):
        run(jnp.ones((rows, 64)), weights())
    assert len(said()) == 1


CALLS = {
    "automatic": ({}, jnp.bfloat16),
    "float32": ({}, jnp.float32),
    "scheme": ({"scheme": "w4a4_unit_scale"}, jnp.bfloat16),
    "hopper": ({"target": HOPPER}, jnp.bfloat16),
    "backend": ({"backend": "moe_w4a16_cpu", "target": CPU}, jnp.bfloat16),
    "backends": ({"backend": ("moe_w4a16_cpu", "reference"), "target": CPU}, jnp.bfloat16),
}


@pytest.mark.parametrize(("options", "dtype"), CALLS.values(), ids=CALLS)
def test_the_line_of_the_message_ends_the_warnings_of_experts(options, dtype, said):
    params = nvfp4.testing.random_moe_params(jax.random.key(0), **SIZES)
    ids, expert_weights = nvfp4.testing.random_routing(jax.random.key(1), 3, 4, 2)
    target = options.get("target", nvfp4.Target.current())

    def run(x, params):
        return nvfp4.ops.moe_mlp(x, params, ids, expert_weights, **options)

    x = jnp.ones((3, 64), dtype)
    lower(run, x, params, target=target)
    (message,) = said()
    scope = {"nvfp4": nvfp4, "params": params, "Target": nvfp4.Target}
    exec(written(message).replace("nvfp4.Target", "Target"), scope)
    lower(run, x, scope["params"], target=target)
    assert said() == []


def test_the_plain_line(said):
    params = nvfp4.testing.random_moe_params(jax.random.key(0), **SIZES)
    ids, expert_weights = nvfp4.testing.random_routing(jax.random.key(1), 3, 4, 2)
    nvfp4.ops.moe_mlp(jnp.ones((3, 64), jnp.bfloat16), params, ids, expert_weights)
    assert [written(message) for message in said()] == ["params = nvfp4.prepare(params)"]


@pytest.mark.parametrize("target", [CPU, HOPPER, nvfp4.Target("cuda", (12, 0))], ids=str)
@pytest.mark.parametrize("scale", [None, 0.5])
def test_the_line_of_the_message_ends_the_warnings_of_matrices(target, scale, said):
    weight = weights()
    scale = None if scale is None else jnp.float32(scale)

    def run(x, weight):
        return nvfp4.ops.linear(x, weight, target=target, input_scale=scale)

    x = jnp.ones((3, 64), jnp.bfloat16)
    lower(run, x, weight, target=target)
    (message,) = said()
    scope = {"nvfp4": nvfp4, "weight": weight}
    exec(written(message), scope)
    lower(run, x, scope["weight"], target=target)
    assert said() == []


def test_weights_of_another_module(said):
    """`nnx.update` takes weights of another layout; the line of the message converts them."""

    def make(seed, **options):
        return nvfp4.NVFP4Linear(64, 64, rngs=nnx.Rngs(seed), **options)

    module, other = make(0), make(1, backend="reference")
    x = jnp.ones((3, 64), jnp.bfloat16)
    module(x)
    assert said() == []
    nnx.update(module, nnx.state(other))
    expected = module(x)
    (message,) = said()
    exec(written(message), {"nvfp4": nvfp4, "module": module})
    np.testing.assert_array_equal(np.asarray(module(x)), np.asarray(expected))
    assert said() == []


@pytest.mark.parametrize("shape", [(64, 96), (3, 40, 48)])
def test_prepare_takes_a_tensor(shape):
    weight = nvfp4.quantize(jax.random.normal(jax.random.key(0), shape))
    for target, layout in ((HOPPER, "mma_64x64"), (CPU, "cpu_16x16")):
        prepared = nvfp4.prepare(weight, target=target)
        assert (prepared.layout, prepared.shape) == (layout, shape)
        np.testing.assert_array_equal(prepared.dequantize(), weight.dequantize())
    assert nvfp4.prepare(weight, backend="reference").layout == "canonical"


@pytest.mark.parametrize("given", [jnp.ones((64, 64)), None, {"weight": 1}], ids=type)
def test_prepare_says_what_it_takes(given):
    with pytest.raises(TypeError, match="params: expected MoEParams or an NVFP4Tensor, got"):
        nvfp4.prepare(given)
