"""Settings: the arguments of `load_model` that all modules of a model need."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import DTypeLike

from jax_nvfp4_moe.parallel.expert_mesh import ExpertMesh
from jax_nvfp4_moe.scheme import Target, rounds_to_fp8


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to make the modules of one model: the arguments of `load_model`.

    Attributes:
      target: device that the model runs on.
      scheme: None, "checkpoint" or the name of a `Scheme`, as for `load_model`.
      backend: None, a name or a sequence of names, as for `load_model`.
      dtype: dtype of activations, dense weights and cache. Defaults to bfloat16.
      expert_mesh: devices that the model is sharded over, or None for one device.
      dispatch: how tokens reach their experts over the mesh; see `NVFP4MoE`.
    """

    target: Target
    scheme: str | None = None
    backend: str | Sequence[str] | None = None
    dtype: DTypeLike = jnp.bfloat16
    expert_mesh: ExpertMesh | None = None
    dispatch: str = "psum"

    @property
    def shards(self) -> int:
        """Number of shards of heads and of dense columns; 1 without a mesh."""
        return 1 if self.expert_mesh is None else self.expert_mesh.tensor

    @property
    def rounds_to_fp8(self) -> bool:
        """Whether activations, keys and values that are declared FP8 are rounded to FP8."""
        return rounds_to_fp8(self.scheme, self.target)

    def module_arguments(self) -> dict[str, Any]:
        """Return the constructor arguments that all NVFP4 modules share."""
        names = ("target", "scheme", "backend", "dtype")
        return {name: getattr(self, name) for name in names}

    def block_arguments(self) -> dict[str, Any]:
        """Return the constructor arguments that all blocks with experts share."""
        how = {"mesh": self.expert_mesh, "dispatch": self.dispatch}
        return {**self.module_arguments(), **how}
