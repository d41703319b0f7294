"""Run ops and models under ``jax_debug_nans``: the package itself must never produce a NaN.

Users turn this option on to find NaNs of their own. Programs run inside and outside of ``jax.jit``.
The inputs include blocks of zeros, for which a plain division by the scale gives NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.files.given import CHECKPOINTS

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.numerics.rounding import ALGORITHMS, quantize_weight

BACKENDS = [None, "reference"]
ROWS = np.concatenate([np.random.default_rng(0).standard_normal((3, 64)), np.zeros((2, 64))])


@pytest.fixture(autouse=True)
def debug_nans():
    with jax.debug_nans(True):
        yield


@pytest.fixture(params=[jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def rows(request):
    return jnp.asarray(ROWS, request.param)


@pytest.mark.parametrize("x", [ROWS, np.zeros_like(ROWS)], ids=["rows", "zeros"])
def test_quantize(x):
    x = np.asarray(x, np.float32)
    weight = nvfp4.quantize(x)
    # Codes are at most 2 apart, so rounding moves a value by at most one scale.
    error = np.abs(np.asarray(weight.dequantize(jnp.float32)) - x)
    assert (error <= np.repeat(weight.scale(), 16, axis=-1)).all()
    np.testing.assert_array_equal(np.asarray(weight.dequantize(jnp.bfloat16))[-2:], 0)
    assert not np.asarray(jax.jit(nvfp4.quantize)(x).packed)[-2:].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", nvfp4.Scheme)
def test_linear(rows, scheme, backend):
    how = {"checkpoint_scheme": "w4a4", "input_scale": 1e-3, "scheme": scheme}
    linear = nvfp4.NVFP4Linear(64, 32, backend=backend, rngs=nnx.Rngs(0), **how)
    assert np.isfinite(np.asarray(linear(rows), np.float32)).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", ["w4a16", "w4a4_unit_scale", "w4a4_token_scale"])
def test_moe(rows, scheme, backend):
    moe = nvfp4.NVFP4MoE(
        4, 64, 32, top_k=2, scheme=scheme, backend=backend, rngs=nnx.Rngs(0), dtype=rows.dtype
    )
    assert np.isfinite(np.asarray(moe(rows), np.float32)).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rounding_of_weights(algorithm):
    importance = np.ones(64, np.float32) if ALGORITHMS[algorithm].needs_importance else None
    for x in (ROWS, np.zeros_like(ROWS)):
        quantize_weight(x.astype(np.float32), algorithm=algorithm, importance=importance)


def test_a_model_that_dequantizes_while_it_loads():
    """Latent attention reads the matrices that expand latents in its own dtype."""
    model = nvfp4.load_model(CHECKPOINTS / "deepseek_v3-direct-modelopt-w4a16")
    logits = model(np.ones((2, 6), np.int32), lengths=np.array([6, 2], np.int32))
    assert np.isfinite(np.asarray(logits)).all()


def test_generate():
    """The option, which adds checks after each program, does not change the tokens."""
    model = nvfp4.load_model(CHECKPOINTS / "qwen3moe-modelopt-w4a16")
    prompt = np.array([[5, 6, 7]])
    tokens = nvfp4.generate(model, prompt, max_new_tokens=4)
    with jax.debug_nans(False):
        np.testing.assert_array_equal(tokens, nvfp4.generate(model, prompt, max_new_tokens=4))


def test_a_nan_of_the_user_is_found():
    with pytest.raises(FloatingPointError):
        nvfp4.quantize(jnp.asarray(ROWS) * jnp.float32(np.nan))
