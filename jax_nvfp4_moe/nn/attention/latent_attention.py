"""Multi-head latent attention (MLA) of DeepSeek-V3.

Source: `modeling_deepseek_v3` of transformers; arXiv:2412.19437.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.nn.attention.indexer import IndexerSizes
from jax_nvfp4_moe.nn.attention.key_pool import PoolSizes
from jax_nvfp4_moe.nn.attention.kv_cache import build_keys_and_values, empty_entries
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.sharding import build_sharded
from jax_nvfp4_moe.nn.intermediates import is_recorded, record
from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear
from jax_nvfp4_moe.nn.linear.fp8_linear import FP8Linear
from jax_nvfp4_moe.nn.linear.lora import LoRA
from jax_nvfp4_moe.nn.linear.nvfp4_linear import NVFP4Linear
from jax_nvfp4_moe.nn.packing import is_unpacked, pack_like, unpack
from jax_nvfp4_moe.numerics.changed_weights import add_rounded
from jax_nvfp4_moe.numerics.query_growth import grow
from jax_nvfp4_moe.numerics.rope import Rope
from jax_nvfp4_moe.ops.cache import append
from jax_nvfp4_moe.ops.causal_attention.op import attention
from jax_nvfp4_moe.ops.chosen_keys import attend_to_chosen
from jax_nvfp4_moe.ops.dense import dense
from jax_nvfp4_moe.ops.head_products import absorb_queries, expand_values, multiply_heads
from jax_nvfp4_moe.ops.latents import prepare_latents, rotate_key
from jax_nvfp4_moe.ops.low_rank import LowRank, product_of
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.sharded_variable import find_layout, mark
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel
from jax_nvfp4_moe.scheme import FP8ActivationScaling, Scheme

# New tokens of a row up to which one kernel prepares latents, as for heads in `grouped_query`.
_FEW_TOKENS = 8
# Bytes up to which latents are expanded for all heads at once.
_EXPANDED_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Sizes of a latent attention layer. All fields are static.

    Attributes:
      hidden: width of the tokens.
      num_heads: number of heads.
      q_lora_rank: width of the latent of the queries. None means that one matrix projects the
        tokens to queries, without a latent.
      kv_lora_rank: width of the latent of keys and values.
      qk_nope_head_dim: number of channels of a query or key head that are not rotated.
      qk_rope_head_dim: number of channels of a query or key head that are rotated.
      v_head_dim: width of a value head.
      interleaved: whether the two channels of a rotated pair are adjacent in the checkpoint. If
        not, they are half of `qk_rope_head_dim` apart.
      bias: whether the down-projections and the output projection have a bias. A query projection
        without a latent never has one.
      rope: rotation of queries and keys; None if the channels of `qk_rope_head_dim` are not rotated
        either.
      temperature: scale s and length f. The query at position p is multiplied by
        ``1 + s * log(1 + floor(p / f))``. None for a factor of 1.
      gated: whether the result of each head is multiplied by the sigmoid of a gate.
      indexer: sizes of the indexer by which queries choose their keys; None if they see all keys.
      pool: sizes of the windows that queries choose in place of keys; None if they choose keys.
      eps: epsilon of the norms of latents. `modeling_deepseek_v3` does not pass rms_norm_eps to
        these norms.
    """

    hidden: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    interleaved: bool
    bias: bool
    rope: Rope | None
    temperature: tuple[float, float] | None = None
    gated: bool = False
    indexer: IndexerSizes | None = None
    pool: PoolSizes | None = None
    eps: float = 1e-6

    @property
    def scale(self) -> float:
        """The factor of the attention scores."""
        own = 1.0 if self.rope is None else self.rope.attention_scale
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * own


