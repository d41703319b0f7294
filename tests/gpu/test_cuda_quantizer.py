"""The CUDA quantizer against numpy's exact one: every byte of codes and scales."""

import cuda_calls
import float64_layer
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantizer_cases as cases

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.numerics import nvfp4 as formats

dtypes = pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES.keys())
layouts = pytest.mark.parametrize("layout", cases.LAYOUTS)
pytestmark = pytest.mark.gpu


def differing_bytes(x, g, layout="linear"):
    cuda_calls.register()
    scale = None if g is None else jnp.float32(g)
    call = jax.jit(lambda x, g: cuda_calls.quantize(x, g, layout))
    return cases.differing_bytes(x, g, layout, call(jnp.asarray(x), scale))


@pytest.mark.parametrize("dtype", [cases.BF16, cases.F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("g", cases.SCALES)
def test_quantizer_on_every_finite_value(dtype, g):
    assert differing_bytes(cases.finite(dtype), g) == 0
    assert differing_bytes(cases.alone(dtype), g) == 0


def test_quantizer_on_every_finite_bf16_under_scale_one():
    assert differing_bytes(cases.beside_six(cases.BF16), 1.0) == 0


@dtypes
@layouts
@pytest.mark.parametrize("g", cases.SCALES)
def test_quantizer_on_awkward_values(dtype, layout, g):
    assert differing_bytes(cases.awkward(dtype), g, layout) == 0
    assert differing_bytes(cases.numbers(dtype), g, layout) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "values"), [(cases.BF16, 10**8), (cases.F16, 10**7), (cases.F32, 10**7)]
)
def test_quantizer_on_random_values(dtype, values):
    """By turns under a scale that saturates some rows and leaves others to the smallest scales."""
    rows = 4096
    for chunk in range(-(-values // (rows * 1024))):
        g = (0.0173, None, 1e-4)[chunk % 3]
        assert differing_bytes(cases.random(dtype, rows, chunk), g) == 0


@dtypes
@layouts
@pytest.mark.parametrize("shape", cases.SHAPES)
def test_quantizer_on_any_shape(dtype, layout, shape):
    x = np.random.default_rng(4).normal(0, 1, shape).astype(dtype)
    assert differing_bytes(x, 1 / 2688, layout) == 0
    assert differing_bytes(x, None, layout) == 0


@dtypes
def test_op_is_formats_quantize(dtype):
    """On this device as well: both sides of the same program, compiled."""
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


def test_quantizer_bound_catches_round_half_up():
    values = cases.awkward(cases.F32)[:4]
    with np.errstate(all="ignore"):
        packed, _ = float64_layer.quantize(np.nextafter(values, np.inf), np.float32(1))
    assert (packed != float64_layer.quantize(values, np.float32(1))[0]).any()
    assert differing_bytes(values, 1.0) == 0
