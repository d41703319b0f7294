"""What decoders with attention and routed experts share: their sizes, and their expert block."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax_nvfp4_moe.models.config import Fields
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.experts.gated_mlp import GatedMLP, build_gated_mlp
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.numerics.activations import ActivationCall
from jax_nvfp4_moe.numerics.routing import Router

ACTIVATIONS = ("silu", "swish")  # two names of the same function


@dataclasses.dataclass(frozen=True)
class SparseConfig:
    """The sizes of a model with attention and routed experts.

    Attributes:
      vocab_size: the number of token ids.
      hidden: the size of the residual stream.
      num_layers: the number of layers.
      max_positions: the number of positions that the model was trained for.
      eps: the epsilon of the norms.
      attention: the sizes and options of the attention, as the attention module reads them. It is
        a tuple with one element for each layer if layers differ.
      dense_layers: the indices of layers with one dense MLP in place of experts.
      dense_intermediate: the intermediate size of those MLPs.
      num_experts: the number of routed experts in a layer.
      intermediate: the intermediate size of one expert.
      shared_intermediate: the intermediate size of all shared experts together. 0 for none.
      router: how tokens choose experts.
      tied: whether the head shares the weights of the embedding.
    """

    vocab_size: int
    hidden: int
    num_layers: int
    max_positions: int
    eps: float
    attention: Any
    dense_layers: frozenset[int]
    dense_intermediate: int
    num_experts: int
    intermediate: int
    shared_intermediate: int
    router: Router
    tied: bool


def read_sparse(
    fields: Fields,
    attention: Any,
    router: Router,
    *,
    eps: float,
    experts: Sequence[str],
    intermediate: str,
    dense_layers: frozenset[int] = frozenset(),
    shared_experts: int = 0,
    shared_intermediate: str | None = None,
    tied: bool = False,
    activation: str | None = None,
) -> SparseConfig:
    """Read the sizes that all these models store under the same names, and return all sizes.

    Args:
      fields: the fields of ``config.json``.
      attention: the sizes of the attention, which the caller has read.
      router: the router, which the caller has read.
      eps: the default epsilon of the norms.
      experts: the names that the number of experts may have.
      intermediate: the name of the intermediate size of one expert.
      dense_layers: the indices of layers without experts.
      shared_experts: the number of shared experts.
      shared_intermediate: the name of the intermediate size of all shared experts together. None if
        each shared expert is as wide as a routed expert.
      tied: the default of ``tie_word_embeddings``.
      activation: the activation, if the caller has read it. None reads ``hidden_act``, which must
        be SiLU.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    if activation is None:
        fields.only("hidden_act", ACTIVATIONS, "silu")
    width = fields.size(intermediate)
    read = SparseConfig(
        vocab_size=fields.size("vocab_size"),
        hidden=fields.size("hidden_size"),
        num_layers=fields.size("num_hidden_layers"),
        max_positions=fields.positions(),
        eps=fields.number("rms_norm_eps", eps),
        attention=attention,
        dense_layers=dense_layers,
        dense_intermediate=fields.size("intermediate_size") if dense_layers else width,
        num_experts=fields.size(*experts),
        intermediate=width,
        shared_intermediate=(
            fields.size(shared_intermediate) if shared_intermediate else shared_experts * width
        ),
        router=router,
        tied=fields.flag("tie_word_embeddings", tied),
    )
    fields.finish()
    return read


def read_top_k(fields: Fields, *experts: str) -> int:
    """Return ``num_experts_per_tok``, which must not exceed the number of experts.

    Args:
      fields: the fields of ``config.json``.
      experts: the names that the number of experts may have.
    """
    top_k, total = fields.size("num_experts_per_tok"), fields.size(*experts)
    fields.relate(
        top_k <= total, f"num_experts_per_tok: expected at most {total} experts, got {top_k}"
    )
    return top_k


def read_grouped_router(
    fields: Fields,
    *experts: str,
    groups: int = 1,
    kept: int = 1,
    scaling: float = 1.0,
    score: str = "sigmoid",
) -> Router:
    """Read a router that chooses groups of experts first.

    A correction bias is added to the scores for the choice. The best groups are kept, and the best
    experts of those groups are chosen.

    Args:
      fields: the fields of ``config.json``.
      experts: the names that the number of experts may have.
      groups: the default of ``n_group``.
      kept: the default of ``topk_group``.
      scaling: the default of ``routed_scaling_factor``.
      score: the score function, "sigmoid" or "softmax".

    Source: arXiv:2412.19437, section 2.1.2.
    """
    fields.only("scoring_func", (score,), score)
    fields.only("topk_method", ("noaux_tc",), "noaux_tc")
    total = fields.size(*experts)
    top_k = fields.size("num_experts_per_tok")
    groups, kept = fields.size("n_group", default=groups), fields.size("topk_group", default=kept)
    fits = total % groups == 0 and kept <= groups and top_k <= total // groups * kept
    fields.relate(
        fits,
        f"num_experts_per_tok: {top_k} experts cannot be chosen from {kept} of {groups} groups of "
        f"{total} experts",
    )
    return Router(
        top_k,
        score=score,
        renormalize=fields.flag("norm_topk_prob", True),
        num_groups=groups if fits else 1,
        groups_kept=kept if fits else 1,
        scaling=fields.number("routed_scaling_factor", scaling),
    )


