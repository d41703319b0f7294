"""Models: one readable file an architecture, and the loaders."""

from jax_nvfp4_moe.models.loading import ARCHITECTURES, load_model, load_moe

__all__ = ["ARCHITECTURES", "load_model", "load_moe"]
