"""Arrays with the fields of `qwix.QArray`, for an environment without Qwix."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class FakeQArray(NamedTuple):
    """The fields of a `qwix.QArray`, and the attributes that libraries read."""

    qvalue: Any
    scale: Any
    zero_point: Any = None
    qtype: Any = "nvfp4"

    @property
    def shape(self):
        return self.qvalue.shape


def qarray(shape=(3, 64, 32), *, tile=16, dtype=np.float32, **fields):
    """Return an array of Qwix ``[e, k, n]`` with a scale for `tile` values along k."""
    rng = np.random.default_rng(0)
    codes = rng.choice(np.array([-6, -1.5, -0.5, 0, 0.5, 1, 2, 3, 4, 6], np.float32), shape)
    scales = shape[0], shape[1] // tile, shape[2]
    scale = rng.uniform(0.02, 0.2, scales).astype(ml_dtypes.float8_e4m3fn).astype(dtype)
    return FakeQArray(codes.astype(ml_dtypes.float4_e2m1fn), scale, **fields)


def transposed(array):
    """Return the array with its last two axes swapped."""
    return array._replace(qvalue=array.qvalue.swapaxes(1, 2), scale=array.scale.swapaxes(1, 2))


def values_of(array):
    """Return the values of an array of Qwix in float64."""
    scale = np.asarray(array.scale).astype(np.float64)
    for axis, size in enumerate(array.shape):
        scale = np.repeat(scale, size // scale.shape[axis], axis=axis)
    return np.asarray(array.qvalue).astype(np.float64) * scale
