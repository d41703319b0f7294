"""Settings: what the caller of `load_model` asked for."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jax_nvfp4_moe.scheme import Target, rounds_to_fp8


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the modules of one model are made: what the caller of `load_model` asked for."""

    target: Target
    scheme: str | None = None
    backend: str | None = None
    dtype: Any = jnp.bfloat16

    @property
    def rounds_to_fp8(self) -> bool:
        """Whether keys and values that the file declares FP8 are rounded to it."""
        return rounds_to_fp8(self.scheme, self.target)

    def module_arguments(self) -> dict[str, Any]:
        """Return the arguments that all NVFP4 modules take."""
        return dataclasses.asdict(self) | {"target": self.target}
