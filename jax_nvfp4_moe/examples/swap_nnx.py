"""Replace the mixture of experts of a Flax NNX model by `NVFP4MoE`, with its weights and router.

Run it: ``python -m jax_nvfp4_moe.examples.swap_nnx``.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_nvfp4_moe as nvfp4


class DenseMoE(nnx.Module):
    """A mixture of experts in plain JAX.

    Every expert runs on every token, and most results are then dropped. It stands for the block of
    your own model.
    """

    def __init__(self, hidden, intermediate, num_experts, top_k, rngs):
        self.top_k = top_k
        self.router = nnx.Linear(hidden, num_experts, use_bias=False, rngs=rngs)
        init = nnx.initializers.lecun_normal(batch_axis=0)
        kernel = num_experts, hidden, intermediate
        self.gate = nnx.Param(init(rngs.params(), kernel))
        self.up = nnx.Param(init(rngs.params(), kernel))
        self.down = nnx.Param(init(rngs.params(), (num_experts, intermediate, hidden)))

    def __call__(self, x):
        """Run the block on tokens ``x [t, h]``."""
        weights, ids = jax.lax.top_k(jax.nn.softmax(self.router(x)), self.top_k)
        weights /= weights.sum(-1, keepdims=True)
        inner = jax.nn.silu(jnp.einsum("th,ehi->eti", x, self.gate[...]))
        inner *= jnp.einsum("th,ehi->eti", x, self.up[...])
        every = jnp.einsum("eti,eih->teh", inner, self.down[...])
        chosen = jnp.take_along_axis(every, ids[..., None], axis=1)
        return jnp.sum(chosen * weights[..., None], axis=1)


class Model(nnx.Module):
    """Several residual blocks with a norm in front: ``x = x + block(norm(x))``."""

    def __init__(self, hidden, intermediate, num_experts, top_k, num_layers, rngs):
        sizes = hidden, intermediate, num_experts, top_k
        self.norms = nnx.List([nnx.RMSNorm(hidden, rngs=rngs) for _ in range(num_layers)])
        self.blocks: nnx.List[Any] = nnx.List([DenseMoE(*sizes, rngs) for _ in range(num_layers)])

    def __call__(self, x):
        """Run all layers on tokens ``x [t, h]``."""
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return x


def swap(block: DenseMoE, dtype=jnp.bfloat16) -> nvfp4.NVFP4MoE:
    """Return an `NVFP4MoE` with the router of `block`, and its experts quantized to NVFP4."""
    kernels = (param[...] for param in (block.gate, block.up, block.down, block.router.kernel))
    return nvfp4.NVFP4MoE.from_dense(*kernels, top_k=block.top_k, dtype=dtype)


def main():
    """Replace all blocks, and print how memory and results change."""
    model = Model(256, 128, 16, 4, num_layers=2, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (32, 256))
    before = nnx.jit(model)(x)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))

    model.blocks = nnx.List([swap(block, dtype=x.dtype) for block in model.blocks])

    after = nnx.jit(model)(x)
    packed = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    error = jnp.linalg.norm(after - before) / jnp.linalg.norm(before - x)
    print(f"{size / 1e6:.2f} MB -> {packed / 1e6:.2f} MB, relative change {error:.3f}")
    print(nvfp4.explain(model.blocks[0]))


if __name__ == "__main__":
    main()
