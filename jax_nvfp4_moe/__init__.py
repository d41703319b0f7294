"""NVFP4 mixture-of-experts inference for JAX and Flax."""

import importlib.metadata

from jax_nvfp4_moe import ops, testing
from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.inference.evaluation import evaluate
from jax_nvfp4_moe.inference.exporting import export_checks, load_exported
from jax_nvfp4_moe.inference.generation import generate, stream
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer
from jax_nvfp4_moe.models.loading import load_model, load_moe
from jax_nvfp4_moe.nn.explanation import explain
from jax_nvfp4_moe.nn.linear import NVFP4Linear
from jax_nvfp4_moe.nn.moe import NVFP4MoE
from jax_nvfp4_moe.nn.saving import restore, save
from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.numerics.tensor import MoEParams, NVFP4Tensor, quantize, quantize_experts
from jax_nvfp4_moe.ops.preparation import prepare
from jax_nvfp4_moe.quantization.pipeline import quantize_model
from jax_nvfp4_moe.scheme import Choice, NoBackendError, Problem, Scheme, Target

try:
    __version__ = importlib.metadata.version("jax-nvfp4-moe")
except importlib.metadata.PackageNotFoundError:  # sources on the path that nobody installed
    __version__ = "0+uninstalled"

__all__ = [
    "CheckpointError",
    "Choice",
    "MoEParams",
    "NVFP4Linear",
    "NVFP4MoE",
    "NVFP4Tensor",
    "NoBackendError",
    "Problem",
    "Router",
    "Scheme",
    "Target",
    "__version__",
    "evaluate",
    "explain",
    "export_checks",
    "find_activation",
    "generate",
    "load_exported",
    "load_model",
    "load_moe",
    "load_tokenizer",
    "ops",
    "prepare",
    "quantize",
    "quantize_experts",
    "quantize_model",
    "restore",
    "save",
    "stream",
    "testing",
]
