"""`add_lora`: put low-rank adapters beside the frozen weights of a model."""

import fnmatch
import math
import numbers
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import DTypeLike

from jax_nvfp4_moe.numerics.arguments import check_kind, check_size
from jax_nvfp4_moe.ops.moe import check_dtype
from jax_nvfp4_moe.training.adaptable import EXPERTS, MIXERS, MLPS, Adaptable, find_adaptable

_GROUPS = (MIXERS, MLPS, EXPERTS)


def add_lora(
    model: nnx.Module,
    rank: int,
    *,
    targets: str | Sequence[str] = MIXERS,
    alpha: float | None = None,
    dtype: DTypeLike = jnp.float32,
    merge_aware: bool = False,
    rngs: nnx.Rngs,
) -> None:
    """Add low-rank adapters to linear layers and experts of a model, in place.

    An adapted layer computes ``W @ x + alpha / rank * B @ (A @ x)``. W stays packed and frozen. A
    and B are `nnx.LoRAParam`, so filters and optimizers find them. A is drawn at random and B is
    zero, so that each operation gives what it gave before. Under `jax.jit`, XLA may fuse operations
    in another way, which can change the last bits of float32 results.

    Each layer of the checkpoint has matrices of its own, also if a module of this package joins
    several layers. `save_lora` therefore writes files that PEFT reads.

    If experts are adapted, their two products run apart, and the adapters work on the rows of each
    expert. The first adapter is added before the activation, as in PEFT. In 16 bits, the result of
    the first product is then rounded, so outputs may differ in their last bits right away.

    Args:
      model: a model from `load_model`, a block from `load_moe`, or an own model that contains
        modules of this package. On a mesh, adapters are sharded like the weights that they change.
      rank: r, the number of rows of A and of columns of B.
      targets: which layers to adapt: a name or a sequence of names. "mixers", the default, stands
        for all linears of attention and other mixers of tokens, such as delta nets, without the
        indexers that choose keys. "mlps" stands for those of dense MLPs, of shared experts and
        around experts, "experts" for the routed experts. Any other name is a pattern for the name
        of a layer in transformers, which may have the wildcards of `fnmatch`. It must match the
        whole name or its last parts: "q_proj", "layers.0.*", "shared_experts.*_proj", "lm_head",
        "experts.down_proj". In an own model, names are the paths of modules.
      alpha: the products are multiplied by ``alpha / rank``. None, the default, takes `rank`.
      dtype: dtype of A and B, float32 by default. Products run in the dtype of the layer, with
        float32 sums.
      merge_aware: whether to train the weights that `merge_lora` will make. A layer then computes
        ``Q(W + alpha / rank * B @ A) @ x``, where Q rounds to the format of W. The derivative of Q
        is taken for the identity (straight-through), so A and B have the gradients that they have
        without this option. Each call rounds the weights again, and a backward pass keeps them.
        False by default: merging then rounds away a part of what was trained.
      rngs: source of A, from its stream "params".

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: a target matches no layer, a layer has an adapter already, `place_model` has moved
        experts that would be adapted, or `rank` or `alpha` is not positive. The model is then
        unchanged.

    Example:
      >>> import importlib.resources
      >>> from flax import nnx
      >>> import jax_nvfp4_moe as nvfp4
      >>> path = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
      >>> model = nvfp4.load_model(path)
      >>> nvfp4.add_lora(model, 8, targets=("mixers", "experts"), rngs=nnx.Rngs(0))
      >>> adapter = model.layers[0].attention.out.adapter
      >>> adapter.out.a.shape, adapter.out.b.shape
      ((8, 256), (256, 8))

    Source: Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen, "LoRA: Low-Rank Adaptation of Large
    Language Models", arXiv:2106.09685, 2021.
    """
    check_kind("model", model, nnx.Module)
    if not isinstance(rngs, nnx.Rngs):  # which `check_kind` would take for an array
        raise TypeError(f"rngs: expected nnx.Rngs, such as nnx.Rngs(0); got {type(rngs).__name__}")
    check_size("rank", rank)
    check_kind("merge_aware", merge_aware, bool)
    alpha, dtype = check_alpha(rank if alpha is None else alpha), check_dtype(dtype)
    chosen = choose_layers(model, targets)
    adapted = [layer.name for layer in chosen if layer.pair is not None]
    if adapted:
        raise ValueError(
            f"model: expected layers without adapters, but {_few(adapted)} have one. Choose other "
            "targets, or load the model again"
        )
    for layer in chosen:
        layer.check()
    for layer in chosen:
        *lead, n, k = layer.shape
        bound = k**-0.5
        a = jax.random.uniform(rngs.params(), (*lead, rank, k), dtype, -bound, bound)
        layer.put(a, jnp.zeros((*lead, n, rank), dtype), alpha, merge_aware=merge_aware)


def check_alpha(alpha: float) -> float:
    """Return `alpha` as a float, after a check that it is a positive number."""
    if not isinstance(alpha, numbers.Real):
        raise TypeError(f"alpha: expected a positive number or None, got {type(alpha).__name__}")
    alpha = float(alpha)
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"alpha: expected a positive number, got {alpha}")
    return alpha


def choose_layers(model: nnx.Module, targets: str | Sequence[str]) -> list[Adaptable]:
    """Return the layers that `targets` of `add_lora` names.

    Raises:
      TypeError: `targets` is no name and no sequence of names.
      ValueError: a target matches no layer; the message lists all that match none.
    """
    if not isinstance(targets, Iterable):
        raise TypeError(
            f"targets: expected a name or a sequence of names, got {type(targets).__name__}"
        )
    patterns = [targets] if isinstance(targets, str) else list(targets)
    for pattern in patterns:
        check_kind("targets", pattern, str)
    layers = find_adaptable(model)
    unmatched = [one for one in patterns if not any(_matches(layer, one) for layer in layers)]
    if unmatched or not patterns:
        known = dict.fromkeys(".".join(layer.name.split(".")[-2:]) for layer in layers)
        raise ValueError(
            f"targets: {', '.join(map(repr, unmatched)) or 'an empty sequence'} matches no layer; "
            f"expected {', '.join(map(repr, _GROUPS))}, or patterns for names of this model's "
            f"layers, which end in {_few(known, 40) or 'nothing: it has none to adapt'}"
        )
    return [layer for layer in layers if any(_matches(layer, one) for one in patterns)]


def _matches(layer: Adaptable, pattern: str) -> bool:
    """Return whether a target stands for a layer."""
    if pattern in _GROUPS:
        return layer.group == pattern
    return any(fnmatch.fnmatchcase(layer.name, one) for one in (pattern, f"*.{pattern}"))


def _few(names, most=5) -> str:
    """Return the first of some names for a message."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
