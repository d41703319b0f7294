"""`merge_lora`: add low-rank adapters to the weights beside which they stand."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_nvfp4_moe.nn.attention.latent_attention import HeadMatrices
from jax_nvfp4_moe.nn.experts.routed_experts import RoutedExperts
from jax_nvfp4_moe.nn.linear.lora import merge_weight
from jax_nvfp4_moe.nn.linear.scaled_linear import ScaledLinear
from jax_nvfp4_moe.numerics.arguments import check_kind
from jax_nvfp4_moe.ops.low_rank import add_to_each
from jax_nvfp4_moe.training.adaptable import HEAD, Adaptable, find_adaptable


def merge_lora(model: nnx.Module) -> None:
    """Add the adapters of a model to its weights, in place, and remove them.

    Each weight becomes ``Q(W + alpha / rank * B @ A)``, where W is dequantized, the sum is float32,
    and Q rounds to the format that the weight has:

    * NVFP4: the global scale stays. A block of 16 weights keeps its scale, unless one of its sums
      lies beyond the largest value of that scale. Its scale is then found as in `quantize`.
    * FP8: all scales stay, and larger sums saturate at ``448 * scale``.
    * A float dtype: the sum is rounded to this dtype.

    Rounding loses what is smaller than half the distance of two codes, which is most of what a
    short training changes in NVFP4. Adapters that `add_lora` added with ``merge_aware=True`` were
    trained through Q: the merged weights are those that the model was trained with.

    The model then has no adapters. `generate`, `save` and `jax.export` take it like any other.
    Memory holds the float32 weights of one linear layer, or of one expert, at a time.

    Args:
      model: a model with adapters that `add_lora` or `load_lora` has added, on one device.

    Raises:
      ValueError: the model has no adapters, or is on a mesh, or an adapter is not finite. The model
        is then unchanged.

    Example:
      >>> import importlib.resources
      >>> from flax import nnx
      >>> import jax_nvfp4_moe as nvfp4
      >>> path = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
      >>> model = nvfp4.load_model(path)
      >>> nvfp4.add_lora(model, 8, merge_aware=True, rngs=nnx.Rngs(0))
      >>> nvfp4.merge_lora(model)
      >>> model.layers[0].attention.out.adapter is None
      True

    Source: the idea of training through the rounding of the merged weights is that of axolotl's
    `nvfp4_merge_aware`; straight-through gradients are from Bengio, Leonard, Courville, "Estimating
    or Propagating Gradients Through Stochastic Neurons for Conditional Computation",
    arXiv:1308.3432, 2013.
    """
    check_kind("model", model, nnx.Module)
    layers = [layer for layer in find_adaptable(model) if layer.pair is not None]
    _check(layers)
    for owner in {id(layer.owner): layer.owner for layer in layers}.values():
        _merge(owner)
    for layer in layers:
        layer.remove()
    derive = getattr(model, "derive_weights", None)
    if derive is not None and any(layer.group == HEAD for layer in layers):
        derive()  # the copy of the head with which drafts are made


def _check(layers: list[Adaptable]) -> None:
    """Check that the adapters of some layers can be merged.

    Raises:
      ValueError: there are none, the model is on a mesh, or values are not finite.
    """
    if not layers:
        raise ValueError(
            "model: expected a model with adapters, which add_lora or load_lora adds; got none"
        )
    sharded = [layer.name for layer in layers if layer.on_mesh]
    if sharded:
        raise ValueError(
            f"model: expected a model on one device, but {sharded[0]} is on a mesh. Write the "
            "adapters with save_lora, load the model without a mesh, and use load_lora there"
        )
    for layer in layers:
        if not all(jnp.isfinite(matrix).all() for matrix in layer.take()):
            raise ValueError(f"model: the adapter of {layer.name} has values that are not finite")


def _merge(owner: Any) -> None:
    """Add the adapters of a module to its weights."""
    if isinstance(owner, HeadMatrices):
        owner.merge()
    elif isinstance(owner, RoutedExperts):
        stacked = owner.params.get_value().down.shape[:-3]
        assert owner.adapter is not None
        pairs = {name: pair.read() for name, pair in owner.adapter.pairs().items()}
        owner.params.set_value(_merge_experts(owner.params.get_value(), pairs, len(stacked)))
    else:
        scaled = isinstance(owner, ScaledLinear)
        linear = owner.linear if scaled else owner
        weight, scale = linear.weight.get_value(), owner.scale.get_value() if scaled else None
        made = _merge_linear(weight, owner.adapter, scale, len(weight.shape) - 2)
        linear.weight.set_value(made)


@functools.partial(jax.jit, static_argnums=3)
def _merge_linear(weight, adapter, channel_scale, stacked: int):
    """Return the weight of a linear layer with its adapters added.

    Args:
      weight: the weight, in any format.
      adapter: `LoRA`.
      channel_scale: as for `merge_weight`.
      stacked: how many leading axes count modules, as `nnx.vmap` stacks them.
    """

    def merge(weight, adapter, channel_scale):
        return merge_weight(weight, adapter.change(weight.shape[-1]), channel_scale)

    for _ in range(stacked):
        merge = jax.vmap(merge)
    return merge(weight, adapter, channel_scale)


@functools.partial(jax.jit, static_argnums=2)
def _merge_experts(params, pairs, stacked: int):
    """Return the experts of a layer with their adapters added.

    Args:
      params: `MoEParams` or `DenseExperts`.
      pairs: name of each adapted matrix -> `LowRank`.
      stacked: how many leading axes count modules.
    """

    def merge(params, pairs):
        made = {name: add_to_each(getattr(params, name), pair) for name, pair in pairs.items()}
        return dataclasses.replace(params, **made)

    for _ in range(stacked):
        merge = jax.vmap(merge)
    return merge(params, pairs)
