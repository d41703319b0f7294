"""NVFP4 mixture-of-experts inference for JAX and Flax."""

from jax_nvfp4_moe import ops as ops
from jax_nvfp4_moe.backends.choice import explain as explain
from jax_nvfp4_moe.ops.prepare import prepare as prepare
from jax_nvfp4_moe.scheme import Choice as Choice
from jax_nvfp4_moe.scheme import NoBackendError as NoBackendError
from jax_nvfp4_moe.scheme import Problem as Problem
from jax_nvfp4_moe.scheme import Scheme as Scheme
from jax_nvfp4_moe.scheme import Target as Target
from jax_nvfp4_moe.tensor import MoEParams as MoEParams
from jax_nvfp4_moe.tensor import NVFP4Tensor as NVFP4Tensor
from jax_nvfp4_moe.tensor import quantize as quantize
