"""The CUDA quantizer against numpy's exact one: every byte of codes and scales."""

import cuda_calls
import float64_layer
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from float64_layer import E4M3
from test_cuda_kernel import BF16, F16, F32, dtypes


def finite(dtype):
    """Return every finite value of a 16-bit dtype, once."""
    values = np.arange(65536, dtype=np.uint16).view(dtype)
    return values[np.isfinite(values.astype(np.float32))]


def beside_six(values):
    """Return rows that start with 6, so that the first block scale is 1 under global scale 1."""
    rows = values.reshape(-1, 15) if values.size % 15 == 0 else np.resize(values, (-1, 15))
    return np.concatenate([np.full((len(rows), 1), 6, values.dtype), rows], axis=1)


def awkward(dtype):
    """Return rows of ties, zeros of both signs, subnormals, NaN and infinities."""
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0], np.float32)
    ties = np.concatenate([ties, -ties])
    rows = [ties, np.roll(ties, 5) * 4, ties * np.float32(2.0**-9), ties * np.float32(448 / 5)]
    rows += [np.zeros(16), -np.zeros(16), np.full(16, 1e-7), np.full(16, 6e4)]
    tiny = np.float32(ml_dtypes.finfo(dtype).smallest_subnormal)
    rows += [np.arange(16) * tiny, np.full(16, -tiny)]
    for value in (np.nan, np.inf, -np.inf):
        rows += [np.where(np.arange(16) == 3, value, ties), np.full(16, value)]
    with np.errstate(over="ignore"):
        return np.stack(rows).astype(np.float32).astype(dtype)


def differing_bytes(x, g, scale_layout="linear"):
    cuda_calls.register()
    g = np.float32(g)
    call = jax.jit(lambda x, g: cuda_calls.quantize(x, g, scale_layout))
    packed, block_scale = call(jnp.asarray(x), jnp.asarray(g))
    want_packed, want_scale = float64_layer.quantize(x, g)
    want_scale = want_scale.view(np.uint8)
    if scale_layout == "swizzle_128x4":
        want_scale = float64_layer.swizzle_128x4(want_scale.view(E4M3))
    got_scale = np.asarray(block_scale).view(np.uint8)
    assert got_scale.shape == want_scale.shape
    return int((np.asarray(packed) != want_packed).sum() + (got_scale != want_scale).sum())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("g", [1.0, 1 / 2688, 3.7e-5, 1e30])
def test_quantizer_on_every_finite_value(dtype, g):
    values = np.random.default_rng(2).permutation(finite(dtype))
    assert differing_bytes(np.resize(values, (len(values) // 16 + 1, 16)), g) == 0


@pytest.mark.gpu
def test_quantizer_on_every_finite_bf16_under_scale_one():
    values = finite(BF16)
    values = values[np.abs(values.astype(np.float32)) <= 6]
    assert differing_bytes(beside_six(np.resize(values, -(-values.size // 15) * 15)), 1.0) == 0


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("g", [1.0, 0.3, 1 / 2688, 0.0])
def test_quantizer_on_awkward_values(dtype, g):
    assert differing_bytes(awkward(dtype), g) == 0


@pytest.mark.gpu
@pytest.mark.slow
@dtypes
def test_quantizer_on_random_values(dtype):
    rng = np.random.default_rng(3)
    x = rng.normal(0, 1, (9766, 1024)) * np.exp2(rng.uniform(-12, 8, (9766, 1)))
    assert differing_bytes(x.astype(dtype), 0.0173) == 0


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("shape", [(1, 16), (128, 64), (129, 80), (300, 336), (0, 64)])
def test_swizzled_scales(dtype, shape):
    x = np.random.default_rng(4).normal(0, 1, shape).astype(dtype)
    assert differing_bytes(x, 1 / 2688, "swizzle_128x4") == 0


@pytest.mark.gpu
def test_quantizer_bound_catches_round_half_up():
    values = awkward(F32)[:4]
    with np.errstate(all="ignore"):
        packed, _ = float64_layer.quantize(np.nextafter(values, np.inf), np.float32(1))
    assert (packed != float64_layer.quantize(values, np.float32(1))[0]).any()
    assert differing_bytes(values, 1.0) == 0