class HeadMatrices(nnx.Module):
    """The matrices that expand a latent to the keys and values of each head.

    ::

      key[head] = keys[head] @ latent
      value[head] = values[head] @ latent

    Attributes:
      keys: `nnx.Param` ``[n, qk_nope, rank]``.
      values: `nnx.Param` ``[n, d, rank]``.
      adapter: `LoRA`, or None by default. What `add_lora` has added beside the linear layer of the
        file. For each head, its outputs are those of `keys` and then those of `values`.
    """

    adapter: LoRA | None = None

    def __init__(self, keys: Float[Array, "n qk_nope rank"], values: Float[Array, "n d rank"]):
        """Store the matrices, in any float dtype."""
        self.keys, self.values = nnx.Param(keys), nnx.Param(values)

    def read(self) -> tuple[Array, ...]:
        """Return `matrices`, and the parts of B for them if the adapter adds products."""
        if not self._adds():
            return self.matrices()
        return (*self.matrices(), *self._split(self._pair().b))

    def matrices(self) -> tuple[Array, Array]:
        """Return `keys` and `values`, to which an adapter that is `merge_aware` is added."""
        keys, values = self.keys.get_value(), self.values.get_value()
        if self.adapter is None or self._adds():
            return keys, values
        changes = self._split(product_of(self._pair()))
        pairs = zip((keys, values), changes, strict=True)
        keys, values = (_add_straight_through(*pair) for pair in pairs)
        return keys, values

    def reduce(self, latent: Float[Array, "... rank"]) -> Float[Array, "... r"] | None:
        """Return the product of latents with the adapter's A, or None if none is added."""
        if not self._adds():
            return None
        pair = self._pair()
        return (pair.scale * dense(latent, pair.a.astype(latent.dtype))).astype(latent.dtype)

    def absorb(self, q: Float[Array, "b t n w"], absorbed: Float[Array, "b t n d"]):
        """Add the product of queries `q` with the adapter of `keys` to those in latent space."""
        if not self._adds():
            return absorbed
        pair, (beside, _) = self._pair(), self._split(self._pair().b)
        plain = q[..., : beside.shape[1]]
        inner = multiply_heads(plain, beside.astype(q.dtype), contracted=1)
        added = pair.scale * dense(inner, pair.a.T.astype(q.dtype))
        rank = added.shape[-1]
        return absorbed.at[..., :rank].add(added.astype(absorbed.dtype))

    def expand(self, y: Float[Array, "b t n rank"], expanded: Float[Array, "b t n d"]):
        """Add the product of sums of latents `y` with the adapter of `values` to the results."""
        inner = self.reduce(y)
        if inner is None:
            return expanded
        _, beside = self._split(self._pair().b)
        return expanded + multiply_heads(inner, beside.astype(y.dtype), contracted=2)

    def _adds(self) -> bool:
        """Return whether there is an adapter whose products are added to those of the matrices."""
        return self.adapter is not None and not self._pair().rounded

    def _pair(self) -> LowRank:
        """Return the matrices of the adapter."""
        assert self.adapter is not None
        (pair,) = self.adapter.pairs().values()
        return pair.read()

    def _split(self, b):
        """Return the rows of `b` that belong to `keys`, and those that belong to `values`."""
        heads, width, _ = self.keys.get_value().shape
        return jnp.split(b.reshape(heads, -1, b.shape[-1]), [width], axis=1)


def _add_straight_through(weight, change):
    """Return ``round(weight + change)``, with the gradient to `change` of the sum itself."""
    still = lax.stop_gradient(change)
    rounded = lax.stop_gradient(add_rounded(weight, still))
    return rounded + (change - still).astype(weight.dtype)


