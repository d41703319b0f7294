"""Run the gradients that have a kernel on a CPU: products with transposed weights."""

import pytest
from support.emulation import cuda_emulation
from support.ops.gradient_suite import LayerGradientSuite, ProductGradientSuite

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]


@pytest.fixture
def target(library):
    library.configure(3, cuda_emulation.HOPPER_SHARED_BYTES, 0, 0, 0)
    return cuda_emulation.TARGET


class TestProductGradient(ProductGradientSuite):
    pass


class TestLayerGradient(LayerGradientSuite):
    pass
