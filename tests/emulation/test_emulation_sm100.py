"""The W4A4 layer of compute capability 10.x on a CPU, its one foreign product emulated.

Sorting, packing, quantization, activation and combination are the sources that a Blackwell GPU
runs; the product of CUTLASS's collectives is plain arithmetic on the arrays that they read.
"""

import pytest
from axes import axis
from emulation_suite import EmulatedLayers, EmulatedProducts
from kernel_suite import LayerSuite, ProductSuite
from sm100_cases import Sm100Layers, Sm100Products

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


class TestLayer(Sm100Layers, EmulatedLayers, LayerSuite):
    engine = axis("sm100")


class TestProduct(Sm100Products, EmulatedProducts, ProductSuite):
    engine = axis("sm100")
