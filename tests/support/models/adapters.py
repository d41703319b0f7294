"""What tests of LoRA share: adapters with values, and a loss of token ids."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_nvfp4_moe import add_lora, load_model
from jax_nvfp4_moe.training.adaptable import EXPERTS, MLPS, find_adaptable

# The CPU's expert kernel compiles several times faster than the reference.
HOW = {"dtype": jnp.float32, "backend": ("moe_w4a16_cpu", "reference")}


def load(folder, **how):
    """Load a checkpoint in float32."""
    return load_model(folder, **{**HOW, **how})


def adapted(model, rank=16, seed=0, **how):
    """Add an adapter to every layer of a model that can have one, and return the model."""
    groups = {layer.group for layer in find_adaptable(model)}
    others = [group for group in (MLPS, EXPERTS) if group in groups]
    add_lora(model, rank, targets=["mixers", *others], rngs=nnx.Rngs(seed), **how)
    return model


def fill(model, seed=0):
    """Give all adapters matrices B that are not zero, the same on every mesh."""
    rng = np.random.default_rng(seed)
    for layer in find_adaptable(model):
        if layer.pair is not None:
            a, b = layer.take()
            b = rng.normal(0, 0.3, b.shape).astype(np.float32)
            layer.put(a, b, layer.pair.alpha, merge_aware=layer.pair.merge_aware)


def loss(model, ids):
    """Return the mean cross-entropy of token ids ``[b, t]``, given those before."""
    chances = jax.nn.log_softmax(model(ids[:, :-1]))
    return -jnp.take_along_axis(chances, ids[:, 1:, None], axis=-1).mean()


@nnx.jit
def loss_and_gradients(model, ids):
    """Return the loss, and its gradients to the adapters."""
    wrt = nnx.DiffState(0, nnx.LoRAParam)
    return nnx.value_and_grad(loss, argnums=wrt)(model, ids)


def step(model, ids, rate=3e-3):
    """Do the first step of Adam, which moves every value by `rate`; return the loss before it."""
    value, gradients = loss_and_gradients(model, ids)
    moved = jax.tree.map(
        lambda value, slope: value - rate * jnp.sign(slope),
        nnx.state(model, nnx.LoRAParam),
        gradients,
    )
    nnx.update(model, moved)
    return float(value)