class LatentAttention(HeadParallel):
    """Multi-head latent attention: the cache holds one latent and one rotated key per token.

    Two matrices expand a latent to the keys and values of all heads. A call computes one of two
    forms, whichever needs fewer operations:

    * Many queries: expand all latents that the queries see, and attend to keys and values.
    * Few queries: multiply the key matrix into the queries, attend to the latents themselves, and
      multiply the value matrix into the result.

    Both forms compute the same products in another order. The second one suits decoding: it reads
    the cache once per token, and expands nothing. The first one is always used if keys and values
    are rounded to FP8, or if the layer that expands latents quantizes its input.
    """

    # All heads read the same latents: every shard holds them.
    cache_axes: ClassVar[Mapping[str, int | None]] = {"latent": None}

    def __init__(self, config: MLAConfig, make: Builder, path: str):
        """Build the layer at `path`; the number of heads in `config` is that of one shard."""
        heads, h, bias = config.num_heads, config.hidden, config.bias
        width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        rank = config.kv_lora_rank
        self.config, self.dtype = config, make.settings.dtype
        self.target = make.settings.target
        if config.q_lora_rank is None:
            name, first, own_bias = "q", width, False
        else:
            name, first, own_bias = "q_a", config.q_lora_rank, bias
            self.q_norm = make.norm(f"{path}.q_norm", first, config.eps)
            self.q = make.linear(f"{path}.q", width, first)
        self.down = make.merged_linear(
            f"{path}.down",
            h,
            {name: first, "kv": rank + config.qk_rope_head_dim},
            {name: own_bias, "kv": bias},
        )
        self.kv_norm = make.norm(f"{path}.kv_norm", rank, config.eps)
        width = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_up = make.converted_linear(
            f"{path}.kv_up", width, rank, functools.partial(_apart, config)
        )
        shape = (heads, 1)
        self.kv = build_keys_and_values(make, f"{path}.kv", kept_rounded=False, k=shape, v=shape)
        self.gate = make.linear(f"{path}.gate", heads, h) if config.gated else None
        self.out = make.linear(f"{path}.out", h, heads * config.v_head_dim, bias)

    def empty_cache(self, batch: int, max_length: int):
        """Return an empty cache entry with one head.

        Its channels are those of the latent, then those of the rotated key.
        """
        shape = (1, self.config.kv_lora_rank + self.config.qk_rope_head_dim)
        return empty_entries(batch, max_length, self.dtype, latent=shape)

    def mix(self, x, positions, entries) -> Any:
        """Return the attention of tokens `x`, in the shape of `x`, and the cache entries."""
        if self._prepares_at_once(x, positions, entries):
            q, latent = self._project_into(x, positions, entries["latent"])
            seen = entries = {"latent": latent}
        else:
            q, latent, _ = self._project(x, positions)
            seen, entries = append(entries, positions, latent=latent)
        y = self._attend(q, seen["latent"], positions)
        return self._finish(y, positions, x), entries

    def _prepares_at_once(self, x, positions, entries) -> bool:
        """Return whether `prepare_latents` projects the tokens: few ones in rows, with a cache.

        Calibration needs the latents themselves.
        """
        few = entries is not None and positions.shape[1] <= _FEW_TOKENS
        return few and is_unpacked(x, positions) and not is_recorded(self.kv_up)

    def _project_into(self, x, positions, cache):
        """Return the queries, as `_project` does, and the cache with new latents."""
        config, normalizes = self.config, self.config.q_lora_rank is not None
        q, cache = prepare_latents(
            self.down(x),
            positions,
            cache,
            q_weight=self.q_norm.weight.get_value() if normalizes else None,
            kv_weight=self.kv_norm.weight.get_value(),
            eps=config.eps,
            rope=config.rope,
            interleaved=config.interleaved,
            target=self.target,
        )
        return self._heads_of(self.q(q) if normalizes else q, positions), cache

    def _project(self, x, positions):
        """Return the projections of tokens `x`.

        Returns:
          The queries ``[b, t, n, d]``, before their last channels are rotated. Then what the cache
          holds of the tokens, ``[b, t, 1, d]``, and the normalized latents of the queries ``[...,
          r]``, packed if `x` is, or the queries if they have no latent.
        """
        config, down = self.config, self.down(x)
        rope = down.shape[-1] - config.qk_rope_head_dim
        q, latent, key = jnp.split(down, [rope - config.kv_lora_rank, rope], axis=-1)
        residual = q
        if config.q_lora_rank is not None:
            residual = self.q_norm(q)
            q = self.q(residual)
        q, latent, key = (unpack(part, positions) for part in (q, self.kv_norm(latent), key))
        key = rotate_key(key[:, :, None, :], positions, config.rope, config.interleaved)
        latent = jnp.concatenate([latent[:, :, None, :], key], axis=-1)
        # Calibration needs the inputs of `kv_up`. They are recorded here, because the second form
        # never multiplies `kv_up` by a latent.
        record(self.kv_up, latent[:, :, 0, : config.kv_lora_rank])
        return self._heads_of(q, positions), latent, residual

    def _heads_of(self, q, positions):
        """Return projected queries as heads ``[b, t, n, d]``, with their temperature."""
        config = self.config
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        q = q.reshape(*positions.shape, config.num_heads, width)
        return q if config.temperature is None else grow(q, positions, *config.temperature)

    def _attend(self, q, seen, positions, chosen=None):
        """Attend to cache entries ``[b, 1, s, d]``: to those of `chosen`, or to all if it is None.

        Chosen latents are never expanded if that can be avoided. Each query has its own, so each
        query would expand them again.
        """
        few = chosen is not None or self._absorbs(positions.shape[1], seen.shape[2])
        # With FP8 scales, the keys and values of all heads are rounded: they must be expanded.
        if isinstance(self.kv_up, HeadMatrices) and few and self.kv.scales is None:
            return self._attend_to_latents(self.kv_up, q, seen, positions, chosen)
        plain, turning = jnp.split(q, [self.config.qk_nope_head_dim], axis=-1)
        turned = rotate_key(turning, positions, self.config.rope, self.config.interleaved)
        q = jnp.concatenate([plain, turned], axis=-1)
        if isinstance(self.kv_up, HeadMatrices):
            matrices = self.kv_up.read()
            groups = self._head_groups(seen)
            if groups > 1 and chosen is None and self.kv.scales is None:
                return self._attend_in_groups(groups, q, matrices, seen, positions)
            k, v = self._expand(seen, *matrices)
        else:
            k, v = self._expand_rounded(seen)
        rounded = self.kv.rounded({"k": k, "v": v})
        k, v = rounded["k"], rounded["v"]
        return self._attend_to(q, k, v, positions, chosen)

    def _head_groups(self, seen) -> int:
        """Return into how many equal groups heads are divided, so that expanded latents are few."""
        config, (b, _, s, _) = self.config, seen.shape
        width = 2 * config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        expanded = b * s * width * seen.dtype.itemsize  # of a head; keys without rotation are twice
        divisors = (g for g in range(1, config.num_heads) if config.num_heads % g == 0)
        fits = (g for g in divisors if config.num_heads // g * expanded <= _EXPANDED_BYTES)
        return next(fits, config.num_heads)

    def _attend_in_groups(self, groups, q, matrices, seen, positions):
        """Expand latents and attend for one group of heads after the other, in bounded memory."""

        def split(heads, axis):
            count = heads.shape[axis] // groups
            parts = heads.reshape(*heads.shape[:axis], groups, count, *heads.shape[axis + 1 :])
            return jnp.moveaxis(parts, axis, 0)

        def attend(group):
            q, *matrices = group
            return self._attend_to(q, *self._expand(seen, *matrices), positions, None)

        parts = split(q, 2), *(split(matrix, 0) for matrix in matrices)
        # A backward pass expands the latents of a group again.
        again = jax.checkpoint(attend, prevent_cse=False)
        y = jnp.moveaxis(lax.map(again, parts), 0, 2)
        return lax.collapse(y, 2, 4)

    def _attend_to(self, q, k, v, positions, chosen):
        """Attend to keys and values; see `_attend`."""
        scale = self.config.scale
        if chosen is None:
            return attention(q, k, v, positions, scale=scale, target=self.target)
        return attend_to_chosen(q, k, v, positions, chosen, scale=scale)

    def _finish(self, y, positions, x):
        """Return the output of the layer for the results of its heads ``y [b, t, n, d]``."""
        y = pack_like(y, positions, x)
        if self.gate is not None:
            gate = jax.nn.sigmoid(self.gate(x).astype(jnp.float32)).astype(x.dtype)
            y = y * gate[..., None]
        return self.out(lax.collapse(y, 2))

    def _absorbs(self, t: int, s: int) -> bool:
        """Return whether attending to latents takes no more work for `t` queries and `s` keys."""
        config = self.config
        head = config.qk_nope_head_dim + config.v_head_dim
        absorbed = t * config.kv_lora_rank * head + 2 * t * s * config.kv_lora_rank
        return absorbed <= s * config.kv_lora_rank * head + t * s * head

    def _attend_to_latents(self, up: HeadMatrices, q, latent, positions, chosen):
        """Attend to the latents, which serve as the one key head and value head of all queries."""
        config, (keys, values) = self.config, up.matrices()
        options = {"rope": config.rope, "interleaved": config.interleaved, "target": self.target}
        q = up.absorb(q, absorb_queries(q, keys, positions, **options))
        scale, rank = config.scale, config.kv_lora_rank
        if chosen is None:
            options = {"value_width": rank, "scale": scale, "target": self.target}
            y = attention(q, latent, None, positions, **options)
        else:
            y = attend_to_chosen(q, latent, latent, positions, chosen, scale=scale)[..., :rank]
        return up.expand(y, expand_values(y, values, target=self.target))

    def _expand(self, seen, keys, values, *beside):
        """Expand cache entries ``[b, 1, s, d]`` to keys and values of the heads of two matrices.

        These are ``[n, channels, rank]``, and `beside` has the matrices B of an adapter, if any.
        """
        latent, rotated = jnp.split(seen, [self.config.kv_lora_rank], axis=-1)
        rows = [_multiply_rows(latent, matrix) for matrix in (keys, values)]
        if beside:
            inner = self.kv_up.reduce(latent)
            added = (_multiply_rows(inner, b.astype(inner.dtype)) for b in beside)
            rows = map(jnp.add, rows, added)
        plain, v = (_as_heads(each.astype(seen.dtype), len(keys)) for each in rows)
        return _join_rotated(plain, rotated), v

    def _expand_rounded(self, seen):
        """Expand cache entries to the keys and values of all heads, by a layer that rounds them."""
        latent, rotated = jnp.split(seen, [self.config.kv_lora_rank], axis=-1)
        rows = _as_heads(self.kv_up(latent), self.config.num_heads)
        plain, v = jnp.split(rows, [self.config.qk_nope_head_dim], axis=-1)
        return _join_rotated(plain, rotated), v


def _multiply_rows(x, matrices):
    """Return the products ``[..., n m]`` of rows ``[..., k]`` with matrices ``[n, m, k]``."""
    return dense(x, matrices.reshape(-1, matrices.shape[-1]))


def _as_heads(rows, count):
    """Return ``[b, 1, s, n d]`` as ``[b, n, s, d]``."""
    b, _, s, width = rows.shape
    return jnp.moveaxis(rows.reshape(b, s, count, width // count), 2, 1)


def _join_rotated(plain, rotated):
    """Return the keys of all heads, which share their rotated channels."""
    shared = jnp.broadcast_to(rotated, (*plain.shape[:-1], rotated.shape[-1]))
    return jnp.concatenate([plain, shared], axis=-1)


def _apart(config, expansion):
    """Split the linear layer `expansion` into `HeadMatrices`, or return it if its input is rounded.

    * A layer without quantization is split.
    * A layer with quantized weights alone is dequantized once and then split.
    * A layer that also quantizes its input, or scales it, stays as it is. Products with its two
      matrices would not round or scale the input as the layer does, so latents are always expanded.
    """
    if isinstance(expansion, DenseLinear):
        matrix = expansion.weight.get_value()
    elif _weights_only(expansion):
        matrix = expansion.weight.get_value().dequantize(expansion.dtype)
    else:
        return expansion
    matrix = matrix.reshape(config.num_heads, -1, config.kv_lora_rank)
    made = HeadMatrices(matrix[:, : config.qk_nope_head_dim], matrix[:, config.qk_nope_head_dim :])
    layout = find_layout(expansion.weight)
    if layout is not None:
        layout = dataclasses.replace(layout, segments=((config.num_heads, layout.shards),))
    made.keys, made.values = mark(made.keys, layout), mark(made.values, layout)
    return made


def _weights_only(part) -> bool:
    """Return whether a linear layer quantizes its weights alone, and not its input."""
    if isinstance(part, FP8Linear):
        return part.activations is FP8ActivationScaling.WEIGHTS
    return isinstance(part, NVFP4Linear) and part.scheme is Scheme.W4A16


def build_latent_attention(
    config: MLAConfig,
    path: str,
    make: Builder,
    kind: Callable[[MLAConfig, Builder, str], LatentAttention] = LatentAttention,
) -> LatentAttention:
    """Build a latent attention layer, sharded by heads along the mesh axis `tensor`.

    The projections from latents to heads and the output projection are sharded. Without a latent of
    the queries, so is their projection. The other down-projections and the latent cache are
    replicated on every device.

    Args:
      config: sizes of the whole layer.
      path: path of the layer.
      make: the `Builder` of the model.
      kind: `LatentAttention`, or a class derived from it.
    """
    heads, shards = config.num_heads, make.settings.shards
    rows = ShardSpec("rows", shards)
    # The linear layer `q` projects latents to queries. Without a latent, a part of `down` projects
    # tokens to queries.
    query = "attention.q" if config.q_lora_rank is not None else "down.q"
    # "k" and "v" name the scales of FP8 keys and values; no linear layer has these names.
    by_heads = (query, "kv_up", "k", "v", "gate")
    return build_sharded(
        make,
        lambda make, sizes: kind(sizes, make, path),
        config,
        dataclasses.replace(config, num_heads=heads // shards),
        specs=dict.fromkeys(by_heads, rows) | {"out": ShardSpec("columns", shards)},
        last=f"{path}.out",
        width=heads * config.v_head_dim,
        reason=(
            f"{heads} heads cannot be divided into {shards} equal parts" if heads % shards else None
        ),
    )
