"""Test the decoding steps of recurrent mixers in plain XLA, and the calls that their ops make."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.axes import axis
from support.kernels.recurrent_suite import (
    DELTA_CASES,
    MAMBA_CASES,
    DeltaStepSuite,
    KimiStepSuite,
    Mamba2StepSuite,
    make_delta,
    make_kimi,
    make_mamba,
)

from jax_nvfp4_moe import NoBackendError, Target, ops

HOPPER = Target("cuda", (9, 0))


def zeros(shape):
    return np.zeros(shape, np.float32)


def operands(case="three value heads", dtype="float32"):
    """Return the tokens and the keyword arguments of a call."""
    tokens, weights = make_delta(case, jnp.dtype(dtype))
    return tuple(map(jnp.asarray, tokens)), {
        **weights,
        "interleaved": DELTA_CASES[case].interleaved,
    }


delta_step = jax.jit(
    functools.partial(ops.gated_delta_step, target=Target("cpu")),
    static_argnames=("interleaved", "eps"),
)
kimi_step = jax.jit(
    functools.partial(ops.kimi_delta_step, target=Target("cpu")),
    static_argnames=("lower_bound", "eps"),
)
mamba2_step = jax.jit(
    functools.partial(ops.mamba2_step, target=Target("cpu")),
    static_argnames=("activation", "step_limits", "eps"),
)


class TestDeltaStep(DeltaStepSuite):
    case = axis("three value heads", "seven key heads", "no past", "a long past", "rates apart")
    dtype = axis("bfloat16", "float32")

    @pytest.fixture
    def run(self):
        return delta_step


class TestKimiStep(KimiStepSuite):
    case = axis("three heads", "no past", "a long past, rates apart", "wide keys")
    dtype = axis("bfloat16", "float32")

    @pytest.fixture
    def run(self):
        return kimi_step


class TestMamba2Step(Mamba2StepSuite):
    case = axis("small", "no past", "a long past")
    dtype = axis("bfloat16", "float32")

    @pytest.fixture
    def run(self):
        return mamba2_step


def lowered(op, target):
    """Return the program of a step with full widths in bfloat16."""
    if op == "delta":
        tokens, weights = operands("full widths", "bfloat16")
        step = functools.partial(ops.gated_delta_step, **weights, target=target)
    elif op == "kimi_delta":
        tokens, weights = make_kimi("full widths", jnp.dtype("bfloat16"))
        call = functools.partial(ops.kimi_delta_step, **weights, target=target)

        def step(projected, positions, inputs, state):
            return call(projected, positions=positions, inputs=inputs, state=state)
    else:
        tokens, weights = make_mamba("usual sizes", jnp.dtype("bfloat16"))
        step = functools.partial(ops.mamba2_step, **weights, target=target)
    return jax.jit(step, donate_argnums=(2, 3)).trace(*tokens).lower().as_text()


@pytest.mark.parametrize("op", ["delta", "kimi_delta", "mamba2"])
def test_the_kernel_takes_the_joined_projection_and_writes_in_place(op):
    text = lowered(op, HOPPER)
    assert re.findall(r"custom_call @(\S+?)\(", text) == [f"nvfp4_{op}_step_cuda"]
    assert len(re.findall("output_operand_alias<", text)) == 2
    assert "slice" not in text
    assert "custom_call" not in lowered(op, Target("cpu"))


def test_the_derivative_for_a_gpu_calls_the_kernel_for_its_results_alone():
    """The tangents are plain XLA. A test on a GPU compares the gradients with the reference's."""
    tokens, weights = operands()
    floats = {name: value for name, value in weights.items() if name != "interleaved"}

    def total(floats, state):
        step = functools.partial(ops.gated_delta_step, target=HOPPER, interleaved=True)
        return sum(jnp.sum(jnp.square(x)) for x in step(*tokens[:3], state, **floats))

    text = jax.jit(jax.grad(total, (0, 1))).trace(floats, tokens[3]).lower().as_text()
    assert re.findall(r"custom_call @(nvfp4\S+?)\(", text) == ["nvfp4_delta_step_cuda"]


