"""Test the W4A4 layer for compute capability 10.x on a CPU, with CUTLASS's GEMM emulated.

Sorting, packing, quantization, activation and combination are the sources that a Blackwell GPU
runs. Plain arithmetic on the same arrays replaces the GEMM of CUTLASS's collectives.
"""

import pytest
from support.emulation.emulation_suite import EmulatedLayers, EmulatedProducts
from support.kernels.axes import axis
from support.kernels.kernel_suite import LayerSuite, ProductSuite
from support.kernels.sm100_cases import Sm100Layers, Sm100Products

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestLayer(Sm100Layers, EmulatedLayers, LayerSuite):
    engine = axis("sm100")


class TestProduct(Sm100Products, EmulatedProducts, ProductSuite):
    engine = axis("sm100")
