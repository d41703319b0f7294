"""Run the suite of the gated delta rule on a GPU, and check repeated calls and errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.kernels.axes import axis
from support.kernels.delta_rule_suite import (
    CHANNEL_DELTA,
    DELTA,
    RULE_CASES,
    ChannelDeltaRuleSuite,
    DeltaRuleSuite,
    make_case,
    make_rule,
    rule_in_float64,
    rule_in_tf32,
    without_padding,
)
from support.kernels.recurrence_suite import RowsAloneSuite
from support.ops.gradients import gradients

from jax_nvfp4_moe import ops
from jax_nvfp4_moe.backends.launch_facts import workspace_bytes_of_rows
from jax_nvfp4_moe.testing import assert_as_accurate_as

pytestmark = pytest.mark.gpu

delta_rule = functools.partial(ops.gated_delta_rule, backend="delta_rule_cuda")


class RunsOnGpu:
    """The kernels of both forms of decays are one op."""

    @pytest.fixture
    def run(self):
        return jax.jit(delta_rule, static_argnames="normalize")


class TestDeltaRule(RunsOnGpu, RowsAloneSuite, DeltaRuleSuite):
    case = axis(*RULE_CASES)


class TestChannelDeltaRule(RunsOnGpu, RowsAloneSuite, ChannelDeltaRuleSuite):
    case = axis(*RULE_CASES)


BOTH = pytest.mark.parametrize("recurrence", [DELTA, CHANNEL_DELTA], ids=["heads", "channels"])


@BOTH
@pytest.mark.parametrize("case", RULE_CASES)
def test_rules_are_the_same_each_time(recurrence, case):
    """Rows must not depend on each other, nor on when the copies of a chunk arrive."""
    rows = 40
    operands = [jnp.concatenate([jnp.asarray(x)] * rows) for x in recurrence.make(case)]
    lengths = recurrence.lengths(case)
    lengths = None if lengths is None else np.tile(lengths, rows)
    run = jax.jit(functools.partial(delta_rule, lengths=lengths))
    first, second = ([np.asarray(x).tobytes() for x in run(*operands)] for _ in range(2))
    assert first == second
    for result in map(np.asarray, run(*operands)):
        repeated = result.reshape(rows, -1)
        assert (repeated.view(np.uint8) == repeated[:1].view(np.uint8)).all()


@BOTH
def test_pieces_hand_their_state_on(recurrence):
    """Pieces that end with a chunk compute what the whole prompt does, bit for bit."""
    *tokens, state = map(jnp.asarray, recurrence.make("three keys and no decay"))
    whole = delta_rule(*tokens, state)
    pieces = []
    for start, end in ((0, 64), (64, 192), (192, 200)):
        y, state = delta_rule(*(x[:, start:end] for x in tokens), state)
        pieces.append(y)
    np.testing.assert_array_equal(jnp.concatenate(pieces, axis=1), whole[0])
    np.testing.assert_array_equal(state, whole[1])


def test_several_value_heads_may_have_decays_of_channels(monkeypatch):
    """Each value head then gets a copy of its keys."""
    case = dataclasses.replace(RULE_CASES["less than a chunk"], tokens=70, channel_decays=True)
    operands = make_case(case, np.random.default_rng(0))
    exact, plain = rule_in_float64(*operands), rule_in_tf32(operands, monkeypatch)
    for got, want, yardstick in zip(delta_rule(*operands), exact, plain, strict=True):
        assert_as_accurate_as(got, yardstick, want)


def test_lengths_may_be_traced_and_mapped():
    """Under `vmap`, each call has its own lengths; gradients are those of the reference."""
    lengths = jnp.asarray(DELTA.lengths("rows of unequal length"))
    operands = without_padding(make_rule("rows of unequal length"), lengths)
    tokens, state = list(map(jnp.asarray, operands[:5])), jnp.asarray(operands[5])
    both = jnp.stack([lengths[::-1], lengths])
    mapped = jax.vmap(lambda own: delta_rule(*tokens, state, lengths=own))(both)
    for found, alone in zip(mapped, delta_rule(*tokens, state, lengths=lengths), strict=True):
        np.testing.assert_array_equal(found[1], alone)

    def gradient(backend):
        def run(state):
            return ops.gated_delta_rule(*tokens, state, lengths=lengths, backend=backend)

        return gradients(run, state)[0]

    np.testing.assert_array_equal(gradient("delta_rule_cuda"), gradient("reference"))


def test_a_rule_without_donation_keeps_its_operands():
    operands = make_rule("full widths, whole chunks")
    given = [jnp.asarray(x) for x in operands]
    jax.block_until_ready(jax.jit(delta_rule)(*given))
    for kept, before in zip(given, operands, strict=True):
        np.testing.assert_array_equal(kept, before)


@BOTH
def test_gradients_and_batches(recurrence):
    """Gradients are those of the reference, and `vmap` equals a loop."""
    *tokens, state = map(jnp.asarray, recurrence.make("one more token than a chunk"))

    def gradient(backend):
        def run(state):
            return ops.gated_delta_rule(*tokens, state, backend=backend)

        return gradients(run, state)[0]

    expected = gradient("reference")
    assert float(jnp.abs(expected).max()) > 0
    np.testing.assert_array_equal(gradient("delta_rule_cuda"), expected)
    stacked = [jnp.stack([x, x]) for x in (*tokens, state)]
    for both, alone in zip(jax.vmap(delta_rule)(*stacked), delta_rule(*tokens, state), strict=True):
        np.testing.assert_array_equal(both[1], alone)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("q", jnp.zeros((1, 64, 1, 32)), r"q \[b, t, m, d\]: expected \[1, 65, 1, 32\]"),
        ("q", jnp.zeros((1, 65, 1, 132)), r"d \(q\): expected at most 128, got 132"),
        ("q", jnp.zeros((1, 65, 1, 30)), r"d \(q\): expected a positive multiple of 4, got 30"),
        ("k", jnp.zeros((1, 65, 1, 32), jnp.bfloat16), "k: expected float32, got bfloat16"),
        ("v", jnp.zeros((1, 65, 1, 3, 46)), r"e \(v\): expected a positive multiple of 4"),
        ("g", jnp.zeros((1, 65, 1, 2)), r"g \[b, t, m, r\]: expected \[1, 65, 1, 3\]"),
        ("g", jnp.zeros((1, 65, 1, 3, 32)), r"g \[b, t, m, 1, d\]: expected \[1, 65, 1, 1, 32\]"),
        ("g", jnp.zeros((1, 65, 1, 1, 32)), r"r \(v\), with a decay for each channel: expected at"),
        ("beta", jnp.zeros((1, 64, 1, 3)), r"beta \[b, t, m, r\]: expected \[1, 65, 1, 3\]"),
        ("lengths", jnp.zeros(2, jnp.int32), r"lengths \[b\]: expected \[1\], got \[2\]"),
        ("lengths", jnp.zeros(1), "lengths: expected int32, got float32"),
        ("state", jnp.zeros((1, 1, 3, 32, 44)), r"state \[b, m, r, d, e\]: expected \[1, 1, 3, "),
        ("workspace", 16, "workspace, bytes: expected at least"),
    ],
)
def test_kernel_names_a_wrong_operand(name, wrong, message):
    cuda_calls.register()
    names = ("q", "k", "v", "g", "beta", "lengths", "state")
    *tokens, state = make_rule("one more token than a chunk")
    given = dict(zip(names, (*tokens, np.zeros(0, np.int32), state), strict=True))
    given |= {
        "workspace": workspace_bytes_of_rows("nvfp4_delta_rule_cuda", 2, 1, 3, False),
        name: wrong,
    }
    operands = [jnp.asarray(given[name]) for name in names]
    results = [
        jax.ShapeDtypeStruct((1, 65, 1, 3, 48), jnp.float32),
        jax.ShapeDtypeStruct(operands[6].shape, jnp.float32),
        jax.ShapeDtypeStruct((given["workspace"],), jnp.uint8),
    ]
    call = jax.ffi.ffi_call("nvfp4_delta_rule_cuda", results, input_output_aliases={6: 1})
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(call(*operands, normalize=False))
