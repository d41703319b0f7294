"""Settings: what the caller of `load_model` asked for."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jax_nvfp4_moe.parallel.expert_mesh import ExpertMesh
from jax_nvfp4_moe.scheme import Target, rounds_to_fp8


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the modules of one model are made: what the caller of `load_model` asked for.

    Attributes:
      target, scheme, backend, dtype: as for `load_model`.
      expert_mesh: the devices that share the model; None for one.
      dispatch: how tokens reach experts over the mesh; see `NVFP4MoE`.
    """

    target: Target
    scheme: str | None = None
    backend: str | Sequence[str] | None = None
    dtype: Any = jnp.bfloat16
    expert_mesh: ExpertMesh | None = None
    dispatch: str = "psum"

    @property
    def shards(self) -> int:
        """Number of shards that heads and the columns of dense parts are divided into."""
        return 1 if self.expert_mesh is None else self.expert_mesh.tensor

    @property
    def rounds_to_fp8(self) -> bool:
        """Whether keys and values that the file declares FP8 are rounded to it."""
        return rounds_to_fp8(self.scheme, self.target)

    def module_arguments(self) -> dict[str, Any]:
        """Return the arguments that all NVFP4 modules take."""
        names = ("target", "scheme", "backend", "dtype")
        return {name: getattr(self, name) for name in names}

    def block_arguments(self) -> dict[str, Any]:
        """Return the arguments that all blocks with experts take."""
        mesh = None if self.expert_mesh is None else self.expert_mesh.mesh
        return {**self.module_arguments(), "mesh": mesh, "dispatch": self.dispatch}