def read_sparse_step(fields: Fields) -> frozenset[int]:
    """Return the layers without experts: ``mlp_only_layers``, and all but each n-th layer.

    ``decoder_sparse_step`` is n, 1 where it is missing.
    """
    step = fields.size("decoder_sparse_step", default=1)
    skipped = {layer for layer in range(fields.size("num_hidden_layers")) if (layer + 1) % step}
    return frozenset(skipped.union(fields.indices("mlp_only_layers")))


def read_leading_dense(fields: Fields, default: int) -> frozenset[int]:
    """Return the indices of the first ``first_k_dense_replace`` layers, which have no experts."""
    return read_first_layers(fields, "first_k_dense_replace", default)


def read_first_layers(fields: Fields, name: str, default: int) -> frozenset[int]:
    """Return the indices of the first layers, as many as the field `name` says."""
    layers = fields.size("num_hidden_layers")
    return frozenset(range(min(fields.count(name, default), layers)))


def read_dense_layers(fields: Fields, default: int) -> frozenset[int]:
    """Return the indices of the layers without experts.

    They are the layers that are "dense" in the list ``mlp_layer_types``, if the config has one, and
    the first ``first_k_dense_replace`` layers otherwise, `default` of them if it is missing.
    """
    dense = find_dense_layers(fields)
    return read_leading_dense(fields, default) if dense is None else dense


def find_dense_layers(fields: Fields) -> frozenset[int] | None:
    """Return the layers that are "dense" in ``mlp_layer_types``; None without a valid list."""
    types = fields.layer_types(("dense", "sparse"), (), "mlp_layer_types")
    return frozenset(n for n, kind in enumerate(types) if kind == "dense") if types else None


def require_experts(config: Any, layer: int) -> None:
    """Check that the model has a layer `layer` with experts.

    Args:
      config: has `num_layers` and `dense_layers`.
      layer: the index.

    Raises:
      ValueError: there is no such layer, or it has a dense MLP.
    """
    if not 0 <= layer < config.num_layers or layer in config.dense_layers:
        raise ValueError(
            f"layer: expected a layer with experts, from 0 to {config.num_layers - 1} and not in "
            f"{sorted(config.dense_layers)}; got {layer}"
        )


def build_block(
    config: SparseConfig,
    layer: int,
    make: Builder,
    *,
    bias: bool = False,
    stored_bias: Sequence[int] | None = None,
    logit_cap: float | None = None,
    block: type[NVFP4MoE] = NVFP4MoE,
    activation: str | ActivationCall = "silu",
    shared_activation: str | ActivationCall = "silu",
) -> NVFP4MoE:
    """Make the expert block of `layer` with its shared experts, at the paths of `keys.moe_keys`.

    Args:
      config: the sizes of the model.
      layer: the index of the layer.
      make: builds the parts.
      bias: whether the router has a correction bias.
      stored_bias: shape of that in the file; None for ``[experts]``.
      logit_cap: the bound of the router's logits; None for no bound.
      block: the class of the block.
      activation: the activation of the routed experts.
      shared_activation: the activation of the shared experts.

    Raises:
      ValueError: the layer has no experts.
    """
    require_experts(config, layer)
    path, e, h = f"layers.{layer}.mlp", config.num_experts, config.hidden
    params, checkpoint_scheme = make.experts(f"{path}.experts.params", e, h, config.intermediate)
    shared = None
    if config.shared_intermediate:
        build = functools.partial(GatedMLP, activation=shared_activation)
        shared = build_gated_mlp(
            make, f"{path}.shared_experts", h, config.shared_intermediate, build
        )
    return block(
        e,
        h,
        config.intermediate,
        activation=activation,
        params=params,
        token_router=make.token_router(
            path,
            e,
            h,
            config.router,
            correction_bias=bias,
            stored_bias=stored_bias,
            logit_cap=logit_cap,
        ),
        shared_experts=shared,
        checkpoint_scheme=checkpoint_scheme,
        **make.settings.block_arguments(),
    )
