"""Test the recurrence of Mamba-2 for prompts in plain XLA, and the calls that its op makes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.axes import axis
from support.kernels.mamba2_scan_suite import (
    MAMBA2,
    Mamba2ScanSuite,
    make_scan,
    without_padding,
)
from support.kernels.recurrence_suite import find_padding
from support.ops.gradients import gradients

from jax_nvfp4_moe import NoBackendError, Target, ops

HOPPER = Target("cuda", (9, 0))
NAMES = ("x", "dt", "a", "B", "C", "D", "state")


def operands():
    """Return the operands of a small call by name."""
    return dict(zip(NAMES, make_scan("one more token than a chunk"), strict=True))


run_plain = jax.jit(functools.partial(ops.mamba2_scan, target=Target("cpu")))


# Chunks and sums differ on a GPU.
pytestmark = pytest.mark.usefixtures("on_cpu")


class TestMamba2Scan(Mamba2ScanSuite):
    case = axis(
        "one token",
        "less than a chunk",
        "narrow widths",
        "strong decays",
        "rows of unequal length",
        "narrow rows of unequal length",
    )

    @pytest.fixture
    def run(self):
        return run_plain


def called(target, **options):
    """Return the targets of the custom calls of a program."""
    scan = functools.partial(ops.mamba2_scan, target=target, **options)
    text = jax.jit(scan, donate_argnums=6).trace(*operands().values()).lower().as_text()
    return re.findall(r"custom_call @(nvfp4\S+?)\(", text)


def test_the_kernel_runs_for_bfloat16_alone():
    assert called(HOPPER) == called(HOPPER, dtype=jnp.bfloat16) == ["nvfp4_mamba2_scan_cuda"]
    assert called(HOPPER, dtype=jnp.float16) == called(HOPPER, dtype="float32") == []
    assert called(Target("cpu")) == []
    with pytest.raises(NoBackendError, match="needs bfloat16, got float32"):
        called(HOPPER, dtype="float32", backend="mamba2_scan_cuda")


@pytest.mark.parametrize("lengths", [None, np.int32([9])])
def test_the_derivative_for_a_gpu_calls_the_kernel_for_its_results_alone(lengths):
    """The tangents are plain XLA. A test on a GPU compares the gradients with the reference's."""

    def total(given):
        y, state = ops.mamba2_scan(**given, lengths=lengths, target=HOPPER)
        return jnp.sum(jnp.square(y)) + jnp.sum(jnp.square(state))

    text = jax.jit(jax.grad(total)).trace(operands()).lower().as_text()
    assert re.findall(r"custom_call @(nvfp4\S+?)\(", text) == ["nvfp4_mamba2_scan_cuda"]


def test_gradients_of_padding_are_zero():
    """Gradients of true tokens and states are those without NaN in padding, and are finite."""
    name = "rows of unequal length"
    operands, lengths = make_scan(name), MAMBA2.lengths(name)

    @jax.jit
    def differentiate(*operands):
        return gradients(functools.partial(run_plain, lengths=lengths), *operands)

    found, clean = (
        map(np.asarray, differentiate(*given))
        for given in (operands, without_padding(operands, lengths))
    )
    padding = find_padding(lengths, MAMBA2.cases[name].tokens)
    for key, gradient, expected in zip(NAMES, found, clean, strict=True):
        np.testing.assert_array_equal(gradient, expected)
        assert np.isfinite(gradient).all()
        assert np.abs(gradient).max() > 0
        if key in ("x", "dt", "B", "C"):
            assert not np.asarray(gradient)[padding].any()


def test_the_kernel_gets_lengths_only_if_there_are_some():
    """An empty operand stands for rows that are whole."""
    for lengths, shape in ((None, "0"), (np.int32([65]), "1"), (np.uint8([9]), "1")):
        run = functools.partial(ops.mamba2_scan, lengths=lengths, target=HOPPER)
        text = jax.jit(run).trace(*operands().values()).lower().as_text()
        (call,) = (line for line in text.splitlines() if "@nvfp4_mamba2_scan_cuda" in line)
        assert f"tensor<3xf32>, tensor<{shape}xi32>, tensor<1x3x48x32xf32>" in call


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("x", np.zeros((1, 65, 144), np.float32), r"x and B: expected shapes \[b, t, h, p\] and"),
        ("B", np.zeros((1, 65, 32), np.float32), r"x and B: expected shapes \[b, t, h, p\] and"),
        ("B", np.zeros((1, 65, 2, 32), np.float32), "groups that divides 3 heads, got 2"),
        ("B", np.zeros((1, 65, 0, 32), np.float32), "groups that divides 3 heads, got 0"),
        ("dt", np.zeros((1, 64, 3), np.float32), r"dt: expected shape \(1, 65, 3\), got \(1, 64"),
        ("a", np.zeros(2, np.float32), r"a: expected shape \(3,\), got \(2,\)"),
        ("C", np.zeros((1, 65, 1, 16), np.float32), r"C: expected shape \(1, 65, 1, 32\), got"),
        ("D", np.zeros((3, 1), np.float32), r"D: expected shape \(3,\), got \(3, 1\)"),
        ("state", np.zeros((1, 3, 32, 48), np.float32), r"state: expected shape \(1, 3, 48, 32\)"),
        ("C", np.zeros((1, 65, 1, 32), np.int32), "C: expected a float dtype, got int32"),
        ("lengths", np.zeros(2, np.int32), r"lengths: expected integers \(1,\), got int32 \(2,\)"),
        ("lengths", np.ones(1, np.float32), r"lengths: expected integers \(1,\), got float32"),
        ("dtype", "int8", "dtype: expected bfloat16, float16 or float32, got int8"),
    ],
)
def test_a_wrong_operand_is_named(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        ops.mamba2_scan(**(operands() | {name: wrong}))
