"""Test the gated delta rule for prompts in plain XLA, and the calls that its op makes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.axes import axis
from support.kernels.delta_rule_suite import (
    CHANNEL_DELTA,
    DELTA,
    ChannelDeltaRuleSuite,
    DeltaRuleSuite,
    make_rule,
    without_padding,
)
from support.kernels.recurrence_suite import find_padding
from support.ops.gradients import gradients

from jax_nvfp4_moe import NoBackendError, Target, ops

HOPPER = Target("cuda", (9, 0))
NAMES = ("q", "k", "v", "g", "beta", "state")


def operands():
    """Return the operands of a small call by name."""
    return dict(zip(NAMES, make_rule("one more token than a chunk"), strict=True))


run_plain = jax.jit(
    functools.partial(ops.gated_delta_rule, target=Target("cpu")), static_argnames="normalize"
)


# Chunks and sums differ on a GPU.
pytestmark = pytest.mark.usefixtures("on_cpu")


CASES = (
    "one token",
    "less than a chunk",
    "narrow keys and values",
    "strong decays",
    "rows of unequal length",
    "narrow rows of unequal length",
)


class RunsPlain:
    """Both forms of decays are one op."""

    @pytest.fixture
    def run(self):
        return run_plain


class TestDeltaRule(RunsPlain, DeltaRuleSuite):
    case = axis(*CASES)


class TestChannelDeltaRule(RunsPlain, ChannelDeltaRuleSuite):
    case = axis(*CASES)


def lowered(target, given, **options):
    """Return the text of a program."""
    rule = functools.partial(ops.gated_delta_rule, target=target, **options)
    return jax.jit(rule, donate_argnums=5).trace(*given).lower().as_text()


def called(target, **options):
    """Return the targets of the custom calls of a program."""
    text = lowered(target, operands().values(), **options)
    return re.findall(r"custom_call @(nvfp4\S+?)\(", text)


def test_the_kernel_runs_for_bfloat16_alone():
    assert called(HOPPER) == called(HOPPER, dtype=jnp.bfloat16) == ["nvfp4_delta_rule_cuda"]
    assert called(HOPPER, dtype=jnp.float16) == called(HOPPER, dtype="float32") == []
    assert called(Target("cpu")) == []
    with pytest.raises(NoBackendError, match="needs bfloat16, got float32"):
        called(HOPPER, dtype="float32", backend="delta_rule_cuda")


def test_value_heads_with_decays_of_channels_get_keys_of_their_own():
    """The kernel has one value head for each key head then; the op has its usual shapes."""
    given = operands()
    own = {"g": np.zeros((1, 65, 1, 3, 32), np.float32)}
    (call,) = (
        line
        for line in lowered(HOPPER, (given | own).values()).splitlines()
        if "@nvfp4_delta_rule_cuda" in line
    )
    tokens = "tensor<1x65x3x32xf32>, tensor<1x65x3x32xf32>, tensor<1x65x3x1x48xf32>"
    assert f"{tokens}, tensor<1x65x3x1x32xf32>, tensor<1x65x3x1xf32>" in call
    y, state = jax.eval_shape(functools.partial(ops.gated_delta_rule, **(given | own)))
    assert (y.shape, state.shape) == ((1, 65, 1, 3, 48), (1, 1, 3, 32, 48))


def test_the_derivative_for_a_gpu_calls_the_kernel_for_its_results_alone():
    """The tangents are plain XLA. A test on a GPU compares the gradients with the reference's."""

    def total(given):
        y, state = ops.gated_delta_rule(**given, target=HOPPER)
        return jnp.sum(jnp.square(y)) + jnp.sum(jnp.square(state))

    text = jax.jit(jax.grad(total)).trace(operands()).lower().as_text()
    assert re.findall(r"custom_call @(nvfp4\S+?)\(", text) == ["nvfp4_delta_rule_cuda"]


@pytest.mark.parametrize("recurrence", [DELTA, CHANNEL_DELTA], ids=["heads", "channels"])
def test_gradients_of_padding_are_zero(recurrence):
    """Gradients of true tokens and states are those without NaN in padding, and are finite."""
    name = "rows of unequal length"
    operands, lengths = recurrence.make(name), recurrence.lengths(name)

    @jax.jit
    def differentiate(*operands):
        return gradients(functools.partial(run_plain, lengths=lengths), *operands)

    found, clean = (
        map(np.asarray, differentiate(*given))
        for given in (operands, without_padding(operands, lengths))
    )
    padding = find_padding(lengths, recurrence.cases[name].tokens)
    for key, gradient, expected in zip(NAMES, found, clean, strict=True):
        np.testing.assert_array_equal(gradient, expected)
        assert np.isfinite(gradient).all()
        assert np.abs(gradient).max() > 0
        if key != "state":
            assert not np.asarray(gradient)[padding].any()


def test_the_kernel_gets_lengths_only_if_there_are_some():
    """An empty operand stands for rows that are whole."""
    for lengths, shape in ((None, "0"), (np.int32([65]), "1"), (np.uint8([9]), "1")):
        run = functools.partial(ops.gated_delta_rule, lengths=lengths, target=HOPPER)
        text = jax.jit(run).trace(*operands().values()).lower().as_text()
        (call,) = (line for line in text.splitlines() if "@nvfp4_delta_rule_cuda" in line)
        assert f"tensor<1x65x1x3xf32>, tensor<{shape}xi32>, tensor<1x1x3x32x48xf32>" in call


def test_the_derivative_with_lengths_is_plain_xla():
    def total(given, lengths):
        y, state = ops.gated_delta_rule(**given, lengths=lengths, target=HOPPER)
        return jnp.sum(jnp.square(y)) + jnp.sum(jnp.square(state))

    text = jax.jit(jax.grad(total)).trace(operands(), np.int32([9])).lower().as_text()
    assert re.findall(r"custom_call @(nvfp4\S+?)\(", text) == ["nvfp4_delta_rule_cuda"]


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("v", np.zeros((1, 65, 3, 48), np.float32), r"v: expected shape \[b, t, m, r, e\]"),
        ("q", np.zeros((1, 64, 1, 32), np.float32), r"q: expected shape \(1, 65, 1, 32\), got"),
        ("k", np.zeros((1, 65, 1, 16), np.float32), r"k: expected shape \(1, 65, 1, 32\), got"),
        ("g", np.zeros((1, 65, 3), np.float32), r"g: expected shape \(1, 65, 1, 3\), got"),
        ("g", np.zeros((1, 65, 1, 3, 16), np.float32), r"g: expected shape \(1, 65, 1, 3, 32\)"),
        ("beta", np.zeros((1, 65, 1, 2), np.float32), r"beta: expected shape \(1, 65, 1, 3\)"),
        ("state", np.zeros((1, 3, 32, 48), np.float32), r"state: expected shape \(1, 1, 3, 32, 4"),
        ("k", np.zeros((1, 65, 1, 32), np.int32), "k: expected a float dtype, got int32"),
        ("lengths", np.zeros(2, np.int32), r"lengths: expected integers \(1,\), got int32 \(2,\)"),
        ("lengths", np.int32(3), r"lengths: expected integers \(1,\), got int32 \(\)"),
        ("lengths", np.ones(1, np.float32), r"lengths: expected integers \(1,\), got float32"),
        ("dtype", "int8", "dtype: expected bfloat16, float16 or float32, got int8"),
    ],
)
def test_a_wrong_operand_is_named(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        ops.gated_delta_rule(**(operands() | {name: wrong}))
