"""Read and write checkpoints: safetensors files in the forms of NVFP4's quantization tools."""

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.checkpoint.folder import read_config, read_size
from jax_nvfp4_moe.checkpoint.options import LoadOptions
from jax_nvfp4_moe.checkpoint.resolve import (
    CacheScales,
    Checkpoint,
    ExpertWeights,
    LinearWeights,
    Weights,
    check,
    load,
    open_checkpoint,
)
from jax_nvfp4_moe.numerics.tensor import DenseExperts

__all__ = [
    "CacheScales",
    "Checkpoint",
    "CheckpointError",
    "DenseExperts",
    "ExpertWeights",
    "LinearWeights",
    "LoadOptions",
    "Weights",
    "check",
    "load",
    "open_checkpoint",
    "read_config",
    "read_size",
]
