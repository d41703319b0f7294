"""Compare every byte of the CUDA quantizer with the exact quantizer in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.kernels import quantizer_suite as cases
from support.kernels.quantizer_suite import EveryScaleSuite, QuantizerSuite

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.numerics import nvfp4 as formats

dtypes = pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES.keys())
pytestmark = pytest.mark.gpu


def quantize(x, g, layout="linear"):
    cuda_calls.register()
    return jax.jit(lambda x, g: cuda_calls.quantize(x, g, layout))(x, g)


class TestQuantizer(QuantizerSuite, EveryScaleSuite):
    @pytest.fixture
    def run(self):
        return quantize


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "values"), [(cases.BF16, 10**8), (cases.F16, 10**7), (cases.F32, 10**7)]
)
def test_quantizer_on_many_random_values(dtype, values):
    """Three global scales take turns.

    0.0173 saturates some rows and gives others the smallest block scales.
    """
    rows = 4096
    for chunk in range(-(-values // (rows * 1024))):
        g = (0.0173, None, 1e-4)[chunk % 3]
        cases.assert_exact(quantize, cases.random(dtype, rows, chunk), g)


@dtypes
def test_op_is_formats_quantize(dtype):
    """Both quantizers run compiled on this device."""
    x = jnp.asarray(cases.random(dtype, 517, 5))
    got = jax.jit(nvfp4.ops.quantize_nvfp4)(x)
    want = jax.jit(formats.quantize)(x)
    np.testing.assert_array_equal(got.packed, want[0])
    np.testing.assert_array_equal(got.block_scale.view(jnp.uint8), want[1].view(jnp.uint8))
    np.testing.assert_array_equal(got.global_scale, want[2])


def test_quantizer_is_the_same_each_time():
    cuda_calls.register()
    x = jnp.asarray(cases.random(cases.BF16, 3001, 7))
    call = jax.jit(cuda_calls.quantize)
    first, second = ([np.asarray(a).tobytes() for a in call(x)] for _ in range(2))
    assert first == second
