"""Random weights as arrays of NumPy, which a module may make while tests are collected.

Arrays of JAX would compile programs in every worker, also in those that run no test of the module.
"""

import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.numerics.tensor import MoEParams, NVFP4Tensor


def random_tensor(seed: int | np.random.Generator, *shape: int) -> NVFP4Tensor:
    """Return an NVFP4 weight ``[..., n, k]``, whose products with normal values are near 1."""
    rng = np.random.default_rng(seed)
    *lead, k = shape
    return NVFP4Tensor(
        rng.integers(0, 256, (*lead, k // 2), np.uint8),
        rng.uniform(0.5, 1.0, (*lead, k // BLOCK)).astype(jnp.float8_e4m3fn),
        rng.uniform(0.2, 0.4, lead[:-1]).astype(np.float32) * np.float32(k**-0.5),
    )


def random_experts(seed: int, num_experts: int, hidden: int, intermediate: int) -> MoEParams:
    """Return gated experts, with scales of gate and up of their own, and input scales."""
    rng = np.random.default_rng(seed)
    gate, up = (random_tensor(part, num_experts, intermediate, hidden) for part in rng.spawn(2))
    gate_up = NVFP4Tensor(
        np.concatenate([gate.packed, up.packed], axis=1),
        np.concatenate([gate.block_scale, up.block_scale], axis=1),
        np.stack([gate.global_scale, up.global_scale], axis=1),
    )
    scales = rng.uniform(0.5, 1.0, (2, num_experts)).astype(np.float32) / np.float32(2688 / 6)
    return MoEParams(gate_up, random_tensor(rng, num_experts, hidden, intermediate), *scales)