def test_gradients_of_a_kimi_step_flow_to_all_float_arguments():
    """For a GPU too, where the kernel computes the results alone."""
    (projected, positions, inputs, state), weights = make_kimi(
        "full widths, rates apart, bounded", np.dtype("float32")
    )
    floats = {"projected": projected, "inputs": inputs, "state": state, **weights}

    def total(floats, target):
        step = functools.partial(ops.kimi_delta_step, lower_bound=-5.0, target=target)
        return sum(jnp.sum(jnp.square(x)) for x in step(positions=positions, **floats))

    gradient = jax.jit(jax.grad(total), static_argnums=1)
    for name, found in gradient(floats, Target("cpu")).items():
        assert np.isfinite(found).all(), name
        assert np.abs(found).max() > 0, name
    text = gradient.trace(floats, HOPPER).lower().as_text()
    assert re.findall(r"custom_call @(nvfp4\S+?)\(", text) == ["nvfp4_kimi_delta_step_cuda"]


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("state", zeros((2, 6, 16, 8)), r"state: expected shape \[b, m, r, d, e\]"),
        ("projected", zeros((2, 1, 171)), r"projected: expected shape \(2, 1, 172\), got"),
        ("projected", np.zeros((2, 1, 172), np.int32), "projected: expected bfloat16, float16"),
        ("positions", np.zeros((2, 2), np.int32), r"positions: expected shape \(2, 1\)"),
        ("inputs", zeros((2, 3, 112)), r"inputs: expected shape \(2, 2, 112\)"),
        ("conv_weight", zeros((110, 3)), r"conv_weight: expected shape \(112, 3\)"),
        ("A_log", zeros(5), r"A_log: expected shape \(6,\)"),
        ("dt_bias", zeros((1, 6)), r"dt_bias: expected shape \(6,\)"),
        ("norm", zeros(16), r"norm: expected shape \(8,\)"),
        ("rates", zeros((2, 1, 6)), r"rates: expected float32 \(2, 1, 12\), or None"),
        ("rates", zeros((2, 1, 12)), r"projected: expected shape \(2, 1, 160\), got"),
    ],
)
def test_a_wrong_operand_is_named(name, wrong, message):
    tokens, weights = operands()
    names = ("projected", "positions", "inputs", "state")
    given = dict(zip(names, tokens, strict=True)) | weights
    with pytest.raises(ValueError, match=message):
        ops.gated_delta_step(**(given | {name: wrong}))


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("state", zeros((2, 3, 1, 16, 8)), r"state: expected shape \[b, n, d, e\]"),
        ("projected", zeros((2, 1, 122)), r"projected: expected shape \(2, 1, 123\), got"),
        ("decays", zeros((2, 1, 47)), r"decays: expected float32 \(2, 1, 48\), got"),
        ("gates", np.zeros((2, 1, 24), np.float16), r"gates: expected float32 \(2, 1, 24\), got f"),
        ("rates", zeros((2, 1, 2)), r"rates: expected float32 \(2, 1, 3\), got"),
        ("rates", zeros((2, 1, 3)), r"projected: expected shape \(2, 1, 120\), got"),
        ("A_log", zeros(4), r"A_log: expected shape \(3,\)"),
        ("dt_bias", zeros(3), r"dt_bias: expected shape \(48,\)"),
        ("lower_bound", 0.0, "lower_bound: expected a negative number or None, got 0.0"),
    ],
)
def test_a_wrong_operand_of_kimi_is_named(name, wrong, message):
    tokens, weights = make_kimi("three heads", np.dtype("float32"))
    names = ("projected", "positions", "inputs", "state")
    given = dict(zip(names, tokens, strict=True)) | weights
    with pytest.raises(ValueError, match=message):
        ops.kimi_delta_step(**(given | {name: wrong}))


def test_a_state_that_the_kernel_does_not_hold_runs_on_the_reference():
    _, weights = operands()
    wide = zeros((1, 1, 1, 132, 8))
    given = {
        "projected": zeros((1, 1, 282)),
        "positions": np.zeros((1, 1), np.int32),
        "inputs": zeros((1, 3, 272)),
        "state": wide,
        "conv_weight": zeros((272, 4)),
        **{name: weights[name][:1] for name in ("A_log", "dt_bias")},
        "norm": weights["norm"],
    }
    step = functools.partial(ops.gated_delta_step, target=HOPPER)
    assert "custom_call" not in jax.jit(step).trace(**given).lower().as_text()
    with pytest.raises(NoBackendError, match=r"key width from 4 to 128 in multiples of 4; got 132"):
        step(**given, backend="recurrent_cuda")


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("state", zeros((2, 6, 16)), r"state: expected shape \[b, h, p, n\]"),
        ("projected", zeros((2, 1, 245)), r"projected: expected shape \(2, 1, 246\), got"),
        ("conv_weight", zeros((145, 3)), "conv_weight: expected 96 rows, and 16 more for each"),
        ("conv_weight", zeros((160, 3)), "of some groups that divide 6 heads"),
        ("conv_bias", zeros(143), r"conv_bias: expected shape \(144,\)"),
        ("D", zeros((6, 1)), r"D: expected shape \(6,\)"),
        ("norm", zeros(16), r"norm: expected shape \(96,\)"),
        ("activation", "silu", "activation: expected one that is not gated, got 'silu'"),
    ],
)
def test_a_wrong_operand_of_mamba2_is_named(name, wrong, message):
    tokens, weights = make_mamba("small", np.dtype("float32"))
    names = ("projected", "positions", "inputs", "state")
    given = dict(zip(names, tokens, strict=True)) | weights | MAMBA_CASES["small"].options
    with pytest.raises(ValueError, match=message):
        ops.mamba2_step(**(given | {name: wrong}))
