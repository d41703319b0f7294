"""Run the suite of the causal convolution on the CUDA kernel, compiled for a CPU."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.emulation.cuda_emulation import on_device
from support.kernels.axes import axis
from support.kernels.convolution_suite import (
    CONVOLUTIONS,
    ConvolutionSuite,
    check_zeros,
    make_convolution,
)

from jax_nvfp4_moe.ops import causal_convolution

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


def convolution_on(library, multiprocessors=1):
    how = {"multiprocessors": multiprocessors}
    return on_device(library, causal_convolution, "convolution_cuda", **how)


class TestConvolution(ConvolutionSuite):
    case = axis(*CONVOLUTIONS)
    dtype = axis("bfloat16", "float16")

    @pytest.fixture
    def run(self, library):
        return convolution_on(library)


# Runs of 64 tokens, and of 8.
@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("case", ["rows of unequal length", "rows with padding", "three taps"])
def test_results_of_padding_are_zeros(library, case, multiprocessors):
    check_zeros(convolution_on(library, multiprocessors), case, "bfloat16")


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_the_length_of_a_run_changes_no_bit(library, case):
    """A device with many multiprocessors divides a prompt into short runs."""
    operands, options = make_convolution(case, jnp.dtype("bfloat16"))
    found = [
        convolution_on(library, multiprocessors)(*operands, **options)
        for multiprocessors in (1, 132)
    ]
    for one, other in zip(*(parts for parts, _ in found), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(found[0][1], found[1][1])
