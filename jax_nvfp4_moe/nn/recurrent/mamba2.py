"""Mamba-2: a recurrent mixer whose state is one matrix per head.

Each head computes for every token::

  state = exp(dt * a) * state + dt * outer(x, b)
  y = state @ c + d * x

Here ``x [p]``, ``b [n]``, ``c [n]`` and the step ``dt > 0`` belong to the token and the head. The
numbers ``a < 0`` and ``d`` are weights of the head.

A single token takes one such step (`ops.mamba2_step`). The tokens of a prompt are computed in
chunks (`ops.mamba2_scan`).

Source: arXiv:2405.21060, section 6; `modeling_nemotron_h` of transformers for the layers around
the recurrence.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.sharding import build_sharded
from jax_nvfp4_moe.nn.packing import pack_like, unpack
from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.ops.convolution import causal_convolution
from jax_nvfp4_moe.ops.recurrent.mamba2 import mix_mamba2
from jax_nvfp4_moe.ops.recurrent.mamba2_scan import mamba2_scan
from jax_nvfp4_moe.ops.recurrent.steps import mamba2_step
from jax_nvfp4_moe.ops.state_window import run_recurrence
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import HeadParallel


@dataclasses.dataclass(frozen=True)
class Mamba2Config:
    """Sizes of a Mamba-2 mixer. All fields are static.

    Attributes:
      hidden: width of the tokens.
      heads: number of heads.
      head_dim: p, the width of a head.
      state_size: n. The state is ``[heads, head_dim, state_size]``.
      groups: number of groups of heads. The heads of a group share b and c, and the norm treats
        them as one vector.
      conv_size: number of tokens that the convolution sees, the current one included.
      activation: function after the convolution, a name in `numerics.activations.ACTIVATIONS`.
      bias: whether the input and output projections have a bias.
      conv_bias: whether the convolution has a bias.
      eps: epsilon of the norm.
      step_limits: smallest and largest dt.
    """

    hidden: int
    heads: int
    head_dim: int
    state_size: int
    groups: int
    conv_size: int
    activation: str
    bias: bool
    conv_bias: bool
    eps: float
    step_limits: tuple[float, float]

    @property
    def inner(self) -> int:
        """Number of channels of all heads together."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: x, b and c."""
        return self.inner + 2 * self.groups * self.state_size


class Mamba2(HeadParallel):
    """Mamba-2 with a short convolution before the recurrence and a gated norm after it.

    ::

      z, xbc, dt = split(in_proj(tokens))
      x, b, c = split(act(conv(xbc)))
      dt = clip(softplus(dt + dt_bias), *step_limits)
      y = out_proj(norm(scan(x, dt, a, b, c, d) * silu(z)))

    `scan` is the recurrence, and ``a = -exp(A_log)``. The norm applies to each group of heads by
    itself.

    Everything between the two projections is computed in float32. In prompts, a GPU rounds the
    operands of some products to TensorFloat-32 if the model is in bfloat16; see `ops.mamba2_scan`.
    """

    cache_axes: ClassVar[Mapping[str, int | None]] = {"conv": 2, "state": 1}

    def __init__(self, config: Mamba2Config, make: Builder, path: str):
        """Build the mixer at `path`; the sizes in `config` are those of one shard."""

        def variable(name, *shape):
            return make.variable(f"{path}.{name}", shape, dtype=jnp.float32)

        h, inner, channels = config.hidden, config.inner, config.channels
        self.config, self.dtype = config, make.settings.dtype
        self.activation = find_activation(config.activation)
        self.target = make.settings.target
        n = inner + channels + config.heads
        self.in_proj = make.linear(f"{path}.in_proj", n, h, config.bias)
        self.out_proj = make.linear(f"{path}.out_proj", h, inner, config.bias)
        self.conv_weight = variable("conv_weight", channels, 1, config.conv_size)
        self.conv_bias = variable("conv_bias", channels) if config.conv_bias else None
        self.A_log = variable("A_log", config.heads)
        self.dt_bias = variable("dt_bias", config.heads)
        self.D = variable("D", config.heads)
        self.norm = variable("norm", inner)

    @property
    def states(self) -> tuple[str, ...]:
        """The names of all cache entries, which change with every token."""
        return ("conv", "state")

    def empty_cache(self, batch: int, max_length: int):
        """Return zeros for the last inputs of the convolution and for the states of one shard."""
        del max_length
        return self._start(batch)

    def _start(self, batch: int):
        """Return what stands before the first token of each row, as the cache holds it."""
        config = self.config
        state = (batch, config.heads, config.head_dim, config.state_size)
        return {
            "conv": jnp.zeros((batch, config.conv_size - 1, config.channels), self.dtype),
            "state": jnp.zeros(state, jnp.float32),
        }

    def mix(self, x: Float[Array, "... h"], positions: Int32[Array, "b t"], entries):
        """Return the output for tokens `x`, in the shape of `x`, and the cache entries.

        Tokens at positions of `PADDING` or more do not change the entries. They must follow all
        other tokens of their row.
        """
        config = self.config
        bias = None if self.conv_bias is None else self.conv_bias.get_value()
        options = {
            "conv_weight": self.conv_weight.get_value()[:, 0],
            "conv_bias": bias,
            "A_log": self.A_log.get_value(),
            "dt_bias": self.dt_bias.get_value(),
            "D": self.D.get_value(),
            "norm": self.norm.get_value(),
            "activation": self.activation,
            "step_limits": config.step_limits,
            "eps": config.eps,
        }
        step = functools.partial(mamba2_step, target=self.target, **options)
        convolution = None
        if self.activation == find_activation("silu_no_mul"):
            convolution = functools.partial(causal_convolution, target=self.target)
        scan = functools.partial(mamba2_scan, dtype=self.dtype, target=self.target)
        prompt = functools.partial(mix_mamba2, scan=scan, convolution=convolution, **options)
        tokens = unpack(self.in_proj(x), positions), positions
        y, entries = run_recurrence(step, prompt, *tokens, entries, self._start, self.states)
        return self.out_proj(pack_like(y, positions, x)), entries


def build_mamba2(config: Mamba2Config, path: str, make: Builder):
    """Build a Mamba-2 mixer, sharded by groups along the mesh axis `tensor`.

    Args:
      config: sizes of the whole mixer.
      path: path of the mixer.
      make: the `Builder` of the model.
    """
    shards, reason = make.settings.shards, None
    if config.groups % shards:
        reason = f"{config.groups} groups cannot be divided into {shards} equal parts"
    own = dataclasses.replace(config, heads=config.heads // shards, groups=config.groups // shards)
    rows = ShardSpec("rows", shards)
    convolved = (config.inner, *(config.groups * config.state_size,) * 2)  # x, B and C
    channels = ShardSpec("rows", shards, convolved)
    return build_sharded(
        make,
        lambda make, sizes: Mamba2(sizes, make, path),
        config,
        own,
        specs={
            "in_proj": ShardSpec("rows", shards, (config.inner, *convolved, config.heads)),
            **dict.fromkeys(("conv_weight", "conv_bias"), channels),
            **dict.fromkeys(("A_log", "dt_bias", "D", "norm"), rows),
            "out_proj": ShardSpec("columns", shards),
        },
        last=f"{path}.out_proj",
        width=config.inner,
        reason=reason,
    )
