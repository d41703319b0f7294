"""Read and write checkpoints: safetensors files in the formats of the NVFP4 quantization tools.

The supported formats are those of NVIDIA ModelOpt and of compressed-tensors (llm-compressor).
"""

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.checkpoint.folder import read_config, read_size
from jax_nvfp4_moe.checkpoint.opening import Checkpoint, open_checkpoint
from jax_nvfp4_moe.checkpoint.options import LoadOptions
from jax_nvfp4_moe.checkpoint.table import Source, WeightTable, read_source
from jax_nvfp4_moe.checkpoint.values import CacheScales, LinearWeights
from jax_nvfp4_moe.numerics.tensor import DenseExperts

__all__ = [
    "CacheScales",
    "Checkpoint",
    "CheckpointError",
    "DenseExperts",
    "LinearWeights",
    "LoadOptions",
    "Source",
    "WeightTable",
    "open_checkpoint",
    "read_config",
    "read_size",
    "read_source",
]
