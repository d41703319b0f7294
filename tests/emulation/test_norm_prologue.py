"""Test norms that run inside of the kernel that reads their result, compiled for a CPU."""

import cuda_emulation
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


def make(sizes, pair):
    """Return x, an addend and the weight of the norm, and a product of the sizes."""
    dtype, weight_dtype = (np.dtype(name) for name in pair.split("-"))
    call = make_linear(sizes, "bf16-none" if dtype.name == "bfloat16" else "f16-none")
    rng = np.random.default_rng(sizes)
    x, added = (np.asarray(rng.normal(0, 3, call.x.shape), dtype) for _ in range(2))
    return (x, added, np.asarray(rng.normal(1, 0.3, sizes[2]), weight_dtype)), call


class TestNormPrologue:
    pair = axis("bfloat16-bfloat16", "bfloat16-float32", "float16-float16")

    @pytest.mark.parametrize("adds", [True, False])
    @pytest.mark.parametrize("sizes", CASES, ids=str)
    def test_bits_are_those_of_two_kernels(self, library, sizes, pair, adds):
        (x, added, weight), call = make(sizes, pair)
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
