"""`merge_lora`: add low-rank adapters to the weights beside which they stand."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_nvfp4_moe.nn.attention.latent_attention import HeadMatrices
from jax_nvfp4_moe.nn.experts.routed_experts import RoutedExperts
from jax_nvfp4_moe.nn.linear.lora import LoRA, LowRankPair, merge_weight
from jax_nvfp4_moe.nn.linear.scaled_linear import ScaledLinear
from jax_nvfp4_moe.nn.saving.resharding import Entry, convert
from jax_nvfp4_moe.numerics.arguments import check_kind
from jax_nvfp4_moe.numerics.changed_weights import add_rounded
from jax_nvfp4_moe.ops.low_rank import add_to_each, product_of
from jax_nvfp4_moe.parallel.shard_order import to_one_device
from jax_nvfp4_moe.parallel.sharded_variable import find_layout
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
      model: a model with adapters that `add_lora` or `load_lora` has added. On a mesh, each
        adapted weight is gathered on every device, one layer at a time, and sharded again as
        before. The merged weights have the bits of a merge on one device. All processes must call.

    Raises:
      ValueError: the model has no adapters, or an adapter is not finite. The model is then
        unchanged.

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
    known = find_adaptable(model)
    layers = [layer for layer in known if layer.pair is not None]
    _check(layers)
    for owner in {id(layer.owner): layer.owner for layer in layers}.values():
        _merge(owner, [layer for layer in known if layer.owner is owner])
    for layer in layers:
        layer.remove()
    derive = getattr(model, "derive_weights", None)
    if derive is not None and any(layer.group == HEAD for layer in layers):
        derive()  # the copy of the head with which drafts are made


def _check(layers: list[Adaptable]) -> None:
    """Check that the adapters of some layers can be merged.

    Raises:
      ValueError: there are none, or values are not finite.
    """
    if not layers:
        raise ValueError(
            "model: expected a model with adapters, which add_lora or load_lora adds; got none"
        )
    for layer in layers:
        if not all(jnp.isfinite(matrix).all() for matrix in layer.take()):
            raise ValueError(f"model: the adapter of {layer.name} has values that are not finite")


def _merge(owner: Any, layers: list[Adaptable]) -> None:
    """Add the adapters of a module to its weights.

    Args:
      owner: the module.
      layers: all layers of the file that the module holds, in the order of its rows.
    """
    pairs = {layer.part: _whole_pair(layer) for layer in layers if layer.pair is not None}
    if isinstance(owner, HeadMatrices):
        (pair,) = pairs.values()
        keys, values = (_gather(variable) for variable in (owner.keys, owner.values))
        change = product_of(pair.read()).reshape(len(keys), -1, keys.shape[-1])
        changes = jnp.split(change, [keys.shape[1]], axis=1)
        _shard(owner.keys, add_rounded(keys, changes[0]))
        _shard(owner.values, add_rounded(values, changes[1]))
    elif isinstance(owner, RoutedExperts):
        params = _gather(owner.params)
        read = {name: pair.read() for name, pair in pairs.items()}
        _shard(owner.params, _merge_experts(params, read, len(params.down.shape) - 3))
    else:
        scaled = isinstance(owner, ScaledLinear)
        linear = owner.linear if scaled else owner
        adapter = LoRA({layer.part: layer.shape[-2] for layer in layers}, pairs)
        weight, scale = _gather(linear.weight), _gather(owner.scale) if scaled else None
        _shard(linear.weight, _merge_linear(weight, adapter, scale, len(weight.shape) - 2))


def _whole_pair(layer: Adaptable) -> LowRankPair:
    """Return the adapter of a layer with whole matrices in the order of the file."""
    assert layer.pair is not None
    if not layer.on_mesh:
        return layer.pair
    a, b = (nnx.LoRAParam(jnp.asarray(matrix)) for matrix in layer.take())
    return LowRankPair(a, b, layer.pair.alpha, layer.pair.merge_aware)


def _find_mesh(value: Any) -> Mesh | None:
    """Return the mesh on which a value is, with Auto axes; None if it is on one device."""
    found = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(value))
    named = [one for one in found if isinstance(one, NamedSharding)]
    if not named:
        return None
    mesh: Any = named[0].mesh
    return Mesh(mesh.devices, mesh.axis_names)


def _gather(variable: Any) -> Any:
    """Return the value of a variable; on a mesh as on one device, replicated on all devices."""
    value, layout = variable.get_value(), find_layout(variable)
    mesh = _find_mesh(value)
    if mesh is None:
        return value
    whole = functools.partial(to_one_device, layout=layout)
    return jax.jit(whole, out_shardings=NamedSharding(mesh, PartitionSpec()))(value)


def _shard(variable: Any, made: Any) -> None:
    """Store a value from `_gather` in a variable, in the order and on the devices of its value."""
    value = variable.get_value()
    if _find_mesh(value) is None:
        variable.set_value(made)
    else:
        name, layout = "merged", find_layout(variable)
        again = convert(Entry(name, made, None), Entry(name, value, layout))
        placed = jax.device_put(again, jax.tree.map(lambda leaf: leaf.sharding, value))
        variable.set_value(placed)


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
