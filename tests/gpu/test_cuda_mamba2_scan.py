"""Run the suite of the recurrence of Mamba-2 on a GPU, and check repeated calls and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.kernels.axes import axis
from support.kernels.mamba2_scan_suite import (
    MAMBA2,
    SCAN_CASES,
    Mamba2KernelSuite,
    make_scan,
    without_padding,
)
from support.kernels.recurrence_suite import RowsAloneSuite
from support.ops.gradients import gradients

from jax_nvfp4_moe import ops
from jax_nvfp4_moe.backends.launch_facts import workspace_bytes_of_rows

pytestmark = pytest.mark.gpu

scan = functools.partial(ops.mamba2_scan, backend="mamba2_scan_cuda")


def each(function, operands):
    """Return the operands as arrays, with `function` applied to those that have rows."""
    return MAMBA2.each(function, map(jnp.asarray, operands))


class TestMamba2Scan(RowsAloneSuite, Mamba2KernelSuite):
    case = axis(*SCAN_CASES)

    @pytest.fixture
    def run(self):
        return jax.jit(scan)


@pytest.mark.parametrize("case", SCAN_CASES)
def test_scans_are_the_same_each_time(case):
    """Rows must not depend on each other, nor on when the copies of a chunk arrive."""
    rows = 40
    operands = each(lambda x: jnp.concatenate([x] * rows), make_scan(case))
    lengths = MAMBA2.lengths(case)
    lengths = None if lengths is None else np.tile(lengths, rows)
    run = jax.jit(functools.partial(scan, lengths=lengths))
    first, second = ([np.asarray(x).tobytes() for x in run(*operands)] for _ in range(2))
    assert first == second
    for result in map(np.asarray, run(*operands)):
        repeated = result.reshape(rows, -1)
        assert (repeated.view(np.uint8) == repeated[:1].view(np.uint8)).all()


def test_pieces_hand_their_state_on():
    """Pieces that end with a chunk compute what the whole prompt does, bit for bit."""
    *tokens, state = map(jnp.asarray, make_scan("no decay"))
    whole = scan(*tokens, state)
    pieces = []
    for start, end in ((0, 64), (64, 192), (192, 200)):
        own = each(lambda x, start=start, end=end: x[:, start:end], tokens)
        y, state = scan(*own, state)
        pieces.append(y)
    np.testing.assert_array_equal(jnp.concatenate(pieces, axis=1), whole[0])
    np.testing.assert_array_equal(state, whole[1])


def test_a_scan_without_donation_keeps_its_operands():
    operands = make_scan("usual widths, whole chunks")
    given = [jnp.asarray(x) for x in operands]
    jax.block_until_ready(jax.jit(scan)(*given))
    for kept, before in zip(given, operands, strict=True):
        np.testing.assert_array_equal(kept, before)


def test_gradients_and_batches():
    """Gradients are those of the reference, and `vmap` equals a loop, with lengths too."""
    lengths = jnp.asarray(MAMBA2.lengths("rows of unequal length"))
    operands = without_padding(make_scan("rows of unequal length"), lengths)
    *tokens, state = map(jnp.asarray, operands)

    def gradient(backend):
        def run(state):
            return ops.mamba2_scan(*tokens, state, lengths=lengths, backend=backend)

        return gradients(run, state)[0]

    expected = gradient("reference")
    assert float(jnp.abs(expected).max()) > 0
    np.testing.assert_array_equal(gradient("mamba2_scan_cuda"), expected)
    both = jnp.stack([lengths[::-1], lengths])
    mapped = jax.vmap(lambda own: scan(*tokens, state, lengths=own))(both)
    for found, alone in zip(mapped, scan(*tokens, state, lengths=lengths), strict=True):
        np.testing.assert_array_equal(found[1], alone)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("x", jnp.zeros((1, 65, 3, 46)), r"p \(x\): expected a positive multiple of 4, got 46"),
        ("x", jnp.zeros((1, 65, 3, 132)), r"p \(x\): expected at most 128, got 132"),
        ("dt", jnp.zeros((1, 64, 3)), r"dt \[b, t, h\]: expected \[1, 65, 3\], got \[1, 64, 3\]"),
        ("a", jnp.zeros(2), r"a \[h\]: expected \[3\], got \[2\]"),
        ("B", jnp.zeros((1, 65, 2, 32)), r"h \(x\): expected a positive multiple of 2, got 3"),
        ("B", jnp.zeros((1, 65, 1, 132)), r"n \(B\): expected at most 128, got 132"),
        ("C", jnp.zeros((1, 65, 1, 32), jnp.bfloat16), "C: expected float32, got bfloat16"),
        ("D", jnp.zeros(4), r"D \[h\]: expected \[3\], got \[4\]"),
        ("lengths", jnp.zeros(2, jnp.int32), r"lengths \[b\]: expected \[1\], got \[2\]"),
        ("lengths", jnp.zeros(1), "lengths: expected int32, got float32"),
        ("state", jnp.zeros((1, 3, 32, 48)), r"state \[b, h, p, n\]: expected \[1, 3, 48, 32\]"),
        ("workspace", 16, "workspace, bytes: expected at least"),
    ],
)
def test_kernel_names_a_wrong_operand(name, wrong, message):
    cuda_calls.register()
    names = ("x", "dt", "a", "B", "C", "D", "lengths", "state")
    *tokens, state = make_scan("one more token than a chunk")
    given = dict(zip(names, (*tokens, np.zeros(0, np.int32), state), strict=True))
    given |= {"workspace": workspace_bytes_of_rows("nvfp4_mamba2_scan_cuda", 2, 1, 3), name: wrong}
    operands = [jnp.asarray(given[name]) for name in names]
    results = [
        jax.ShapeDtypeStruct(operands[0].shape, jnp.float32),
        jax.ShapeDtypeStruct(operands[7].shape, jnp.float32),
        jax.ShapeDtypeStruct((given["workspace"],), jnp.uint8),
    ]
    call = jax.ffi.ffi_call("nvfp4_mamba2_scan_cuda", results, input_output_aliases={7: 1})
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(call(*operands))
