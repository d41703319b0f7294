"""Run the suite of the causal convolution on the CUDA kernel, compiled for a CPU."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support.emulation import recurrent_emulation
from support.kernels.axes import axis
from support.kernels.convolution_suite import (
    CONVOLUTIONS,
    ConvolutionSuite,
    check_zeros,
    make_convolution,
)

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestConvolution(ConvolutionSuite):
    case = axis(*CONVOLUTIONS)
    dtype = axis("bfloat16", "float16")

    @pytest.fixture
    def run(self, library):
        return functools.partial(recurrent_emulation.causal_convolution, library)


# Runs of 64 tokens, and of 8.
@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("case", ["rows of unequal length", "rows with padding", "three taps"])
def test_results_of_padding_are_zeros(library, case, multiprocessors):
    run = functools.partial(
        recurrent_emulation.causal_convolution, library, multiprocessors=multiprocessors
    )
    check_zeros(run, case, "bfloat16")


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_the_length_of_a_run_changes_no_bit(library, case):
    """A device with many multiprocessors divides a prompt into short runs."""
    operands, options = make_convolution(case, jnp.dtype("bfloat16"))
    found = [
        recurrent_emulation.causal_convolution(
            library, *operands, **options, multiprocessors=multiprocessors
        )
        for multiprocessors in (1, 132)
    ]
    for one, other in zip(*(parts for parts, _ in found), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(found[0][1], found[1][1])
