"""Tests of how JAX sees the calls of `prepare_heads`: memory, derivatives, and wrong operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.fp8_head_suite import with_fp8_cache
from support.kernels.head_suite import PAIRS, Call, make, prepare
from support.ops.gradients import gradients

OPERANDS = ("qkv", "positions", "keys", "values", "q_weight", "k_weight", "frequencies")
WRONG_BESIDE_FP8 = {
    "keys": (2, lambda x: x.astype(jnp.bfloat16)),
    "values": (3, lambda x: x[:, :, :-1]),
    "k_scale": (7, lambda x: np.tile(x, 2)),
    "v_scale": (8, lambda x: x.astype(np.float16)),
}


def make_call(name, pair, fp8, *, reciprocal=False) -> Call:
    """Return a call, whose cache may be in FP8."""
    call = make(name, pair)
    return with_fp8_cache(call, reciprocal=reciprocal) if fp8 else call


def operands_of(call: Call):
    """Return the operands of the FFI call of a call with norms and a rotation."""
    return [*call.operands[:4], *call.weights, np.float32(call.options.rope.frequencies)]


def call_target(ffi_target, arrays, call: Call, **attributes):
    """Run the FFI target on `arrays`, with the options of a call."""
    keys, values = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[2:4])
    (b, t, width), (_, m, _, d), options = call.qkv.shape, call.keys.shape, call.options
    n = options.count_queries(width, m, d)
    q = jax.ShapeDtypeStruct((b, t, n, d), call.qkv.dtype)
    program = jax.ffi.ffi_call(ffi_target, (q, keys, values), input_output_aliases={2: 1, 3: 2})
    return program(
        *arrays,
        eps=np.float32(options.eps),
        rotation_scale=np.float32(1 if options.rope is None else options.rope.scale),
        rotates_first=options.rotates_first,
        gated=options.gated,
        **attributes,
    )


def assert_named(name, *call, **attributes):
    """Assert that the error of a call names its wrong operand."""
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=rf"({name}).*expected"):
        jax.block_until_ready(call_target(*call, **attributes))


class HeadCallSuite:
    """Subclasses have `backend`, `ffi_target` and `fp8_target`."""

    @pytest.mark.parametrize("fp8", [False, True])
    def test_the_cache_stays_in_its_memory(self, fp8):
        call = make_call("decoding", PAIRS[0], fp8, reciprocal=True)

        def step(keys, values):
            operands = call.qkv, call.positions, keys, values, call.weights, call.scales
            return prepare(operands, call.options, backend=self.backend)[1:]

        keys, values = jnp.asarray(call.keys), jnp.asarray(call.values)
        before = {array.unsafe_buffer_pointer() for array in (keys, values)}
        after = jax.jit(step, donate_argnums=(0, 1))(keys, values)
        assert {array.unsafe_buffer_pointer() for array in after} == before

    @pytest.mark.parametrize("fp8", [False, True])
    def test_derivative_is_that_of_the_reference(self, fp8):
        call = make_call("a part rotates", "bfloat16-float32", fp8)
        operands = jax.tree.map(jnp.asarray, call.operands)
        smooth = slice(1 if fp8 else None)  # a cache in FP8 has no derivative

        def gradient(backend):
            def run(qkv):
                return prepare((qkv, *operands[1:]), call.options, backend=backend)[smooth]

            return gradients(run, operands[0])[0]

        expected = gradient("reference")
        assert np.abs(np.asarray(expected)).max() > 0
        np.testing.assert_array_equal(gradient(self.backend), expected)

    def test_vmap_is_a_loop(self):
        """JAX's loop has no results in place: the kernel gets copies of the cache."""
        call = make("a part rotates", PAIRS[0])
        operands = call.operands
        stacked = jax.tree.map(lambda x: np.stack([x, x]), operands)

        def run(*each):
            return prepare(each, call.options, backend=self.backend)

        for both, alone in zip(jax.vmap(run)(*stacked), run(*operands), strict=True):
            np.testing.assert_array_equal(np.asarray(both)[1], alone)

    @pytest.mark.parametrize("name", OPERANDS)
    @pytest.mark.parametrize("what", ["shape", "dtype"])
    def test_wrong_operand_is_named(self, name, what):
        call = make("a part rotates", PAIRS[0])
        arrays = operands_of(call)
        index = OPERANDS.index(name)
        wrong = arrays[index]
        # Fewer frequencies would be right: fewer channels would rotate.
        other = np.tile(wrong, 3) if name == "frequencies" else wrong[..., :-1]
        arrays[index] = other if what == "shape" else wrong.view(np.int8)
        # The width of a head is read from the keys: wrong keys show as a wrong width or q.
        named = "d \\(keys\\)|q |keys" if name == "keys" else f"{name}|r \\({name}\\)"
        assert_named(named, self.ffi_target, arrays, call)

    @pytest.mark.parametrize("name", WRONG_BESIDE_FP8)
    def test_wrong_operand_beside_fp8_is_named(self, name):
        call = make_call("a part rotates", PAIRS[0], fp8=True)
        arrays = [*operands_of(call), *call.scales]
        index, change = WRONG_BESIDE_FP8[name]
        arrays[index] = change(arrays[index])
        assert_named(name, self.fp8_target, arrays, call, multiply_by_reciprocal=False)
