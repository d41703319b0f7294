"""What a checkpoint holds for one module: a linear, the scales of a KV cache."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jax_nvfp4_moe.scheme import CheckpointScheme


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearWeights:
    """One linear layer ``y = W x + bias``.

    Attributes:
      weight: `NVFP4Tensor` ``[n, k]`` with a scalar global scale, `FP8Tensor` or a dense array
        ``[n, k]``.
      bias: ``[n]`` or None.
      input_scale: float32 scalar where the file declares W4A4 or static FP8, else None.
      checkpoint_scheme: the scheme in the file; None where the weight is dense.
      multiply_by_reciprocal: how activations are rounded to FP8; see `numerics.fp8.round_fp8`.
    """

    weight: Any
    bias: Any = None
    input_scale: Any = None
    checkpoint_scheme: CheckpointScheme = dataclasses.field(default=None, metadata={"static": True})
    multiply_by_reciprocal: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheScales:
    """How one layer's keys and values are rounded to FP8.

    Attributes:
      scales: name -> float32 ``[heads]``.
      multiply_by_reciprocal: static; see `numerics.fp8.round_fp8`.
    """

    scales: Mapping[str, Any]
    multiply_by_reciprocal: bool = dataclasses.field(metadata={"static": True})
