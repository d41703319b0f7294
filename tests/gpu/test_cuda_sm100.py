"""Test the W4A4 kernels for compute capability 10.x on a GPU that has or emulates it.

A build with ``NVFP4_EMULATE_BLACKWELL`` runs everything except CUTLASS's GEMM on any GPU. Plain
arithmetic on the same arrays replaces that GEMM. `sm100_cases` has the expected outputs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.kernels.axes import axis
from support.kernels.gpu_suite import (
    GpuLayerSuite,
    GpuProducts,
    TokensAloneSuite,
    assert_graph_follows_the_routing,
    run_product,
)
from support.kernels.kernel_cases import BF16, make_product
from support.kernels.kernel_suite import ProductSuite
from support.kernels.sm100_cases import Sm100Layers, Sm100Products

pytestmark = pytest.mark.fp4_sm100

SUFFIX = "w4a4_sm100"


class TestLayer(Sm100Layers, GpuLayerSuite, TokensAloneSuite):
    suffix = axis(SUFFIX)


class TestProduct(Sm100Products, GpuProducts, ProductSuite):
    suffix = axis(SUFFIX)


@pytest.mark.parametrize(("mode", "dtype"), [("none", BF16), ("static", np.float16)])
def test_what_it_cannot_do_is_said(mode, dtype):
    cuda_calls.register()
    call = make_product("one_row", dtype, mode)
    named = "activation_scale" if mode == "none" else "x"
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{named}: expected .*got"):
        jnp.asarray(run_product(SUFFIX, call)).block_until_ready()


def test_graph_replay_follows_the_routing(tmp_path):
    assert_graph_follows_the_routing(tmp_path, SUFFIX, "token")
