"""Gated delta net: a recurrent mixer whose state is one matrix per head.

Each token first decays the state, then corrects the value that the state stores for its key. One
head with keys and queries of length 1, decay ``a = exp(g)`` and rate ``beta`` computes::

  S_t = a_t S_{t-1} + beta_t k_t (v_t - k_t.T a_t S_{t-1})
  y_t = q_t.T S_t / sqrt(d)

Prompts are computed in chunks. All corrections of one chunk solve one triangular system.

Source: arXiv:2412.06464; arXiv:2406.06484 for the chunks; `modeling_qwen3_next` and
`modeling_qwen3_5_moe` of transformers for the details.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.sharding import build_sharded
from jax_nvfp4_moe.nn.linear.merged_linear import MergedLinear
from jax_nvfp4_moe.nn.packing import pack_like, unpack
from jax_nvfp4_moe.ops.convolution import causal_convolution
from jax_nvfp4_moe.ops.recurrent.delta_rule import gated_delta_rule
from jax_nvfp4_moe.ops.recurrent.gated_delta import mix_gated_delta
from jax_nvfp4_moe.ops.recurrent.steps import gated_delta_step
from jax_nvfp4_moe.ops.state_window import StateWindow, run_recurrence
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel

# The kernels multiply results by silu(z). For this z, silu(z) is z in float32.
_PLAIN = 32.0


@dataclasses.dataclass(frozen=True)
class DeltaSizes:
    """Sizes of one gated delta net. All fields are static.

    Attributes:
      hidden: width of the tokens.
      key_heads: m, the number of query heads and of key heads.
      value_heads: number of value heads and of states, a multiple of m. The r = value_heads / m
        value heads of a group share one key head.
      key_head_dim: d, the width of a query or key head.
      value_head_dim: e, the width of a value head.
      conv_size: number of tokens that the convolution sees, the current one included.
      eps: epsilon of the norm.
      gate: "silu" (default) or "sigmoid", the function of z that multiplies the normalized result.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_size: int
    eps: float
    gate: Literal["silu", "sigmoid"] = "silu"

    @property
    def keys(self) -> int:
        """Number of channels of all key heads together."""
        return self.key_heads * self.key_head_dim

    @property
    def values(self) -> int:
        """Number of channels of all value heads together."""
        return self.value_heads * self.value_head_dim

    @property
    def convolved(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


class GatedDeltaNet(HeadParallel):
    """A gated delta net with its projections, convolution and gated norm.

    ::

      q, k, v = silu(convolve(qkv(x)))
      y = out_proj(norm(delta_rule(q, k, v, g, beta)) * silu(z(x)))

    Queries and keys are scaled to length 1 before the delta rule. The weights ``a`` and ``b``
    project the tokens to the inputs of the decay and the rate::

      g = -exp(A_log) * softplus(a(x) + dt_bias)
      beta = sigmoid(b(x))

    The norm applies to each head by itself. Everything between the projections is computed in
    float32.

    Attributes:
      sizes: sizes of one shard, static.
      target: static `Target`, the device that the mixer was made for.
      interleaved: order of the projected channels, static. True: key head by key head, each with
        its queries, keys, values and z (Qwen3-Next). False: all queries, then all keys, then all
        values (Qwen3.5).
    """

    cache_axes: ClassVar[Mapping[str, int | None]] = {"inputs": 2, "state": 1}

    def __init__(self, sizes: DeltaSizes, make: Builder, path: str):
        """Build the mixer at `path`; `sizes` are those of one shard.

        The names in the checkpoint tell the order of the projected channels.
        """
        self.sizes, self.dtype = sizes, jnp.dtype(make.settings.dtype)
        self.target = make.settings.target
        self.interleaved = make.has(f"{path}.projections.qkvz")
        rows = {"qkv": sizes.convolved, "z": sizes.values}
        rows |= {"b": sizes.value_heads, "a": sizes.value_heads}
        if self.interleaved:
            rows = {"qkvz": sizes.convolved + sizes.values, "ba": 2 * sizes.value_heads}
        self.projections = make.merged_linear(f"{path}.projections", sizes.hidden, rows)
        self.out_proj = make.linear(f"{path}.out_proj", sizes.hidden, sizes.values)

        def variable(name, *shape):
            return make.variable(f"{path}.{name}", shape, dtype=jnp.float32)

        self.conv_weight = variable("conv_weight", sizes.convolved, 1, sizes.conv_size)
        self.A_log = variable("A_log", sizes.value_heads)
        self.dt_bias = variable("dt_bias", sizes.value_heads)
        self.norm = variable("norm", sizes.value_head_dim)

    @property
    def states(self) -> tuple[str, ...]:
        """The names of all cache entries, which change with every token."""
        return ("inputs", "state")

    def empty_cache(self, batch: int, max_length: int):
        """Return zeros for the last inputs of the convolution and for the states of one shard."""
        del max_length
        return self._start(batch)

    def _start(self, batch: int):
        """Return what stands before the first token of each row, as the cache holds it."""
        sizes = self.sizes
        return {
            "inputs": jnp.zeros((batch, sizes.conv_size - 1, sizes.convolved), self.dtype),
            "state": jnp.zeros(_state_shape(sizes, batch), jnp.float32),
        }

    def mix(self, x: Float[Array, "... h"], positions: Int32[Array, "b t"], entries):
        """Return the output for tokens `x`, in the shape of `x`, and the cache entries.

        Tokens at positions of `PADDING` or more do not change the entries. They must follow all
        other tokens of their row.
        """
        projected, rates = self._project(x, positions, entries)
        rule = functools.partial(
            gated_delta_rule, normalize=True, dtype=self.dtype, target=self.target
        )
        convolution = functools.partial(causal_convolution, target=self.target)
        options = {
            "conv_weight": self.conv_weight.get_value()[:, 0],
            "A_log": self.A_log.get_value(),
            "dt_bias": self.dt_bias.get_value(),
            "norm": self.norm.get_value(),
            "interleaved": self.interleaved,
            "eps": self.sizes.eps,
        }
        gate = None
        if self.sizes.gate == "sigmoid":
            projected, gate = self._without_gate(projected)
        step = functools.partial(gated_delta_step, rates=rates, target=self.target, **options)
        prompt = functools.partial(mix_gated_delta, rule=rule, convolution=convolution, **options)
        y, entries = run_recurrence(step, prompt, projected, positions, entries, self._start)
        if gate is not None:
            y = (y.astype(jnp.float32) * gate.reshape(y.shape)).astype(y.dtype)
        return self.out_proj(pack_like(y, positions, x)), entries

    def _without_gate(self, projected):
        """Return projected tokens whose gate multiplies by `_PLAIN`, and the gate divided by it."""
        first, last = self.sizes.convolved, self.sizes.convolved + self.sizes.values
        z = projected[..., first:last].astype(jnp.float32)
        return projected.at[..., first:last].set(_PLAIN), jax.nn.sigmoid(z) / _PLAIN

    def _project(self, x, positions, entries):
        """Return the projected tokens, and their rates and steps if they come apart, or None.

        Many checkpoints leave the small projections of rates and steps unquantized, so that a
        product of their own computes them. To join the results would take a kernel in each step.
        """
        whole = self.projections  # a user may have wrapped it, for example in nnx.LoRA
        few = positions.shape[1] == 1 or isinstance(entries, StateWindow)
        if isinstance(whole, MergedLinear) and few and whole.names[1:] in (("b_a",), ("ba",)):
            return tuple(unpack(part, positions) for part in whole.apart(x))
        return unpack(whole(x), positions), None


def build_delta_net(sizes: DeltaSizes, path: str, make: Builder):
    """Build a gated delta net, sharded by key heads along the mesh axis `tensor`.

    Args:
      sizes: sizes of the whole mixer.
      path: path of the mixer.
      make: the `Builder` of the model.
    """
    shards, reason = make.settings.shards, None
    if sizes.key_heads % shards:
        reason = f"{sizes.key_heads} key heads cannot be divided into {shards} equal parts"
    own = dataclasses.replace(
        sizes, key_heads=sizes.key_heads // shards, value_heads=sizes.value_heads // shards
    )
    # For tensors in the order of the heads: interleaved channels, z, and one number per head.
    rows = ShardSpec("rows", shards)
    channels = ShardSpec("rows", shards, (sizes.keys, sizes.keys, sizes.values))
    return build_sharded(
        make,
        lambda make, sizes: GatedDeltaNet(sizes, make, path),
        sizes,
        own,
        specs={
            **dict.fromkeys(("qkvz", "ba", "z", "b", "a", "A_log", "dt_bias"), rows),
            **dict.fromkeys(("qkv", "conv_weight"), channels),
            "out_proj": ShardSpec("columns", shards),
        },
        last=f"{path}.out_proj",
        width=sizes.values,
        reason=reason,
    )


def _state_shape(sizes, batch):
    shared = sizes.value_heads // sizes.key_heads
    return (batch, sizes.key_heads, shared, sizes.key_head_dim, sizes.value_head_dim)
