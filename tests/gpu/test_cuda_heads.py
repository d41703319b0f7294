"""Run the suite of `prepare_heads` on its CUDA kernel, and check its errors."""

import cuda_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axes import axis
from gradients import gradients
from head_suite import CASES, PAIRS, HeadSuite, make

from jax_nvfp4_moe import ops

pytestmark = pytest.mark.gpu


def prepare(operands, options, backend="heads_cuda"):
    """Call the op with the operands of `head_suite.Call`."""
    *arrays, weights = operands
    q_weight, k_weight = weights or (None, None)
    return ops.prepare_heads(
        *arrays,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=options.eps,
        rope=options.rope,
        rotates_first=options.rotates_first,
        gated=options.gated,
        backend=backend,
    )


def on_cuda(call):
    program = jax.jit(lambda operands: prepare(operands, call.options))
    return tuple(map(np.asarray, program(jax.tree.map(jnp.asarray, call.operands))))


class TestHeads(HeadSuite):
    case = axis(*CASES)
    pair = axis(*PAIRS)

    @pytest.fixture
    def run(self):
        return on_cuda


def test_the_cache_stays_in_its_memory():
    call = make("decoding", PAIRS[0])

    def step(keys, values):
        operands = call.qkv, call.positions, keys, values, call.weights
        return prepare(operands, call.options)[1:]

    keys, values = jnp.asarray(call.keys), jnp.asarray(call.values)
    before = {array.unsafe_buffer_pointer() for array in (keys, values)}
    after = jax.jit(step, donate_argnums=(0, 1))(keys, values)
    assert {array.unsafe_buffer_pointer() for array in after} == before


def test_derivative_is_that_of_the_reference():
    call = make("a part rotates", "bfloat16-float32")
    operands = jax.tree.map(jnp.asarray, call.operands)

    def gradient(backend):
        def run(qkv):
            return prepare((qkv, *operands[1:]), call.options, backend)

        return gradients(run, operands[0])[0]

    expected = gradient("reference")
    assert float(jnp.abs(expected).max()) > 0
    np.testing.assert_array_equal(gradient("heads_cuda"), expected)


def test_vmap_is_a_loop():
    """JAX's loop has no results in place: the kernel gets copies of the cache."""
    call = make("a part rotates", PAIRS[0])
    operands = jax.tree.map(jnp.asarray, call.operands)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), operands)
    batched = jax.vmap(lambda *each: prepare(each, call.options, "heads_cuda"))(*stacked)
    for both, alone in zip(batched, prepare(operands, call.options, "heads_cuda"), strict=True):
        np.testing.assert_array_equal(both[1], alone)


OPERANDS = ("qkv", "positions", "keys", "values", "q_weight", "k_weight", "frequencies")


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_wrong_operand_is_named(name, what):
    cuda_calls.register()
    call = make("a part rotates", PAIRS[0])
    frequencies = np.float32(call.options.rope.frequencies)
    arrays = [*call.operands[:4], *call.weights, frequencies]
    index = OPERANDS.index(name)
    wrong = arrays[index]
    arrays[index] = wrong[..., :-1] if what == "shape" else wrong.view(np.int8)
    keys, values = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[2:4])
    q = jax.ShapeDtypeStruct((1, 2, 3, 96), call.qkv.dtype)
    program = jax.ffi.ffi_call(
        "nvfp4_prepare_heads_cuda", (q, keys, values), input_output_aliases={2: 1, 3: 2}
    )
    options = {"eps": np.float32(1e-6), "rotation_scale": np.float32(1)}
    options |= {"rotates_first": False, "gated": False}
    # The width of a head is read from the keys, so that wrong keys show as a wrong width or q.
    named = "d \\(keys\\)|q |keys" if name == "keys" else f"{name}|r \\({name}\\)"
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=rf"({named}).*expected"):
        jax.block_until_ready(program(*map(jnp.asarray, arrays), **options))
