"""Run the suite of the causal convolution on a GPU, and check repeated calls and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.kernels.axes import axis
from support.kernels.convolution_suite import (
    CONVOLUTIONS,
    ConvolutionSuite,
    check_zeros,
    convolution_in_float64,
    make_convolution,
    plain_convolution,
)
from support.ops.gradients import gradients

from jax_nvfp4_moe import ops
from jax_nvfp4_moe.testing import assert_as_accurate_as

pytestmark = pytest.mark.gpu

STATIC = ("widths", "first", "heads", "stride")
convolution = functools.partial(ops.causal_convolution, backend="convolution_cuda")


class TestConvolution(ConvolutionSuite):
    case = axis(*CONVOLUTIONS)
    dtype = axis("bfloat16", "float16")

    @pytest.fixture
    def run(self):
        return jax.jit(convolution, static_argnames=STATIC)


def test_a_long_prompt_of_a_published_model():
    """The channels of Qwen3.6, whose prompt fills all multiprocessors with runs of 32 tokens."""
    rng, widths = np.random.default_rng(0), (2048, 2048, 4096)
    x = np.asarray(rng.normal(size=(1, 4096, 12352)), jnp.bfloat16)
    inputs = np.asarray(rng.normal(size=(1, 3, 8192)), jnp.bfloat16)
    operands = x, np.arange(4096, dtype=np.int32)[None], inputs
    options = {"weight": np.float32(rng.normal(size=(8192, 4))), "bias": None, "widths": widths}
    options |= {"first": 0, "heads": 1, "stride": 8192}
    run = jax.jit(functools.partial(convolution, **options), donate_argnums=2)
    parts, last = run(*map(jnp.asarray, operands))
    exact, want = convolution_in_float64(*operands, **options)
    plain = plain_convolution(operands, options)
    for got, yardstick, truth in zip(parts, plain, exact, strict=True):
        assert_as_accurate_as(got, yardstick, truth)
    np.testing.assert_array_equal(np.float32(last), np.float32(want))


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_results_are_the_same_each_time_and_in_each_row(case):
    rows = 40
    operands, options = make_convolution(case, jnp.dtype("bfloat16"))
    operands = [jnp.concatenate([jnp.asarray(x)] * rows) for x in operands]
    run = jax.jit(functools.partial(convolution, **options))
    first, second = (jax.tree.leaves(run(*operands)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        repeated = np.asarray(one).reshape(rows, -1)
        assert (repeated.view(np.uint8) == repeated[:1].view(np.uint8)).all()


@pytest.mark.parametrize("case", ["rows of unequal length", "rows with padding", "three taps"])
def test_results_of_padding_are_zeros(case):
    check_zeros(jax.jit(convolution, static_argnames=STATIC), case, "bfloat16")


def test_a_convolution_without_donation_keeps_its_operands():
    operands, options = make_convolution("rows with padding", jnp.dtype("bfloat16"))
    given = [jnp.asarray(x) for x in operands]
    jax.block_until_ready(jax.jit(functools.partial(convolution, **options))(*given))
    for kept, before in zip(given, operands, strict=True):
        np.testing.assert_array_equal(kept, before)


def test_gradients_and_batches():
    """Gradients are those of the reference, and `vmap` equals a loop."""
    (x, positions, inputs), options = make_convolution("Mamba-2", jnp.dtype("bfloat16"))
    names = ("weight", "bias")

    def gradient(backend):
        def run(x, inputs, weight, bias):
            given = options | {"weight": weight, "bias": bias, "backend": backend}
            return ops.causal_convolution(x, positions, inputs, **given)

        return gradients(run, *map(jnp.asarray, (x, inputs, *(options[name] for name in names))))

    for found, expected in zip(gradient("convolution_cuda"), gradient("reference"), strict=True):
        assert float(jnp.abs(expected).max()) > 0
        np.testing.assert_array_equal(found, expected)
    run = functools.partial(convolution, **options)
    stacked = jax.vmap(run)(*(jnp.stack([jnp.asarray(a)] * 2) for a in (x, positions, inputs)))
    for both, alone in zip(
        jax.tree.leaves(stacked), jax.tree.leaves(run(x, positions, inputs)), strict=True
    ):
        np.testing.assert_array_equal(both[1], alone)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("x", jnp.zeros((1, 70, 68)), "x: expected bfloat16 or float16, got float32"),
        ("x", jnp.zeros((70, 68), jnp.bfloat16), r"x \[b, t, n\]: expected 3 dimensions"),
        ("x", jnp.zeros((1, 70, 70), jnp.bfloat16), r"n \(x\): expected a positive multiple of 4"),
        ("positions", jnp.zeros((1, 69), jnp.int32), r"positions \[b, t\]: expected \[1, 70\]"),
        ("weight", jnp.zeros((40, 9)), r"taps \(weight\): expected at most 8, got 9"),
        ("weight", jnp.zeros((40, 1)), r"taps \(weight\): expected at least 2, got 1"),
        ("weight", jnp.zeros((36, 4)), r"weight \[c, taps\]: expected \[40, 4\], got \[36, 4\]"),
        ("bias", jnp.zeros(36), r"bias \[c\]: expected \[40\], got \[36\]"),
        ("inputs", jnp.zeros((1, 3, 40)), "inputs: expected bfloat16, got float32"),
        ("inputs", jnp.zeros((1, 2, 40), jnp.bfloat16), r"inputs \[b, taps - 1, c\]: expected"),
        ("widths", (24, 8, 6), "a width: expected a positive multiple of 4, got 6"),
        ("widths", (16, 16, 8), r"y0: expected \[1, 70, 16\], got \[1, 70, 24\]"),
        ("widths", (24, 8, 4, 4), "number of widths: expected at most 3, got 4"),
        ("first", 26, "first: expected 0 or a positive multiple of 4, got 26"),
        ("first", 32, r"first \+ heads \* stride: expected at most 68, got 72"),
        ("heads", 0, "heads: expected at least 1, got 0"),
        ("stride", 36, "stride: expected at least 40, got 36"),
        ("stride", 42, "stride: expected a positive multiple of 4, got 42"),
    ],
)
def test_kernel_names_a_wrong_operand(name, wrong, message):
    cuda_calls.register()
    operands, options = make_convolution("Mamba-2", jnp.dtype("bfloat16"))
    given = dict(zip(("x", "positions", "inputs"), operands, strict=True)) | options
    given[name] = wrong
    arrays = [jnp.asarray(given[key]) for key in ("x", "positions", "weight", "bias", "inputs")]
    results = [jax.ShapeDtypeStruct((1, 70, width), jnp.float32) for width in (24, 8, 8)]
    results.append(jax.ShapeDtypeStruct(arrays[4].shape, arrays[4].dtype))
    call = jax.ffi.ffi_call("nvfp4_causal_convolution_cuda", results, input_output_aliases={4: 3})
    numbers = {key: np.int64(given[key]) for key in ("first", "heads", "stride")}
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(call(*arrays, widths=np.array(given["widths"], np.int64), **numbers))
