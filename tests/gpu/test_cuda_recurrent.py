"""Run the suites of recurrent mixers on a GPU, and check repeated calls and errors."""

import functools

import cuda_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axes import axis
from recurrent_suite import DELTA_CASES, DeltaStepSuite, make_delta

from jax_nvfp4_moe import ops

pytestmark = pytest.mark.gpu

delta_step = functools.partial(ops.gated_delta_step, backend="recurrent_cuda")


class TestDeltaStep(DeltaStepSuite):
    case = axis(*DELTA_CASES)
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self):
        return jax.jit(delta_step, static_argnames=("interleaved", "eps"))


@pytest.mark.parametrize("case", DELTA_CASES)
def test_steps_are_the_same_each_time(case):
    """Blocks that read the past of shared keys must not see what another block writes."""
    tokens, weights = make_delta(case, np.dtype("bfloat16"))
    rows = 40
    tokens = [jnp.concatenate([jnp.asarray(x)] * rows) for x in tokens]
    options = {**weights, "interleaved": DELTA_CASES[case].interleaved}

    @jax.jit
    def run(projected, positions, inputs, state):
        def body(_, carry):
            y, inputs, state = delta_step(projected, positions, *carry[1:], **options)
            return y, inputs, state

        y = jnp.zeros((len(state), 1, state[0, ..., 0, :].size), inputs.dtype)
        return jax.lax.fori_loop(0, 20, body, (y, inputs, state))

    first, second = ([np.asarray(x).tobytes() for x in run(*tokens)] for _ in range(2))
    assert first == second
    for result in map(np.asarray, run(*tokens)):
        repeated = result.reshape(rows, -1)
        assert (repeated.view(np.uint8) == repeated[:1].view(np.uint8)).all()


def test_a_step_without_donation_keeps_its_operands():
    tokens, weights = make_delta("full widths", np.dtype("bfloat16"))
    given = [jnp.asarray(x) for x in tokens]
    jax.block_until_ready(jax.jit(delta_step)(*given, **weights))
    for kept, before in zip(given, tokens, strict=True):
        np.testing.assert_array_equal(kept, before)


def test_gradients_and_batches():
    """Gradients are those of the reference, and `vmap` equals a loop."""
    tokens, weights = make_delta("full widths", np.dtype("float32"))
    tokens = [jnp.asarray(x) for x in tokens]

    def total(state, backend):
        y, _, state = ops.gated_delta_step(*tokens[:3], state, **weights, backend=backend)
        return jnp.sum(y) + jnp.sum(jnp.square(state))

    one, other = (jax.grad(total)(tokens[3], name) for name in ("recurrent_cuda", "reference"))
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    assert float(jnp.abs(other).max()) > 0
    stacked = [jnp.stack([x, x]) for x in tokens]
    batched = jax.vmap(lambda *given: delta_step(*given, **weights))(*stacked)
    for both, alone in zip(batched, delta_step(*tokens, **weights), strict=True):
        np.testing.assert_array_equal(both[1], alone)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("projected", jnp.zeros((2, 1, 171)), r"projected \[b, 1, n\]: expected \[2, 1, 172\]"),
        ("projected", jnp.zeros((2, 1, 172), jnp.bfloat16), "inputs: expected bfloat16, got float"),
        ("positions", jnp.zeros((2, 2), jnp.int32), r"positions \[b, 1\]: expected \[2, 1\]"),
        ("positions", jnp.zeros((2, 1)), "positions: expected int32, got float32"),
        ("conv_weight", jnp.zeros((110, 3)), r"conv_weight \[c, taps\]: expected \[112, 3\]"),
        ("A_log", jnp.zeros(5), r"A_log \[heads\]: expected \[6\]"),
        ("norm", jnp.zeros(16), r"norm \[e\]: expected \[8\]"),
        ("inputs", jnp.zeros((2, 3, 112)), r"inputs \[b, taps - 1, c\]: expected \[2, 2, 112\]"),
        ("state", jnp.zeros((2, 2, 3, 132, 8)), r"d \(state\): expected at most 128, got 132"),
        ("state", jnp.zeros((2, 2, 3, 16, 6)), r"e \(state\): expected a positive multiple of 4"),
        ("aliases", {}, r"inputs: expected a result in the memory of this operand"),
        ("aliases", {6: 1}, r"state: expected a result in the memory of this operand"),
    ],
)
def test_kernel_names_a_wrong_operand(name, wrong, message):
    cuda_calls.register()
    tokens, weights = make_delta("three value heads", np.dtype("float32"))
    names = ("projected", "positions", "inputs", "state")
    given = dict(zip(names, tokens, strict=True)) | weights | {"aliases": {6: 1, 7: 2}}
    given[name] = wrong
    names = ("projected", "positions", *weights, "inputs", "state")
    operands = [jnp.asarray(given[name]) for name in names]
    shapes = ((2, 1, 48), operands[6].shape, operands[7].shape)
    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    call = jax.ffi.ffi_call("nvfp4_delta_step_cuda", outputs, input_output_aliases=given["aliases"])
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(call(*operands, interleaved=True, eps=np.float32(1e-6)))
