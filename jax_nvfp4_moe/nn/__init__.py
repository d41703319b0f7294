"""Flax NNX modules whose weights are NVFP4, FP8 or not quantized."""
