"""A small model of a user, and what it computes in plain XLA in any float dtype, as in float64."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.training.adaptable import find_adaptable

TARGETS = "linears.1", "experts"
ADAPTERS = nnx.DiffState(0, nnx.LoRAParam)


class Own(nnx.Module):
    """A model of a user, with a list of linears and with experts."""

    def __init__(self, rngs):
        how = {"dtype": jnp.float32, "rngs": rngs}
        self.linears = nnx.List([nvfp4.NVFP4Linear(32, 32, **how) for _ in range(2)])
        self.moe = nvfp4.NVFP4MoE(4, 32, 16, top_k=2, **how)

    def __call__(self, x):
        return self.moe(self.linears[1](self.linears[0](x)))


def total(model, x):
    """Return a sum over the results of a model, with factors that do not depend on them."""
    return weigh(model(x))


def weigh(y):
    return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))


def read_adapters(model) -> dict[str, Any]:
    """Return the matrices of a model, or the gradients in their place, by layer and letter."""
    found = {}
    for layer in find_adaptable(model):
        if layer.pair is not None:
            for letter in "ab":
                name = f"{layer.name.split('.', 1)[1]}.{letter}"
                found[name] = np.asarray(getattr(layer.pair, letter)[...])
    return found


def read_gradients(model, gradients) -> dict[str, Any]:
    """Return gradients to the adapters of a model by layer and letter."""
    graph, _, rest = nnx.split(model, nnx.LoRAParam, ...)
    return read_adapters(nnx.merge(graph, gradients, rest))


def read_weights(model) -> dict[str, Any]:
    """Return the frozen weights, dequantized."""
    params = model.moe.experts.params.get_value()
    return {
        "first": model.linears[0].weight.get_value().dequantize(),
        "second": model.linears[1].weight.get_value().dequantize(),
        "router": model.moe.token_router.weight[...],
        "gate_up": params.gate_up.dequantize(),
        "down": params.down.dequantize(),
    }


def run_plain(adapters, weights, x, router):
    """Return the results of a model in the dtype of its operands. All experts are computed."""
    multiply = functools.partial(jnp.matmul, precision="highest")

    def change(name):
        return multiply(adapters[f"{name}.b"], adapters[f"{name}.a"])  # alpha equals the rank

    x = multiply(x, weights["first"].T)
    x = multiply(x, (weights["second"] + change("1")).T)
    kept, ids = jax.lax.top_k(jax.nn.softmax(multiply(x, weights["router"].T)), router.top_k)
    if router.renormalize:
        kept = kept / kept.sum(-1, keepdims=True)
    first, second = (weights[part] + change(f"experts.{part}_proj") for part in ("gate_up", "down"))
    gate, up = jnp.split(multiply(x, first.swapaxes(1, 2)), 2, axis=-1)
    each = multiply(jax.nn.silu(gate) * up, second.swapaxes(1, 2))  # [e, t, h]
    chosen = jnp.take_along_axis(each.swapaxes(0, 1), ids[..., None], axis=1)
    return jnp.sum(chosen * kept[..., None], axis=1)


def differentiate_plain(models: Sequence[Any], x, dtype) -> list[Mapping[str, Any]]:
    """Return the results of models after each other, and the gradients to the adapters of each.

    The results stand first, under the name "y".

    Args:
      models: instances of `Own` with adapters.
      x: rows ``[t, 32]``.
      dtype: float64 gives the truth, and float32 a yardstick.
    """
    router = models[0].moe.token_router.router
    given = [(read_adapters(model), read_weights(model)) for model in models]

    def compute(adapters, weights, x):
        for each, frozen in zip(adapters, weights, strict=True):
            x = run_plain(each, frozen, x, router)
        return weigh(x), x

    with jax.enable_x64(dtype == np.float64):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), (*zip(*given, strict=True), x))
        gradients, y = jax.jit(jax.grad(compute, has_aux=True))(*wide)
        return [{"y": np.asarray(y)}, *(jax.tree.map(np.asarray, one) for one in gradients)]
