"""Run the suite of `prepare_heads` on its CUDA kernel, compiled for a CPU, and test its sines."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.emulation import cuda_emulation
from support.kernels.axes import axis
from support.kernels.fp8_head_suite import FP8_HEAD_CASES, Fp8HeadSuite
from support.kernels.head_suite import CASES, PAIRS, HeadSuite, prepare

from jax_nvfp4_moe.testing import assert_as_accurate_as

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


def run_heads(library, call):
    run = cuda_emulation.on_device(library, prepare, "heads_cuda")
    return run(call.operands, options=call.options)


class TestHeads(HeadSuite):
    case = axis(*CASES)
    pair = axis(*PAIRS)

    @pytest.fixture
    def run(self, library):
        return lambda call: run_heads(library, call)


class TestFp8(Fp8HeadSuite):
    case = axis(*FP8_HEAD_CASES)
    pair = axis(*PAIRS)

    @pytest.fixture
    def run(self, library):
        return lambda call: run_heads(library, call)


@pytest.mark.parametrize("largest", [1.0, 100.0, 2.0**17, 2.0**18])
def test_sines_are_as_accurate_as_those_of_xla(library, largest):
    rng = np.random.default_rng(0)
    angles = np.float32(rng.uniform(-largest, largest, 200_000))
    # Multiples of a quarter turn lose most digits.
    quarters = np.arange(int(largest / (np.pi / 2)) + 1)[-50_000:] * (np.pi / 2)
    angles = np.concatenate([angles, np.float32(quarters)])
    got = cuda_emulation.sines(library, angles)
    for result, plain, exact in zip(got, (jnp.sin, jnp.cos), (np.sin, np.cos), strict=True):
        assert_as_accurate_as(result, plain(angles), exact(np.float64(angles)))


def test_sines_of_padding_are_finite(library):
    angles = np.float32([2**30, 2**31, 1e30, -1e30])
    for result in cuda_emulation.sines(library, angles):
        assert (abs(result) <= 1).all()
