"""Test norms that run inside of the kernel that reads their result, compiled for a CPU."""

import cuda_emulation
import dense_emulation
import jax.numpy as jnp
import norm_chain_emulation
import numpy as np
import pytest
from axes import axis
from linear_few_suite import make_linear

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]

H200 = 132  # multiprocessors
# rows, n, k -> launches. One launch has as many rows as one slab for an output tile takes, and at
# most 16 runs of 256 elements in a row.
CASES = {
    (1, 77, 2048): 1,
    (1, 24, 16): 1,
    (3, 136, 1040): 1,
    (4, 45, 4096): 1,
    (2, 40, 4112): 2,
    (5, 77, 592): 2,
    (16, 40, 592): 2,
}
# Likewise for plain weights. One launch has at most eight rows, the smallest output tile, and at
# most eight blocks for each multiprocessor.
DENSE_CASES = {
    (1, 128, 2048): 1,
    (4, 77, 1040): 1,
    (8, 24, 48): 1,
    (8, 40, 2048): 1,
    (2, 40, 4112): 2,
    (9, 40, 592): 2,
    (1, 16912, 64): 2,
}
# The dtypes of x, of the weight of the norm, and of the plain weights.
PAIRS = (
    "bfloat16-bfloat16-bfloat16",
    "bfloat16-float32-float32",
    "bfloat16-bfloat16-float8_e4m3fn",
    "float16-float32-float16",
    "float16-float16-float8_e4m3fn",
)


def make_norm(rows, k, pair):
    """Return x, an addend and the weight of the norm."""
    dtype, weight_dtype = (np.dtype(name) for name in pair.split("-"))
    rng = np.random.default_rng((rows, k))
    x, added = (np.asarray(rng.normal(0, 3, (rows, k)), dtype) for _ in range(2))
    return x, added, np.asarray(rng.normal(1, 0.3, k), weight_dtype)


class TestNormPrologue:
    pair = axis("bfloat16-bfloat16", "bfloat16-float32", "float16-float16")

    @pytest.mark.parametrize("adds", [True, False])
    @pytest.mark.parametrize("sizes", CASES, ids=str)
    def test_bits_are_those_of_two_kernels(self, library, sizes, pair, adds):
        x, added, weight = make_norm(sizes[0], sizes[2], pair)
        call = make_linear(sizes, "bf16-none" if x.dtype.name == "bfloat16" else "f16-none")
        added = added if adds else None
        total, y = cuda_emulation.add_rms_norm(library, x, added, weight, eps=1e-6)
        operands = (y, *call.operands[1:])
        expected = cuda_emulation.grouped_gemm(library, "sm90", operands, "none", H200)
        (own_total, own_y, result), launches = norm_chain_emulation.norm_and_product(
            library, "sm90", (x, added, weight), call.operands[1:6], H200
        )
        assert launches == CASES[sizes]
        assert own_y.tobytes() == y.tobytes()
        assert result.tobytes() == expected.tobytes()
        if adds:
            assert own_total.tobytes() == total.tobytes()


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("sizes", DENSE_CASES, ids=str)
def test_bits_before_plain_weights(library, sizes, pair):
    (rows, n, k), rng = sizes, np.random.default_rng(sizes)
    types, weight_type = pair.rsplit("-", 1)
    x, added, norm_weight = make_norm(rows, k, types)
    weight = np.asarray(rng.normal(0, 1, (n, k)), jnp.dtype(weight_type))
    scale = np.float32(rng.uniform(0.5, 2, n)) if weight_type == "float8_e4m3fn" else None
    total, y = cuda_emulation.add_rms_norm(library, x, added, norm_weight, eps=1e-6)
    expected = dense_emulation.dense_few(library, y, weight, np.float32, H200, scale=scale)
    (own_total, own_y, result), launches = norm_chain_emulation.norm_and_dense(
        library, (x, added, norm_weight), weight, scale, H200
    )
    assert launches == DENSE_CASES[sizes]
    assert own_total.tobytes() == total.tobytes()
    assert own_y.tobytes() == y.tobytes()
    assert result.tobytes() == expected.tobytes()
