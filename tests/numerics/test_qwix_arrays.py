"""Test the conversion of NVFP4 arrays of Qwix, whose fields a stand-in has."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.ops.fake_qarray import FakeQArray, qarray, transposed, values_of

from jax_nvfp4_moe import NVFP4Tensor

E, K, N = 3, 64, 32


@pytest.mark.parametrize(
    "array",
    [
        qarray(),
        qarray(dtype=ml_dtypes.bfloat16),
        qarray(dtype=ml_dtypes.float8_e4m3fn, qtype=ml_dtypes.float4_e2m1fn),
        qarray(tile=32),
        qarray(tile=K),
        qarray(qtype=jnp.float4_e2m1fn),
        qarray()._replace(scale=qarray().scale[:1, :, :1]),
    ],
    ids=["float32", "bfloat16", "e4m3", "tile of 32", "tile of k", "values", "shared"],
)
def test_an_array_of_qwix_keeps_its_values(array):
    weight = NVFP4Tensor.from_qarray(array)
    assert weight.shape == (E, N, K)
    np.testing.assert_array_equal(weight.mT.dequantize(), values_of(array))
    other = NVFP4Tensor.from_qarray(transposed(array), -1)
    np.testing.assert_array_equal(other.packed, weight.packed)
    np.testing.assert_array_equal(other.block_scale, weight.block_scale)


def test_a_traced_array():
    """Its scales are unknown: the name of the format says that they are E4M3 numbers."""

    @jax.jit
    def convert(qvalue, scale):
        return NVFP4Tensor.from_qarray(FakeQArray(qvalue, scale))

    array = qarray()
    expected = NVFP4Tensor.from_qarray(array)
    for scale in (array.scale, array.scale.astype(ml_dtypes.float8_e4m3fn)):
        found = convert(array.qvalue, scale)
        np.testing.assert_array_equal(found.packed, expected.packed)
        np.testing.assert_array_equal(found.block_scale, expected.block_scale)
    constant = jax.jit(lambda: NVFP4Tensor.from_qarray(array))()
    np.testing.assert_array_equal(constant.packed, expected.packed)


SCALE = qarray().scale
CASES = {
    "scales that are not E4M3": qarray(qtype="float4_e2m1fn")._replace(scale=SCALE * 1.01),
    "scales with the name, and not E4M3": qarray()._replace(scale=SCALE * 1.01),
    "scales over the range": qarray()._replace(scale=SCALE * 2**14),
    "tiles of 8": qarray(tile=8),
    "tiles along n": qarray()._replace(scale=SCALE[:, :1].repeat(K, 1)),
    "two axes of scales": qarray()._replace(scale=SCALE[0]),
    "a zero point": qarray()._replace(zero_point=np.zeros(1, ml_dtypes.float4_e2m1fn)),
    "values in int8": qarray()._replace(qvalue=np.ones((E, K, N), np.int8)),
    "k of 24": qarray((E, 24, N), tile=24),
}


@pytest.mark.parametrize("name", CASES)
def test_what_nvfp4_cannot_hold_is_refused(name):
    with pytest.raises(ValueError, match=r"^array: expected"):
        NVFP4Tensor.from_qarray(CASES[name])


def test_from_qarray_names_what_it_refuses():
    with pytest.raises(
        TypeError, match=r"^array: expected a qwix\.QArray, got an array of float32"
    ):
        NVFP4Tensor.from_qarray(jnp.ones((E, K, N)))
    with pytest.raises(ValueError, match=r"^axis: expected -1 or -2"):
        NVFP4Tensor.from_qarray(qarray(), 0)
