"""Compare the kernel for prefills on Hopper with float32, where each block has several tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.attention_suite import SINKS, plain, worst
from support.kernels.axes import axis

from jax_nvfp4_moe.ops import attention

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

HEADS, QUERIES, KEYS, FIRST = 24, 900, 1024, 100
OPTIONS = {
    "causal": {},
    "window": {"window": 40},
    "chunk": {"chunk": 300},
    "sinks": {"sinks": np.tile(SINKS, HEADS // len(SINKS))},
}


class TestAttentionOnHopper:
    """Each block computes one or two of 192 tiles of rows."""

    widths = axis((64, 64), (128, 128), (192, 128), (256, 256), (80, 40))
    dtype = axis("bfloat16", "float16")

    @pytest.fixture
    def operands(self, widths, dtype):
        d, dv = widths
        rng = np.random.default_rng(d)
        shapes = ((1, QUERIES, HEADS, d), (1, 3, KEYS, d), (1, 3, KEYS, dv))
        x = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
        return *x, FIRST + jnp.arange(QUERIES, dtype=jnp.int32)[None]

    @pytest.mark.parametrize("name", OPTIONS)
    def test_matches_float32(self, operands, name):
        options = OPTIONS[name]
        wide = (*(x.astype(jnp.float32) for x in operands[:3]), operands[3])
        expected = np.asarray(plain(*wide, **options), np.float64)
        bound = 2 * worst(plain(*operands, **options), expected)
        run = jax.jit(lambda *x: attention(*x, backend="attention_cuda", **options))
        y = run(*operands)
        assert worst(y, expected) <= bound
        np.testing.assert_array_equal(y, run(*operands))

    def test_a_missing_key_is_found(self, operands):
        expected = np.asarray(plain(*operands, window=40), np.float64)
        y = attention(*operands, backend="attention_cuda", window=39)
        assert worst(y, expected) > 0.05
