"""Models: one readable file per architecture, and the functions that load them."""

from jax_nvfp4_moe.models.loading import ARCHITECTURES, load_model, load_moe

__all__ = ["ARCHITECTURES", "load_model", "load_moe"]
