"""Gradients on a GPU with kernels for transposed weights: compute capability 9.0."""

import jax
import pytest
from support.ops.gradient_suite import LayerGradientSuite, ProductGradientSuite

import jax_nvfp4_moe as nvfp4

pytestmark = pytest.mark.gpu


@pytest.fixture
def target():
    found = nvfp4.Target.current()
    if found.compute_capability != (9, 0):
        pytest.skip(f"needs compute capability 9.0, got {jax.devices()[0].device_kind}")
    return found


class TestProductGradient(ProductGradientSuite):
    pass


class TestLayerGradient(LayerGradientSuite):
    pass
