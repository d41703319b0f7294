"""Test the causal convolution in plain XLA, and the calls that its op makes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.axes import axis
from support.kernels.convolution_suite import CONVOLUTIONS, ConvolutionSuite, make_convolution

from jax_nvfp4_moe import NoBackendError, Target, ops

HOPPER = Target("cuda", (9, 0))
STATIC = ("widths", "first", "heads", "stride")


run_on_cpu = jax.jit(
    functools.partial(ops.causal_convolution, target=Target("cpu")), static_argnames=STATIC
)


class TestConvolution(ConvolutionSuite):
    case = axis(*CONVOLUTIONS)
    dtype = axis("bfloat16", "float32")

    @pytest.fixture
    def run(self):
        return run_on_cpu


def called(case="Mamba-2", dtype="bfloat16", target=HOPPER, **changes):
    """Return the targets of the custom calls of a program."""
    operands, options = make_convolution(case, jnp.dtype(dtype))
    run = functools.partial(ops.causal_convolution, target=target, **(options | changes))
    return re.findall(r"custom_call @(nvfp4\S+?)\(", jax.jit(run).lower(*operands).as_text())


def test_the_kernel_runs_for_prompts_in_16_bits():
    kernel = ["nvfp4_causal_convolution_cuda"]
    assert called() == called(dtype="float16") == called("delta net, head by head") == kernel
    assert called(dtype="float32") == called(target=Target("cpu")) == []
    assert called("fewer tokens than taps") == []
    assert called("fewer tokens than taps", backend="convolution_cuda") == kernel
    with pytest.raises(NoBackendError, match="needs bfloat16 or float16, got float32"):
        called(dtype="float32", backend="convolution_cuda")


def test_columns_that_no_vector_divides_are_plain_xla():
    x, inputs = np.ones((1, 16, 12), jnp.bfloat16), np.ones((1, 3, 6), jnp.bfloat16)
    positions, weight = np.arange(16, dtype=np.int32)[None], np.ones((6, 4), np.float32)
    run = functools.partial(ops.causal_convolution, x, positions, inputs, weight=weight)
    parts, _ = jax.jit(functools.partial(run, first=5, target=HOPPER))()
    assert parts[0].shape == (1, 16, 6)
    with pytest.raises(NoBackendError, match=r"first column from 0 to .* got 5"):
        run(first=5, target=HOPPER, backend="convolution_cuda")


def test_the_derivative_for_a_gpu_calls_the_kernel_for_its_results_alone():
    """The tangents are plain XLA. A test on a GPU compares the gradients with the reference's."""
    (x, positions, inputs), options = make_convolution("Mamba-2", jnp.dtype("bfloat16"))

    def total(x, weight, bias):
        given = options | {"weight": weight, "bias": bias}
        parts, _ = ops.causal_convolution(x, positions, inputs, **given, target=HOPPER)
        return sum(jnp.sum(jnp.square(part)) for part in parts)

    text = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(x, options["weight"], options["bias"])
    assert re.findall(r"custom_call @(nvfp4\S+?)\(", text.as_text()) == [
        "nvfp4_causal_convolution_cuda"
    ]


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("x", np.zeros((1, 70), np.float32), r"x: expected bfloat16, .* \[b, t, n\]"),
        ("x", np.zeros((1, 70, 68), np.int32), r"x: expected .* got int32 \(1, 70, 68\)"),
        ("inputs", np.zeros((2, 3, 40), np.float32), r"inputs: expected float32 \[1, taps - 1, c"),
        ("inputs", np.zeros((1, 3, 40), np.float16), r"inputs: expected float32 .* got float16"),
        ("positions", np.zeros((1, 69), np.int32), r"positions: expected integers \(1, 70\)"),
        ("positions", np.zeros((1, 70), np.float32), "positions: expected integers .* float32"),
        ("weight", np.zeros((40, 3), np.float32), r"weight: expected shape \(40, 4\), got \(40, 3"),
        ("bias", np.zeros(24, np.float32), r"bias: expected shape \(40,\), got \(24,\)"),
        ("widths", (24, 8), r"widths: expected .* the channels of a head, 40 / 1; got \(24, 8\)"),
        ("widths", (10, 10, 10, 10), r"widths: expected one to three positive numbers"),
        ("widths", (48, -8), r"widths: expected one to three positive numbers"),
        ("heads", 0, r"widths: expected .* 40 / 0; got \(24, 8, 8\)"),
        ("first", -4, "first, heads and stride: expected heads .* got -4, 1 and 40"),
        ("first", 32, "heads of at least 40 columns in the 68 columns of x; got 32, 1 and 40"),
        ("stride", 36, "first, heads and stride: expected heads .* got 24, 1 and 36"),
    ],
)
def test_a_wrong_argument_is_named(name, wrong, message):
    operands, options = make_convolution("Mamba-2", jnp.dtype("float32"))
    given = dict(zip(("x", "positions", "inputs"), operands, strict=True)) | options
    with pytest.raises(ValueError, match=message):
        ops.causal_convolution(**(given | {name: wrong}))
