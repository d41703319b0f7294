"""NVFP4 inference for JAX and Flax: mixture-of-experts and dense language models.

Load a checkpoint and generate, or run one expert layer in your own model::

  import jax_nvfp4_moe as nvfp4

  model = nvfp4.load_model("path/to/checkpoint")
  tokens = nvfp4.generate(model, input_ids, max_new_tokens=16)

`explain` prints which kernel runs each layer, and why.
"""

import gc
import importlib.metadata

# First of all, because it says what Ctrl-C does during the imports below.
from jax_nvfp4_moe import interrupts as interrupts

# isort: split
# The modules make 35,000 objects that stay. Python's garbage collector would take them for a reason
# to visit all objects of JAX in between, which takes as long as half of these modules.
_COLLECTS = gc.isenabled()
gc.disable()
try:
    from jax_nvfp4_moe import ops, testing
    from jax_nvfp4_moe.checkpoint.errors import CheckpointError
    from jax_nvfp4_moe.inference.evaluation import evaluate
    from jax_nvfp4_moe.inference.exporting import export_checks, load_exported
    from jax_nvfp4_moe.inference.generation import GenerationStats, generate, stream
    from jax_nvfp4_moe.inference.generative_model import GenerativeModel
    from jax_nvfp4_moe.inference.tokenizer import load_tokenizer
    from jax_nvfp4_moe.models.loading import load_model, load_moe
    from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
    from jax_nvfp4_moe.nn.experts.routed_experts import NVFP4Experts
    from jax_nvfp4_moe.nn.explanation import explain
    from jax_nvfp4_moe.nn.linear.nvfp4_linear import NVFP4Linear
    from jax_nvfp4_moe.nn.saving.saved_folder import restore, save
    from jax_nvfp4_moe.nn.variables import NVFP4Param
    from jax_nvfp4_moe.numerics.activations import find_activation
    from jax_nvfp4_moe.numerics.routing import Router
    from jax_nvfp4_moe.numerics.tensor import MoEParams, NVFP4Tensor, quantize, quantize_experts
    from jax_nvfp4_moe.ops.preparation import prepare
    from jax_nvfp4_moe.ops.ragged import ragged_dot
    from jax_nvfp4_moe.quantization.casting import cast_model
    from jax_nvfp4_moe.quantization.module_calibration import calibrate
    from jax_nvfp4_moe.quantization.pipeline import quantize_model
    from jax_nvfp4_moe.scheme import Choice, NoBackendError, Problem, Scheme, Target
    from jax_nvfp4_moe.training.lora import add_lora
    from jax_nvfp4_moe.training.merged_checkpoint import merge_model
    from jax_nvfp4_moe.training.merging import merge_lora
    from jax_nvfp4_moe.training.peft_files import load_lora, save_lora
finally:
    if _COLLECTS:
        gc.enable()

try:
    __version__ = importlib.metadata.version("jax-nvfp4-moe")
except importlib.metadata.PackageNotFoundError:  # the sources are used without installation
    __version__ = "0+uninstalled"

__all__ = [
    "CheckpointError",
    "Choice",
    "GenerationStats",
    "GenerativeModel",
    "MoEParams",
    "NVFP4Experts",
    "NVFP4Linear",
    "NVFP4MoE",
    "NVFP4Param",
    "NVFP4Tensor",
    "NoBackendError",
    "Problem",
    "Router",
    "Scheme",
    "Target",
    "__version__",
    "add_lora",
    "calibrate",
    "cast_model",
    "evaluate",
    "explain",
    "export_checks",
    "find_activation",
    "generate",
    "load_exported",
    "load_lora",
    "load_model",
    "load_moe",
    "load_tokenizer",
    "merge_lora",
    "merge_model",
    "ops",
    "prepare",
    "quantize",
    "quantize_experts",
    "quantize_model",
    "ragged_dot",
    "restore",
    "save",
    "save_lora",
    "stream",
    "testing",
]
