"""Run the suite of latent attention on a GPU, and compare gradients and checks of operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.kernels.attention_suite import in_float64, plain, worst
from support.kernels.axes import axis
from support.kernels.latent_attention_suite import CASES, LatentAttentionSuite, make
from support.ops.gradients import gradients

from jax_nvfp4_moe.ops import attention, chain_calls

pytestmark = pytest.mark.gpu


def on_cuda(q, k, positions, **options):
    operands = jnp.asarray(q), jnp.asarray(k), None, jnp.asarray(positions)
    return attention(*operands, **options, backend="latent_attention_cuda")


class TestLatentAttention(LatentAttentionSuite):
    case = axis(*CASES)
    dtype = axis("bfloat16", "float16")

    @pytest.fixture
    def run(self):
        return on_cuda


@pytest.mark.parametrize("case", CASES)
def test_the_result_is_the_same_each_time(case):
    operands, options = make(case, jnp.dtype("bfloat16")), CASES[case].options
    width = CASES[case].widths[1]
    call = jax.jit(lambda *operands: on_cuda(*operands, value_width=width, **options))
    first, second = (np.asarray(call(*operands)).tobytes() for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("tokens", "heads", "keys"), [(1, 128, 4000), (8, 16, 4000), (1, 16, 9000)]
)
def test_the_sizes_of_models(tokens, heads, keys):
    """A long cache in a larger room, in as many parts as a device has room for."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, tokens, heads, 576)), jnp.bfloat16)
    k = jnp.asarray(rng.normal(size=(2, 1, keys + 100, 576)), jnp.bfloat16)
    positions = np.stack([keys - tokens + np.arange(tokens), 50 + np.arange(tokens)])
    operands = q, k, k[..., :512], positions.astype(np.int32)
    expected = in_float64(*operands)
    bound = 2 * worst(plain(*operands), expected)
    y = on_cuda(q, k, operands[3], value_width=512)
    assert worst(y, expected) <= bound
    assert worst(on_cuda(q, k, operands[3], value_width=512, window=25), expected) > 5 * bound


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale(scale):
    q, k, positions = make("a small latent", jnp.dtype("bfloat16"))
    operands = q, k, k[..., :32], positions
    expected = in_float64(*operands, scale=scale)
    bound = 2 * worst(plain(*operands, scale=scale), expected)
    assert worst(on_cuda(q, k, positions, value_width=32, scale=scale), expected) <= bound
    other = on_cuda(q, k, positions, value_width=32, scale=scale + 0.1)
    assert worst(other, expected) > 5 * bound


def test_batches_and_gradients():
    """`vmap` equals a loop, and gradients are those of the reference."""
    q, k, positions = map(jnp.asarray, make("a small latent", jnp.dtype("bfloat16")))
    k = jnp.nan_to_num(k)
    both = jax.vmap(lambda q: on_cuda(q, k, positions, value_width=32))(jnp.stack([q, 2 * q]))
    for got, given in zip(both, (q, 2 * q), strict=True):
        np.testing.assert_array_equal(got, on_cuda(given, k, positions, value_width=32))

    def gradients_of(backend):
        def run(q, k):
            return attention(q, k, None, positions, value_width=32, backend=backend)

        return gradients(run, q, k)

    for got, expected in zip(
        *map(gradients_of, ("latent_attention_cuda", "reference")), strict=True
    ):
        assert float(jnp.abs(expected).max()) > 0
        np.testing.assert_array_equal(got, expected)


def test_a_chain_has_the_bits_of_its_calls():
    """The merge of the first call and the second call overlap in a chain."""
    q, k, positions = map(jnp.asarray, make("heads of GLM Flash", jnp.dtype("bfloat16")))

    def twice(q, k, positions):
        y = on_cuda(q, k, positions, value_width=512)
        return on_cuda(y, k[..., :512], positions, value_width=512)

    expected = jax.jit(twice)(q, k, positions)
    got = jax.jit(chain_calls(twice))(q, k, positions)
    np.testing.assert_array_equal(got, expected)


F16 = jnp.float16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((2, 3, 4, 48))}, "q: expected bfloat16 or float16, got float32"),
        ({"k": jnp.zeros((2, 1, 8, 64), F16)}, r"k \[b, m, s, d\]: expected \[2, 1, 8, 48"),
        ({"k": jnp.zeros((2, 3, 8, 48), F16)}, r"n \(q\): expected a positive multiple of 3"),
        ({"width": 44}, r"dv \(y\): expected a positive multiple of 8"),
        ({"width": 64}, r"dv \(y\): expected at most 48"),
        ({"positions": jnp.zeros((2, 2), jnp.int32)}, r"positions \[b, t\]: expected \[2, 3\]"),
        ({"sinks": jnp.zeros(3)}, r"sinks \[n\]"),
        ({"scale": np.float32(0)}, "scale: expected a number above 0"),
        ({"window": np.int32(-1)}, "window: expected at least 0, got -1"),
    ],
)
def test_kernel_names_a_wrong_operand(changes, message):
    cuda_calls.register()
    operands = {
        "q": jnp.zeros((2, 3, 4, 48), F16),
        "k": jnp.zeros((2, 1, 8, 48), F16),
        "positions": jnp.zeros((2, 3), jnp.int32),
        "sinks": jnp.zeros(0),
    }
    options = {"scale": np.float32(1), "window": np.int32(0), "chunk": np.int32(0)}
    operands |= {name: changes[name] for name in operands if name in changes}
    options |= {name: changes[name] for name in options if name in changes}
    y = jax.ShapeDtypeStruct((2, 3, 4, changes.get("width", 32)), operands["q"].dtype)
    outputs = (y, jax.ShapeDtypeStruct((0,), jnp.uint8))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(
            jax.ffi.ffi_call("nvfp4_latent_attention_cuda", outputs)(*operands.values(), **options)
        )
