"""NVFP4 mixture-of-experts inference for JAX and Flax."""

from jax_nvfp4_moe import ops as ops
from jax_nvfp4_moe import testing as testing
from jax_nvfp4_moe.checkpoint.errors import CheckpointError as CheckpointError
from jax_nvfp4_moe.inference.evaluation import evaluate as evaluate
from jax_nvfp4_moe.inference.exporting import export_checks as export_checks
from jax_nvfp4_moe.inference.exporting import load_exported as load_exported
from jax_nvfp4_moe.inference.generation import generate as generate
from jax_nvfp4_moe.models.loading import load_model as load_model
from jax_nvfp4_moe.models.loading import load_moe as load_moe
from jax_nvfp4_moe.nn.explanation import explain as explain
from jax_nvfp4_moe.nn.linear import NVFP4Linear as NVFP4Linear
from jax_nvfp4_moe.nn.moe import NVFP4MoE as NVFP4MoE
from jax_nvfp4_moe.numerics.tensor import MoEParams as MoEParams
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor as NVFP4Tensor
from jax_nvfp4_moe.numerics.tensor import quantize as quantize
from jax_nvfp4_moe.numerics.tensor import quantize_experts as quantize_experts
from jax_nvfp4_moe.ops.preparation import prepare as prepare
from jax_nvfp4_moe.quantization.pipeline import quantize_model as quantize_model
from jax_nvfp4_moe.scheme import Choice as Choice
from jax_nvfp4_moe.scheme import NoBackendError as NoBackendError
from jax_nvfp4_moe.scheme import Problem as Problem
from jax_nvfp4_moe.scheme import Scheme as Scheme
from jax_nvfp4_moe.scheme import Target as Target
