"""The values that a checkpoint holds for one module: a linear, or the scales of a KV cache."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jax_nvfp4_moe.scheme import CheckpointScheme


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearWeights:
    """The weights of one linear layer ``y = W x + bias``.

    Attributes:
      weight: ``[n, k]``, an `NVFP4Tensor` with a scalar global scale, an `FP8Tensor`, or a dense
        array.
      bias: ``[n]``, or None.
      input_scale: float32 scalar if the file declares W4A4 or static FP8, else None.
      checkpoint_scheme: the scheme that the file declares. None if the weight is dense.
      multiply_by_reciprocal: how activations are rounded to FP8; see `numerics.fp8.round_fp8`.
      channel_scale: ``[k]``, factors that multiply the input before anything else, or None.
    """

    weight: Any
    bias: Any = None
    input_scale: Any = None
    checkpoint_scheme: CheckpointScheme = dataclasses.field(default=None, metadata={"static": True})
    multiply_by_reciprocal: bool = dataclasses.field(default=False, metadata={"static": True})
    channel_scale: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheScales:
    """The scales with which the keys and values of one layer are rounded to FP8.

    Attributes:
      scales: "k" or "v" -> float32 ``[heads]``.
      multiply_by_reciprocal: how they are rounded; see `numerics.fp8.round_fp8`. This field is
        static.
    """

    scales: Mapping[str, Any]
    multiply_by_reciprocal: bool = dataclasses.field(metadata={"static": True})
