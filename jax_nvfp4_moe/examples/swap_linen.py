"""Replace the mixture of experts of a Flax Linen model by `NVFP4MoE`, and convert its weights.

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
    """A mixture of experts in plain JAX.

    Every expert runs on every token, and most results are then dropped. It stands for the block of
    your own model.
    """

    @nn.compact
    def __call__(self, x):
        """Run the block on tokens ``x [t, h]``."""
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
    """A residual block with a norm in front: ``y = x + moe(norm(x))``.

    Attributes:
      make_moe: function that makes the mixture of experts.
    """

    make_moe: Callable[..., nn.Module] = DenseMoE

    @nn.compact
    def __call__(self, x):
        """Run the model on tokens ``x [t, h]``."""
        return x + self.make_moe(name="moe")(nn.RMSNorm(name="norm")(x))


# The same model with NVFP4MoE. `to_linen` wraps an NNX module class and its arguments.
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
    """Convert the variables of `Model` to variables of `NVFP4Model`."""
    dense = variables["params"]["moe"]
    # Flax stores kernels as [inputs, outputs]. NVFP4 packs along the inputs, so they must be last.
    experts = (dense[name].swapaxes(1, 2) for name in ("gate", "up", "down"))
    params = nvfp4.prepare(nvfp4.quantize_experts(*experts), scheme="w4a16")
    router = {"token_router": {"weight": dense["router"]["kernel"].T}}
    return {
        "params": {**variables["params"], "moe": router},
        "NVFP4Param": {"moe": {"experts": {"params": params}}},  # a collection of frozen weights
    }


def main():
    """Replace the block, and print how memory and results change."""
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
