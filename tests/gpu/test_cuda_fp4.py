"""Test the engine for FP4 tensor cores, the target w4a4_sm120, on a GPU.

A build with the CMake option NVFP4_EMULATE_BLACKWELL runs the same kernel on a Hopper GPU, where
one instruction is emulated. `test_emulation_fp4` runs the suites of this module on a CPU.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.kernels.axes import axis
from support.kernels.float64_layer import Options
from support.kernels.fp4_suite import FusedQuantizationSuite
from support.kernels.gpu_suite import (
    GpuLayerSuite,
    GpuProducts,
    assert_graph_follows_the_routing,
    run_layer,
)
from support.kernels.kernel_cases import BF16, make_layer
from support.kernels.kernel_suite import ProductSuite, assert_accurate, combinations

SUFFIX = "w4a4_sm120"
MODES = ("static", "token")


@pytest.mark.fp4
class TestLayer(GpuLayerSuite, FusedQuantizationSuite):
    suffix = axis(SUFFIX)
    numbers = axis(*combinations(("bf16", "f16"), MODES))
    case_numbers = axis(*combinations(("bf16", "f16"), MODES))
    activation_numbers = axis(*combinations(("bf16",), MODES))

    @pytest.fixture
    def sixteen_bits(self):
        return lambda call: run_layer("w4a16_sm80", call)


@pytest.mark.fp4
class TestProduct(GpuProducts, ProductSuite):
    suffix = axis(SUFFIX)
    numbers = axis(*combinations(("bf16", "f16"), MODES))
    case_numbers = axis(*combinations(("bf16", "f16"), MODES))
    exact_dtype = axis("bf16", "f16")


@pytest.mark.fp4
@pytest.mark.parametrize("mode", MODES)
def test_graph_replay_follows_the_routing(tmp_path, mode):
    assert_graph_follows_the_routing(tmp_path, SUFFIX, mode)


@pytest.mark.fp4
@pytest.mark.parametrize(
    ("dtype", "mode", "why"),
    [
        (np.float32, "static", "x: expected bfloat16 or float16, got float32"),
        (BF16, "none", "activation_scale: expected static or token, got none"),
    ],
)
def test_what_it_cannot_do_is_named(dtype, mode, why):
    cuda_calls.register()
    call = make_layer("fills_no_tile", dtype, Options(activation_scale=mode))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=why):
        run_layer(SUFFIX, call).block_until_ready()


@pytest.mark.hopper
def test_a_build_without_code_for_this_device_says_so():
    cuda_calls.register()
    extension = importlib.import_module("jax_nvfp4_moe._nvfp4_cuda")
    call = make_layer("smallest", BF16, Options(activation_scale="static"))
    if extension.emulates_blackwell():
        assert_accurate(lambda call: run_layer(SUFFIX, call), call)
        return
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"device: expected .*12\.x"):
        run_layer(SUFFIX, call).block_until_ready()
    other = jnp.ones(3) + 1  # the next kernel must not report this error
    assert other.sum() == 6
