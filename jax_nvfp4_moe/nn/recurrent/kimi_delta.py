"""Kimi delta attention: a gated delta net with a decay for each channel of a key.

For one head, with keys and queries of length 1, the decay ``a = exp(g)`` of each key channel and
the rate ``beta``:

``S_t = diag(a_t) S_{t-1} + beta_t k_t (v_t - k_t.T diag(a_t) S_{t-1})`` and
``y_t = q_t.T S_t / sqrt(d)``

`ops.gated_delta_rule` processes a prompt in chunks.

Source: arXiv:2510.26692; `modeling_kimi_linear` and `modeling_bailing_hybrid` of transformers for
the details.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.sharding import build_sharded
from jax_nvfp4_moe.nn.linear.merged_linear import MergedLinear
from jax_nvfp4_moe.nn.packing import pack_like, unpack
from jax_nvfp4_moe.ops.convolution import causal_convolution
from jax_nvfp4_moe.ops.recurrent.delta_rule import gated_delta_rule
from jax_nvfp4_moe.ops.recurrent.kimi_delta import mix_kimi_delta
from jax_nvfp4_moe.ops.recurrent.steps import kimi_delta_step
from jax_nvfp4_moe.ops.state_window import run_recurrence
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel


@dataclasses.dataclass(frozen=True)
class KimiDeltaSizes:
    """The sizes of one Kimi delta attention.

    Attributes:
      hidden: the size of the input and of the output.
      heads: the number of heads of queries, keys and values.
      head_dim: the number of channels of a head.
      conv_size: the number of tokens that the convolution sees: the current one and those before.
      eps: the epsilon of the norm.
      low_rank: whether the projections of the decays and of the output's gate are two matrices
        with `head_dim` channels between them (Kimi-Linear), or one matrix each (Ling).
      lower_bound: the smallest logarithm of a decay, which is ``bound * sigmoid(rate * x)``. None
        means that there is no bound: the logarithm is ``-rate * softplus(x)``.
      rate_shape: the shape that the logarithms of the rates have in the file; None for ``[heads]``.
    """

    hidden: int
    heads: int
    head_dim: int
    conv_size: int
    eps: float
    low_rank: bool
    lower_bound: float | None = None
    rate_shape: tuple[int, ...] | None = None

    @property
    def channels(self) -> int:
        """The number of channels of all heads together."""
        return self.heads * self.head_dim


class KimiDelta(HeadParallel):
    """Linears, a causal convolution, the delta rule, and a norm gated by ``sigmoid``."""

    cache_axes: ClassVar[Mapping[str, int | None]] = {"inputs": 2, "state": 1}

    def __init__(self, sizes: KimiDeltaSizes, make: Builder, path: str):
        """Make the module with the heads of one shard."""
        h, n, d = sizes.hidden, sizes.channels, sizes.head_dim
        self.sizes, self.dtype = sizes, jnp.dtype(make.settings.dtype)
        self.target = make.settings.target
        rows = {"q": n, "k": n, "v": n, "rate": sizes.heads}
        self.projections = make.merged_linear(f"{path}.projections", h, rows)
        inner = d if sizes.low_rank else h
        self.decay_down = make.linear(f"{path}.decay_down", d, h) if sizes.low_rank else None
        self.decay_up = make.linear(f"{path}.decay_up", n, inner)
        self.gate_down = make.linear(f"{path}.gate_down", d, h) if sizes.low_rank else None
        self.gate_up = make.linear(f"{path}.gate_up", n, inner)
        self.out_proj = make.linear(f"{path}.out_proj", h, n)

        # The file has one tensor for queries, keys and values, or three.
        whole = make.has(f"{path}.conv.qkv")
        rows = {"qkv": 3 * n} if whole else {"q": n, "k": n, "v": n}
        self.conv = make.merged_variable(
            f"{path}.conv", rows, (1, sizes.conv_size), dtype=jnp.float32
        )

        def variable(name, *shape, stored=None):
            return make.variable(f"{path}.{name}", shape, dtype=jnp.float32, stored=stored)

        self.A_log = variable("A_log", sizes.heads, stored=sizes.rate_shape)
        self.dt_bias = variable("dt_bias", n)
        self.norm = variable("norm", d)

    @property
    def states(self) -> tuple[str, ...]:
        """The names of all cache entries, which change with every token."""
        return ("inputs", "state")

    def empty_cache(self, batch: int, max_length: int):
        """Return empty cache entries: the last inputs of the convolution, and the states."""
        del max_length
        return self._start(batch)

    def _start(self, batch: int):
        """Return what stands before the first token of each row, as the cache holds it."""
        sizes = self.sizes
        shape = (batch, sizes.heads, sizes.head_dim, sizes.head_dim)
        return {
            "inputs": jnp.zeros((batch, sizes.conv_size - 1, 3 * sizes.channels), self.dtype),
            "state": jnp.zeros(shape, jnp.float32),
        }

    def mix(self, x: Float[Array, "... h"], positions: Int32[Array, "b t"], entries):
        """Mix the tokens `x`, ``[b, t, h]`` or packed; returns the same and the cache entries.

        Tokens whose position is `PADDING` or larger are padding. Padding stands behind all other
        tokens of its row and does not change the entries.
        """
        projected, rates = self._project(x, positions)
        decays = unpack(_project_twice(self.decay_down, self.decay_up, x), positions)
        gates = unpack(_project_twice(self.gate_down, self.gate_up, x), positions)
        weights = {
            "conv_weight": self.conv.get_value()[:, 0],
            "A_log": self.A_log.get_value(),
            "dt_bias": self.dt_bias.get_value(),
            "norm": self.norm.get_value(),
        }
        options = {"lower_bound": self.sizes.lower_bound, "eps": self.sizes.eps}
        rule = functools.partial(
            gated_delta_rule, normalize=True, dtype=self.dtype, target=self.target
        )
        convolution = functools.partial(causal_convolution, target=self.target)
        by_chunks = {"rule": rule, "convolution": convolution}

        def step(projected, *tokens, kept=None):
            how = {"kept": kept, "rates": rates, "target": self.target, **weights, **options}
            return kimi_delta_step(projected, decays, gates, *tokens, **how)

        def prompt(projected, positions, inputs, state):
            tokens = projected, positions, inputs, state, decays, gates, rates
            return mix_kimi_delta(*tokens, **weights, **options, **by_chunks)

        y, entries = run_recurrence(step, prompt, projected, positions, entries, self._start)
        return self.out_proj(pack_like(y, positions, x)), entries

    def _project(self, x, positions):
        """Return queries, keys, values and rates, and the rates again if they come apart, or None.

        To join the results of two products would take a kernel in each step.
        """
        whole = self.projections  # a user may have wrapped it, for example in nnx.LoRA
        if isinstance(whole, MergedLinear) and whole.names[1:] == ("rate",):
            return tuple(unpack(part, positions) for part in whole.apart(x))
        return unpack(whole(x), positions), None


def _project_twice(down, up, x):
    """Return ``up(down(x))``, or ``up(x)`` if `down` is None."""
    return up(x if down is None else down(x))


def build_kimi_delta(sizes: KimiDeltaSizes, path: str, make: Builder):
    """Make a Kimi delta attention. Over a mesh its heads are sharded along `tensor`.

    Args:
      sizes: the sizes of the whole mixer.
      path: the path of the mixer in the model.
      make: builds the parts.
    """
    shards, n, reason = make.settings.shards, sizes.channels, None
    if sizes.heads % shards:
        reason = f"{sizes.heads} heads cannot be divided into {shards} equal parts"
    by_heads = ("q", "k", "v", "rate", "decay_up", "gate_up", "A_log", "dt_bias")
    return build_sharded(
        make,
        lambda make, sizes: KimiDelta(sizes, make, path),
        sizes,
        dataclasses.replace(sizes, heads=sizes.heads // shards),
        specs={
            **dict.fromkeys(by_heads, ShardSpec("rows", shards)),
            "conv.qkv": ShardSpec("rows", shards, (n, n, n)),
            "out_proj": ShardSpec("columns", shards),
        },
        last=f"{path}.out_proj",
        width=n,
        reason=reason,
    )
