"""Compare rotary frequencies that a file stores with those that its model computes."""

import dataclasses
import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import printable, quoted
from jax_nvfp4_moe.checkpoint.opening import Checkpoint
from jax_nvfp4_moe.checkpoint.weights.stored_forms import FLOATS
from jax_nvfp4_moe.numerics.rope import Rope

_NAME = "rotary_emb.inv_freq"
# The largest relative difference: two roundings of the dtype in which the file stores them.
_TOLERANCE = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-18, "F64": 2.0**-18}
_LOG = logging.getLogger("jax_nvfp4_moe")


def warn_of_other_frequencies(checkpoint: Checkpoint, config: Any) -> None:
    """Write a warning if the file stores other rotary frequencies than the model computes.

    The computed frequencies are used, as transformers and vLLM do.

    Args:
      checkpoint: the open checkpoint. The frequencies are read.
      config: the sizes of the model, whose rotary embeddings are compared.
    """
    computed = {rope.frequencies for rope in _ropes(config)}
    other = [
        checkpoint.tensors.info(name).name
        for name in checkpoint.tensors.names()
        if name.startswith("model.") and name.endswith(_NAME)
        if computed and not _is_one_of(checkpoint.tensors, name, computed)
    ]
    if other:
        _LOG.warning(
            "%s: %d tensors such as %s differ from the rotary frequencies of the configuration, "
            "which are used",
            printable(checkpoint.folder),
            len(other),
            quoted(other[0]),
        )


def _is_one_of(tensors, name, computed) -> bool:
    """Return whether the tensor `name` holds the frequencies of one of the model's embeddings."""
    info = tensors.info(name)
    if info.dtype not in FLOATS or math.prod(info.shape) not in set(map(len, computed)):
        return False  # without reading, because the tensor may have any size
    stored = tensors.read(name).astype(np.float64).reshape(-1)
    near = _TOLERANCE[info.dtype]
    return any(
        len(stored) == len(one) and np.allclose(stored, one, rtol=near, atol=1e-12)
        for one in computed
    )


def _ropes(value: Any) -> Iterator[Rope]:
    """Yield the rotary embeddings in the sizes of a model."""
    if isinstance(value, Rope):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _ropes(getattr(value, field.name))
    elif isinstance(value, tuple):
        for one in dict.fromkeys(value):  # the attentions of layers, most of which are equal
            yield from _ropes(one)
