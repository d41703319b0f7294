"""Nemotron-H, Nemotron-3 and Nemotron-3.5.

A layer is ``x + mixer(norm(x))``. Its one mixer is a Mamba-2 mixer, an attention, an MLP or an
expert block. The attention has no positional embedding, because the recurrent layers carry
positions. MLPs and experts have no gate. In Nemotron-3 Super, a projection shrinks the activations
before the routed experts, and another one restores their size after them.

Source: `modeling_nemotron_h` of transformers, and NVIDIA's code that comes with its checkpoints.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.models.config import MOST, Fields, is_finite
from jax_nvfp4_moe.models.decoder import Architecture, Decoder, build_around
from jax_nvfp4_moe.models.drafting_layers import MTP, DraftForm
from jax_nvfp4_moe.models.keys import DECODER_KEYS, gqa_keys, mamba2_keys
from jax_nvfp4_moe.models.sparse import read_grouped_router
from jax_nvfp4_moe.nn.attention.grouped_query import GQAConfig, build_heads
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.keys import KeyTable, below
from jax_nvfp4_moe.nn.building.sharding import build_sharded
from jax_nvfp4_moe.nn.experts.moe import LatentProjections, NVFP4MoE
from jax_nvfp4_moe.nn.norm import Residual, RMSNorm
from jax_nvfp4_moe.nn.recurrent.mamba2 import Mamba2Config, build_mamba2
from jax_nvfp4_moe.numerics.activations import activate, find_activation
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import TensorParallel

MAMBA, ATTENTION, DENSE, MOE = "M", "*", "-", "E"
# The names of the layers in a list of layer types. Older names follow newer ones.
_KINDS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": DENSE,
    "moe": MOE,
}
_MOST_DRAFTING = 64  # layers of a drafter; published models have two
_ACTIVATIONS = {
    "relu2": "relu2",
    "silu": "silu_no_mul",
    "swish": "silu_no_mul",
    "gelu": "gelu_no_mul",
    "gelu_pytorch_tanh": "gelu_tanh_no_mul",
}


@dataclasses.dataclass(frozen=True)
class Experts:
    """The sizes of an expert block.

    Attributes:
      count: the number of routed experts.
      intermediate: the intermediate size of one expert.
      latent: the size of the activations that enter the routed experts. None means the size of the
        residual stream.
      shared_intermediate: the intermediate size of the shared expert.
      router: how tokens choose experts.
    """

    count: int
    intermediate: int
    latent: int | None
    shared_intermediate: int
    router: Router


@dataclasses.dataclass(frozen=True)
class NemotronHConfig:
    """The sizes of a Nemotron-H model.

    Attributes:
      vocab_size: the number of token ids.
      hidden: the size of the residual stream.
      pattern: the kind of each layer, a string of `MAMBA`, `ATTENTION`, `DENSE` and `MOE`.
      max_positions: the number of positions that the model was trained for.
      eps: the epsilon of the norms.
      wide_residual: whether the residual stream is float32 whatever the dtype of the model.
      attention: the sizes of the attention.
      mamba: the sizes of the Mamba-2 mixer.
      activation: the activation of MLPs and experts, a name in `numerics.activations.ACTIVATIONS`.
      mlp_bias: whether MLPs, and the experts of some files, have biases.
      dense_intermediate: the intermediate size of MLPs.
      experts: the sizes of the expert block. None if no layer has one.
      tied: whether the head shares the weights of the embedding.
      drafting_pattern: the kind of each drafting layer.
    """

    vocab_size: int
    hidden: int
    pattern: str
    max_positions: int
    eps: float
    wide_residual: bool
    attention: GQAConfig
    mamba: Mamba2Config
    activation: str
    mlp_bias: bool
    dense_intermediate: int
    experts: Experts | None
    tied: bool
    drafting_pattern: str

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.pattern)


def read_config(config: Mapping[str, Any]) -> NemotronHConfig:
    """Read a parsed ``config.json``.

    Raises:
      CheckpointError: lists all values that are missing, wrong or not supported.
    """
    fields = Fields(config)
    pattern = _read_pattern(fields, config)
    hidden = fields.size("hidden_size")
    eps = fields.number("layer_norm_epsilon", 1e-5)
    read = NemotronHConfig(
        vocab_size=fields.size("vocab_size"),
        hidden=hidden,
        pattern=pattern,
        max_positions=fields.size("max_position_embeddings"),
        eps=eps,
        wide_residual=fields.flag("residual_in_fp32", False),
        attention=_read_attention(fields, hidden, eps),
        mamba=_read_mamba(fields, config, hidden, eps),
        activation=_read_activation(fields, "mlp_hidden_act", "relu2"),
        mlp_bias=fields.flag("mlp_bias", False),
        dense_intermediate=fields.size("intermediate_size") if DENSE in pattern else 1,
        experts=_read_experts(fields) if MOE in pattern else None,
        tied=fields.flag("tie_word_embeddings", False),
        drafting_pattern=_read_drafting_pattern(config),
    )
    fields.finish()
    return read


def _read_drafting_pattern(config) -> str:
    """Return the kinds of the drafting layers, by default an attention and experts.

    Kinds that no drafting layer has are left out. The tensors of such layers are then a problem for
    those who load drafting layers, and for nobody else.
    """
    listed = config.get("mtp_layers_block_type") or config.get("mtp_hybrid_override_pattern")
    listed = listed[:_MOST_DRAFTING] if isinstance(listed, list | str) else []
    kinds = [_KINDS.get(str(one), one) for one in listed]
    return "".join(one for one in kinds if one in (ATTENTION, MOE)) or ATTENTION + MOE


def _read_pattern(fields, config) -> str:
    """Return the kinds of all layers, from a list of names or, in older files, from a string."""
    names = config.get("layers_block_type") or config.get("layer_types")
    pattern = config.get("hybrid_override_pattern")
    listed, most = pattern if names is None else names, MOST["num_hidden_layers"]
    fields.require(
        not isinstance(listed, (str, list)) or len(listed) <= most,
        f"hybrid_override_pattern or layers_block_type: expected at most {most} layers",
    )
    if names is not None:
        known = isinstance(names, list) and all(
            isinstance(name, str) and name in _KINDS for name in names
        )
        fields.require(
            known and bool(names),
            f"layers_block_type: expected a list of {', '.join(_KINDS)}; got {quoted(names)}",
        )
        return "".join(_KINDS[name] for name in names) if known else ""
    kinds = (MAMBA, ATTENTION, DENSE, MOE)
    known = isinstance(pattern, str) and set(pattern) <= set(kinds)
    fields.require(
        known and bool(pattern),
        f"hybrid_override_pattern or layers_block_type: expected a string of {' '.join(kinds)}; "
        f"got {quoted(pattern)}",
    )
    return pattern if known else ""


def _read_attention(fields, hidden, eps) -> GQAConfig:
    """Return the sizes of the attention."""
    heads, kv_heads = fields.heads()
    # transformers ignores the window, and NVIDIA's code applies it. Which of the two results is
    # right for a file cannot be known.
    fields.require(not fields.present("sliding_window"), "sliding_window is not supported")
    # With the flag, NVIDIA's files have biases and those of transformers have none. None takes
    # biases if the file has them.
    bias = None if fields.flag("attention_bias", False) else False
    head_dim = fields.size("head_dim", "attention_head_dim", default=128)
    return GQAConfig(hidden, heads, kv_heads, head_dim, eps, None, bias=bias, out_bias=bias)


def _read_mamba(fields, config, hidden, eps) -> Mamba2Config:
    """Return the sizes of the Mamba-2 mixer.

    Fields have names that begin with "mamba" in some files, and other names in the rest.
    """
    bias = "mamba_conv_bias" if fields.present("mamba_conv_bias") else "use_conv_bias"
    heads = fields.size("mamba_num_heads", default=128)
    groups = fields.size("mamba_n_groups", "n_groups", default=8)
    fields.multiple("mamba_num_heads", heads, groups, "groups")
    return Mamba2Config(
        hidden=hidden,
        heads=heads,
        head_dim=fields.size("mamba_head_dim", default=64),
        state_size=fields.size("ssm_state_size", default=128),
        groups=groups,
        conv_size=fields.size("mamba_d_conv", "conv_kernel", default=4),
        activation=_read_activation(fields, "mamba_hidden_act", "silu"),
        bias=fields.flag("use_bias", False),
        conv_bias=fields.flag(bias, True),
        eps=eps,
        step_limits=_read_step_limits(fields, config),
    )


def _read_step_limits(fields, config) -> tuple[float, float]:
    """Return the smallest and the largest time step.

    A file with ``auto_map`` comes with NVIDIA's own code, with which it was trained. That code
    keeps time steps within ``time_step_limit``. All other files are run by transformers, whose
    class (up to 5.17) does not read ``time_step_limit`` and only applies ``time_step_min``.
    """
    if not fields.present("auto_map"):
        name = "mamba_dt_min" if fields.present("mamba_dt_min") else "time_step_min"
        return fields.number(name, 1e-3), math.inf
    name = "mamba_dt_limit" if fields.present("mamba_dt_limit") else "time_step_limit"
    given = config.get(name, [0.0, math.inf])
    pair = given if isinstance(given, list) and len(given) == 2 else [None, None]
    low, high = map(_read_float, pair)
    fields.require(
        0 <= low <= high,
        f"{name}: expected two nonnegative numbers, the smaller first; got {quoted(given)}",
    )
    return low, high


def _read_float(value) -> float:
    """Return a number, which may be infinite, or NaN if `value` is none.

    transformers 5 writes infinity as an object.
    """
    if value == {"__float__": "Infinity"}:
        return math.inf
    known = type(value) is float or (type(value) is int and is_finite(value))
    return float(value) if known else math.nan


def _read_activation(fields, name, default) -> str:
    """Return the name that an activation of the config has in this package."""
    return _ACTIVATIONS[fields.only(name, tuple(_ACTIVATIONS), default)]


def _read_experts(fields) -> Experts:
    """Return the sizes of the expert block."""
    names = ("n_routed_experts", "num_local_experts")
    router = read_grouped_router(fields, *names)
    return Experts(
        count=fields.size(*names),
        intermediate=fields.size("moe_intermediate_size"),
        latent=fields.size("moe_latent_size") if fields.present("moe_latent_size") else None,
        shared_intermediate=fields.size("moe_shared_expert_intermediate_size"),
        router=router,
    )


class MLP(TensorParallel):
    """The MLP of dense layers and shared experts: ``down(activation(up(x)))``.

    Attributes:
      up: the first linear.
      activation: the activation, which is computed in float32.
      down: the second linear.
    """

    def __init__(self, config: NemotronHConfig, make: Builder, path: str, intermediate: int):
        """Make an MLP with the `intermediate` columns of one shard."""
        h, bias = config.hidden, config.mlp_bias
        self.activation = find_activation(config.activation)
        self.up = make.linear(f"{path}.up", intermediate, h, bias)
        self.down = make.linear(f"{path}.down", h, intermediate, bias)

    def run(self, x):
        """Run the MLP on ``x [..., h]``."""
        return self.down(activate(self.activation, self.up(x)).astype(x.dtype))


def build_mlp(config: NemotronHConfig, make: Builder, path: str, intermediate: int) -> MLP:
    """Make an `MLP`, whose intermediate columns are sharded along the mesh axis `tensor`."""
    shards = make.settings.shards
    return build_sharded(
        make,
        lambda make, width: MLP(config, make, path, width),
        intermediate,
        intermediate // shards,
        specs={"up": ShardSpec("rows", shards), "down": ShardSpec("columns", shards)},
        last=f"{path}.down",
        width=intermediate,
    )


class Layer(nnx.Module):
    """A mixer with a norm before it and a residual connection around it.

    Attributes:
      kind: `MAMBA`, `ATTENTION`, `DENSE` or `MOE`.
      norm: the norm before the mixer.
      mixer: the mixer.
      dtype: the dtype that the mixer reads.
      residual_dtype: the dtype of the layer's result.
    """

    def __init__(self, kind: str, norm: RMSNorm, mixer, dtype, residual_dtype):
        """Make a layer of its two parts.

        Args:
          kind: `MAMBA`, `ATTENTION`, `DENSE` or `MOE`.
          norm: the norm before the mixer.
          mixer: the mixer.
          dtype: the dtype that the mixer reads.
          residual_dtype: the dtype of the layer's result.
        """
        self.kind, self.norm, self.mixer = kind, norm, mixer
        self.dtype, self.residual_dtype = dtype, residual_dtype

    def init_cache(self, batch: int, max_length: int) -> Mapping[str, jax.Array]:
        """Return the empty cache entries of `batch` rows. An MLP or an expert block has none."""
        if self.kind in (DENSE, MOE):
            return {}
        return self.mixer.init_cache(batch, max_length)

    def __call__(self, stream, positions, entries):
        """Run the layer.

        Args:
          stream: the `Residual` stream ``[b, t, h]``.
          positions: int32 ``[b, t]``, the position of each token in its row.
          entries: the layer's cache entries. None runs without a cache.

        Returns:
          The stream with the result of the mixer, and the updated cache entries.
        """
        x, normal = self._normalize(stream)
        if self.kind in (DENSE, MOE):
            y = self.mixer(normal)
        else:
            y, entries = self.mixer(normal, positions, entries)
        return Residual(x, y.astype(self.residual_dtype)), entries

    def _normalize(self, stream):
        """Return the sum of the stream in `residual_dtype`, and the normalized sum in `dtype`."""
        if stream.x.dtype == self.residual_dtype == self.dtype:
            return self.norm.normalize_sum(stream)
        x = stream.x if stream.added is None else stream.x + stream.added
        return x.astype(self.residual_dtype), self.norm(x.astype(self.dtype))


def build_moe(config: NemotronHConfig, layer: int, make: Builder) -> NVFP4MoE:
    """Make the expert block of `layer` with its shared expert and latent projections.

    Raises:
      ValueError: the layer has no experts.
    """
    sizes = config.experts
    if sizes is None or not 0 <= layer < config.num_layers or config.pattern[layer] != MOE:
        raise ValueError(
            f"layer: expected the index of a layer with experts, {MOE} in the pattern "
            f"{config.pattern}; got {layer}"
        )
    path, e, h = f"layers.{layer}.mixer", sizes.count, config.hidden
    # Files of transformers have no biases in experts, even if the config has the flag.
    bias = config.mlp_bias and make.has(f"{path}.expert_bias")
    width = sizes.latent or h
    params, checkpoint_scheme = make.experts(
        f"{path}.experts.params", e, width, sizes.intermediate, gated=False, bias=bias
    )
    latent = None
    if sizes.latent is not None:
        down = make.linear(f"{path}.latent.down", width, h, config.mlp_bias)
        up = make.linear(f"{path}.latent.up", h, width, config.mlp_bias)
        latent = LatentProjections(width, down, up)
    return NVFP4MoE(
        e,
        h,
        sizes.intermediate,
        activation=config.activation,
        params=params,
        token_router=make.token_router(path, e, h, sizes.router, correction_bias=True),
        shared_experts=build_mlp(config, make, f"{path}.shared_experts", sizes.shared_intermediate),
        latent=latent,
        checkpoint_scheme=checkpoint_scheme,
        **make.settings.block_arguments(),
    )


def _build_mixer(config, layer, make):
    """Make the mixer of `layer`."""
    path, kind = f"layers.{layer}.mixer", config.pattern[layer]
    if kind == MAMBA:
        return build_mamba2(config.mamba, path, make)
    if kind == ATTENTION:
        return build_heads(config.attention, path, make)
    if kind == DENSE:
        return build_mlp(config, make, path, config.dense_intermediate)
    return build_moe(config, layer, make)


def build_model(config: NemotronHConfig, make: Builder) -> Decoder:
    """Make the whole model."""
    dtype = make.settings.dtype

    def build_layer(layer):
        last = layer == config.num_layers - 1
        residual = jnp.float32 if config.wide_residual and not last else dtype
        return _build_layer(config, layer, make, residual)

    return build_around(config, make, build_layer, tied=config.tied)


def _build_layer(config, layer, make, residual_dtype):
    """Make one layer."""
    norm = make.norm(f"layers.{layer}.norm", config.hidden, config.eps)
    mixer = _build_mixer(config, layer, make)
    return Layer(config.pattern[layer], norm, mixer, make.settings.dtype, residual_dtype)


def _build_drafting_layers(config: NemotronHConfig, make: Builder) -> list[Layer]:
    """Make the layers of the drafter."""
    own = dataclasses.replace(config, pattern=config.drafting_pattern)
    return [_build_layer(own, layer, make, make.settings.dtype) for layer in range(own.num_layers)]


_MIXER = "model.layers.*.mixer"
KEYS: KeyTable = {
    **DECODER_KEYS,
    "layers.*.norm": "model.layers.*.norm",
    **gqa_keys("layers.*.mixer", _MIXER),
    **mamba2_keys("layers.*.mixer", _MIXER),
    **below(
        "layers.*.mixer",
        _MIXER,
        {
            "up": "up_proj",
            "down": "down_proj",
            "experts.params": "experts",
            "expert_bias": "experts.0.down_proj.bias",
            "token_router.weight": "gate.weight",
            "token_router.correction_bias": "gate.e_score_correction_bias",
            "shared_experts.up": "shared_experts.up_proj",
            "shared_experts.down": "shared_experts.down_proj",
            "latent.down": "fc1_latent_proj",
            "latent.up": "fc2_latent_proj",
        },
    ),
}
# The first drafting layer holds what joins embeddings and vectors, and the last one the last norm.
_DRAFTING = DraftForm(
    {
        **MTP,
        "joint": "mtp.layers.0.eh_proj",
        "embedding_norm": "mtp.layers.0.enorm",
        "hidden_norm": "mtp.layers.0.hnorm",
        "norm": "mtp.layers.{last}.final_layernorm",
    },
    _build_drafting_layers,
    count=lambda config: len(config.drafting_pattern),
)
ARCHITECTURE = Architecture(
    read_config, build_model, build_moe, KEYS, moe="layers.*.mixer", drafting=_DRAFTING
)
