"""Run the kernels that combine the outputs of experts, compiled for a CPU."""

import ml_dtypes
import numpy as np
import pytest
from support.emulation.cuda_emulation import Device, call_target, emulate

from jax_nvfp4_moe.testing import assert_as_accurate_as

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]

EXPERTS = 5
FEW, MANY = 1000, 1  # multiprocessors for which the kernels of few and of many tokens run
# Tokens, width and experts of each token. A block of the kernel of many tokens has 1024 columns.
SIZES = [(400, 48, 8), (20, 1040, 3), (300, 64, 10), (600, 32, 1), (20, 2048, 16)]


def combine(library, multiprocessors, outputs, ids, weights):
    def run(*operands):
        y = (outputs.shape[0], outputs.shape[2]), outputs.dtype
        return call_target("emulated_combine", operands, [y], num_experts=np.int64(EXPERTS))[0]

    return emulate(library, run, outputs, ids, weights, device=Device(multiprocessors))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize(("t", "h", "top_k"), SIZES)
def test_few_and_many_tokens_give_the_same_bits(library, t, h, top_k, dtype, weighted):
    """Outputs of slots that are not routed are NaN, because nobody wrote them."""
    rng = np.random.default_rng(t)
    outputs = np.asarray(rng.normal(size=(t, top_k, h)), dtype)
    ids = rng.integers(-1, EXPERTS + 1, (t, top_k)).astype(np.int32)
    ids[3] = -1
    routed = (ids >= 0) & (ids < EXPERTS)
    outputs[~routed] = np.nan
    weights = np.float32(rng.random((t, top_k))) if weighted else None
    many, few = (combine(library, count, outputs, ids, weights) for count in (MANY, FEW))
    np.testing.assert_array_equal(many.view(np.uint16), few.view(np.uint16))
    factors = np.where(routed, 1.0 if weights is None else weights, 0.0)
    values = np.where(routed[..., None], outputs.astype(np.float64), 0.0)
    exact = np.einsum("tk,tkh->th", factors, values)
    assert_as_accurate_as(many, exact.astype(dtype), exact)
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_as_accurate_as(np.roll(many, 1, axis=0), exact.astype(dtype), exact)
