"""Flax NNX modules with NVFP4, FP8 and dense weights."""
