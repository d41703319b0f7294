"""Compare two stored tensors, without both in memory."""

import numpy as np

from jax_nvfp4_moe.checkpoint.reading.memory import aligned_empty
from jax_nvfp4_moe.checkpoint.safetensors import Tensors

_CHUNK = 1 << 20  # the bytes of each tensor that are in memory at once


def same_tensor(tensors: Tensors, first: str, second: str) -> bool:
    """Return whether two tensors have one dtype, one shape and the same bytes.

    Bytes are read up to the first chunk that differs.

    Args:
      tensors: the tensors of an open checkpoint.
      first: the name of a tensor.
      second: the name of another tensor.

    Raises:
      CheckpointError: a file has become shorter since its header was read.
    """
    one, other = tensors.info(first), tensors.info(second)
    if (one.dtype, one.shape, one.nbytes) != (other.dtype, other.shape, other.nbytes):
        return False
    if (one.file, one.start) == (other.file, other.start):
        return True
    mine, theirs = (aligned_empty((_CHUNK,), np.dtype(np.uint8)) for _ in range(2))
    for start in range(0, one.nbytes, _CHUNK):
        size = min(_CHUNK, one.nbytes - start)
        tensors.read_into(first, mine[:size], start)
        tensors.read_into(second, theirs[:size], start)
        if not np.array_equal(mine[:size], theirs[:size]):
            return False
    return True
