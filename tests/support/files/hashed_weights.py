"""Weights that follow from the name of a matrix, in every environment and with numpy alone.

The quantizing tool and the tests make the same source of them, so that no file has to hold it.
"""

import hashlib

import numpy as np

BLOCK = 16


def hashed_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a matrix ``[n, k]`` in float32, whose values bfloat16 holds exactly.

    Rows have four magnitudes. Row 0 begins with a block of zeros, row 1 with a negative zero, and
    row 2 with a block whose scale is below the smallest one.

    Args:
      name: the name of the matrix in the file.
      shape: n and k.
    """
    n, k = shape
    draws = np.frombuffer(hashlib.shake_256(name.encode()).digest(n * k + n), np.uint8)
    rows, values = draws[:n].astype(np.int32) % 4, draws[n:].reshape(n, k).view(np.int8)
    weight = np.ldexp(values.astype(np.float32), rows[:, None] - 11)
    weight[0, :BLOCK] = 0.0
    weight[1, 0] = -0.0
    weight[2, :BLOCK] *= 2.0**-20
    return weight


def digest(parts: dict[str, bytes]) -> str:
    """Return a digest of the tensors of one quantized matrix, given by the ends of their names."""
    found = hashlib.sha256()
    for end in sorted(parts):
        found.update(end.encode() + b"\0" + parts[end])
    return found.hexdigest()[:16]
