"""Run the suite of `prepare_latents` on its CUDA kernel, and check its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.kernels.axes import axis
from support.kernels.latents_suite import CASES, PAIRS, LatentsSuite, make
from support.ops.gradients import gradients

from jax_nvfp4_moe import ops

pytestmark = pytest.mark.gpu


def prepare(operands, options, backend="latents_cuda"):
    """Call the op with the operands of `latents_suite.Call`."""
    *arrays, q_weight, kv_weight = operands
    return ops.prepare_latents(
        *arrays,
        q_weight=q_weight,
        kv_weight=kv_weight,
        eps=options.eps,
        rope=options.rope,
        interleaved=options.interleaved,
        backend=backend,
    )


def on_cuda(call):
    program = jax.jit(lambda operands: prepare(operands, call.options))
    return tuple(map(np.asarray, program(jax.tree.map(jnp.asarray, call.operands))))


class TestLatents(LatentsSuite):
    case = axis(*CASES)
    pair = axis(*PAIRS)

    @pytest.fixture
    def run(self):
        return on_cuda


def test_the_cache_stays_in_its_memory():
    call = make("deepseek", PAIRS[0])

    def step(cache):
        operands = call.down, call.positions, cache, call.q_weight, call.kv_weight
        return prepare(operands, call.options)[1]

    cache = jnp.asarray(call.cache)
    before = cache.unsafe_buffer_pointer()
    assert jax.jit(step, donate_argnums=0)(cache).unsafe_buffer_pointer() == before


def test_derivative_is_that_of_the_reference():
    call = make("eight tokens", "bfloat16-float32")
    operands = jax.tree.map(jnp.asarray, call.operands)

    def gradient(backend):
        def run(down):
            return prepare((down, *operands[1:]), call.options, backend)

        return gradients(run, operands[0])[0]

    expected = gradient("reference")
    assert float(jnp.abs(expected).max()) > 0
    np.testing.assert_array_equal(gradient("latents_cuda"), expected)


def test_vmap_is_a_loop():
    """JAX's loop has no results in place: the kernel gets copies of the cache."""
    call = make("eight tokens", PAIRS[0])
    operands = jax.tree.map(jnp.asarray, call.operands)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), operands)
    batched = jax.vmap(lambda *each: prepare(each, call.options))(*stacked)
    for both, alone in zip(batched, prepare(operands, call.options), strict=True):
        np.testing.assert_array_equal(both[1], alone)


OPERANDS = ("down", "positions", "cache", "q_weight", "kv_weight", "frequencies")


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_wrong_operand_is_named(name, what):
    cuda_calls.register()
    call = make("deepseek", PAIRS[0])
    arrays = [*call.operands, np.float32(call.options.rope.frequencies)]
    index = OPERANDS.index(name)
    wrong = arrays[index]
    arrays[index] = wrong[..., :-1] if what == "shape" else wrong.view(np.int8)
    cache = jax.ShapeDtypeStruct(arrays[2].shape, arrays[2].dtype)
    q = jax.ShapeDtypeStruct((3, 1, 1536), call.down.dtype)
    program = jax.ffi.ffi_call(
        "nvfp4_prepare_latents_cuda", (q, cache), input_output_aliases={2: 1}
    )
    options = {"eps": np.float32(1e-6), "rotation_scale": np.float32(1), "interleaved": True}
    # The width of the rotated key is that of the cache without the latent.
    named = r"e \(cache\)|cache" if name == "cache" else rf"{name}|k \({name}\)"
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=rf"({named}).*expected"):
        jax.block_until_ready(program(*map(jnp.asarray, arrays), **options))
