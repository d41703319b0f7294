"""Swap the mixture of experts of a Flax Linen model for `NVFP4MoE`, and its weights with it.

Run it: ``python -m jax_nvfp4_moe.examples.swap_linen``.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import jax_nvfp4_moe as nvfp4

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 256, 128, 16, 4


class DenseMoE(nn.Module):
    """A block as people write it: every expert sees every token, and most results are dropped."""

    @nn.compact
    def __call__(self, x):
        """Run the block on ``x [t, h]``."""
        init = nn.initializers.lecun_normal(batch_axis=0)
        kernel = NUM_EXPERTS, HIDDEN, INTERMEDIATE
        gate, up = (self.param(name, init, kernel) for name in ("gate", "up"))
        down = self.param("down", init, (NUM_EXPERTS, INTERMEDIATE, HIDDEN))
        scores = jax.nn.softmax(nn.Dense(NUM_EXPERTS, use_bias=False, name="router")(x))
        weights, ids = jax.lax.top_k(scores, TOP_K)
        weights /= weights.sum(-1, keepdims=True)
        inner = jax.nn.silu(jnp.einsum("th,ehi->eti", x, gate)) * jnp.einsum("th,ehi->eti", x, up)
        every = jnp.einsum("eti,eih->teh", inner, down)
        chosen = jnp.take_along_axis(every, ids[..., None], axis=1)
        return jnp.sum(chosen * weights[..., None], axis=1)


class Model(nn.Module):
    """A norm and such a block around a residual; `make_moe` says which block."""

    make_moe: Callable[..., nn.Module] = DenseMoE

    @nn.compact
    def __call__(self, x):
        """Run the model on ``x [t, h]``."""
        return x + self.make_moe(name="moe")(nn.RMSNorm(name="norm")(x))


# The same model with our block. `to_linen` wraps an NNX module class and its arguments.
NVFP4Model = functools.partial(
    Model,
    functools.partial(
        nnx.bridge.to_linen,
        nvfp4.NVFP4MoE,
        NUM_EXPERTS,
        HIDDEN,
        INTERMEDIATE,
        top_k=TOP_K,
        dtype=jnp.float32,
    ),
)


def swap(variables):
    """Return the variables of `NVFP4Model` for those of `Model`."""
    dense = variables["params"]["moe"]
    # Kernels stand inputs first; NVFP4 packs along the inputs, so they come last.
    experts = (dense[name].swapaxes(1, 2) for name in ("gate", "up", "down"))
    params = nvfp4.prepare(nvfp4.quantize_experts(*experts), scheme="w4a16")
    router = {"router_weight": dense["router"]["kernel"].T}
    return {
        "params": {**variables["params"], "moe": router},
        "NVFP4Param": {"moe": {"experts": {"params": params}}},  # no optimizer looks here
    }


def main():
    """Swap the block, and say what that takes and changes."""
    x = jax.random.normal(jax.random.key(1), (32, HIDDEN))
    variables = Model().init(jax.random.key(0), x)
    before = jax.jit(Model().apply)(variables, x)
    swapped = swap(variables)
    after = jax.jit(NVFP4Model().apply)(swapped, x)
    sizes = (sum(leaf.nbytes for leaf in jax.tree.leaves(v)) / 1e6 for v in (variables, swapped))
    error = jnp.linalg.norm(after - before) / jnp.linalg.norm(before - x)
    print("{:.2f} MB -> {:.2f} MB".format(*sizes) + f", relative change {error:.3f}")


if __name__ == "__main__":
    main()
