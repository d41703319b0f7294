"""Flax NNX modules whose weights are NVFP4, FP8 or not quantized."""

from jax_nvfp4_moe.nn.experts.token_router import TokenRouter

__all__ = ["TokenRouter"]
