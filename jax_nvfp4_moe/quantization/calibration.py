"""Watch what enters the products of an unquantized model while a text runs through it.

One decoder layer is in memory at a time: it is read, all windows of the text go through it in
float32, what entered its linears and experts is kept as a few numbers, and it is dropped.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_nvfp4_moe.backends.reference import combine_experts
from jax_nvfp4_moe.checkpoint.expert_names import Requests
from jax_nvfp4_moe.checkpoint.progress import log_layers
from jax_nvfp4_moe.checkpoint.resolve import Checkpoint
from jax_nvfp4_moe.models.blocks import expert_blocks
from jax_nvfp4_moe.models.loading import observe_layers
from jax_nvfp4_moe.numerics.activations import activate, find_activation
from jax_nvfp4_moe.ops.dense import dense

# Tokens that go through a layer together; bounds the memory of what its experts make of them.
_TOKENS = 1024


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What entered one product, of one linear or of each expert of a layer.

    Attributes:
      amax: largest magnitude, float32 scalar or ``[e]``; 0 where nothing entered.
      count: rows that entered, int32 of the same shape.
      squares: sums of the squares of each channel, float32 ``[k]`` or ``[e, k]``; None where nobody
        asked for them.
    """

    amax: np.ndarray
    count: np.ndarray
    squares: np.ndarray | None

    def importance(self) -> np.ndarray | None:
        """Return the mean square of each channel, that of all experts where one saw no row."""
        if self.squares is None:
            return None
        rows = np.maximum(self.count, 1)[..., None]
        mean = self.squares / rows
        if mean.ndim == 1 or self.count.all():
            return mean
        overall = self.squares.sum(0) / max(int(self.count.sum()), 1)
        return np.where(self.count[:, None] > 0, mean, overall).astype(np.float32)


class Seen(nnx.Variable):
    """What has entered a product so far: amax, count and squares."""


class ObservedLinear(nnx.Module):
    """A linear that keeps what enters it."""

    def __init__(self, inner: Callable, squares: bool):
        """Watch `inner`; `squares` says whether squares are summed too."""
        self.inner, self.squares = inner, squares
        self.seen = Seen(None)

    def __call__(self, x):
        """Return ``inner(x)``."""
        rows = x.reshape(-1, x.shape[-1])
        _see(self.seen, rows, None, 1, self.squares)
        return self.inner(x)


class ObservedExperts(nnx.Module):
    """Runs experts as `ops.dense_moe.dense_moe` does, and keeps what enters both products."""

    def __init__(self, squares: bool):
        """Watch; `squares` says whether squares are summed too."""
        self.squares = squares
        self.first, self.second = Seen(None), Seen(None)

    def __call__(
        self, x, experts, expert_ids, expert_weights, *, activation, weight_on_input, **parameters
    ):
        """Return the experts' weighted sums ``[t, h]``; arguments as for `dense_moe`."""
        parameters.pop("activations")  # of FP8 experts
        call = find_activation(activation, **parameters)
        (t, h), (e, top_k) = x.shape, (experts.num_experts, expert_ids.shape[1])
        slots = expert_ids.reshape(-1)
        weights = expert_weights.reshape(-1, 1).astype(jnp.float32)
        rows = jnp.repeat(x, top_k, axis=0)
        if weight_on_input:
            rows, weights = (rows * weights).astype(x.dtype), jnp.ones_like(weights)
        _see(self.first, rows, slots, e, self.squares)
        inner = _grouped(rows, experts.gate_up, experts.gate_up_bias, slots)
        inner = activate(call, inner).astype(x.dtype)
        _see(self.second, inner, slots, e, self.squares)
        y = _grouped(inner, experts.down, experts.down_bias, slots) * weights
        return y.reshape(t, top_k, h).sum(axis=1).astype(x.dtype)


def _grouped(rows, weight, bias, ids):
    """Return ``rows[m] @ weight[ids[m]].T + bias[ids[m]]`` in float32."""

    def multiply(expert, piece):
        y = dense(piece, weight[expert].astype(jnp.float32))
        return y if bias is None else y + bias[expert][None].astype(jnp.float32)

    e, n, _ = weight.shape
    ones = jnp.ones((len(ids), 1), jnp.float32)
    rows = rows.astype(jnp.float32)
    return combine_experts(
        rows, e, ids[:, None], ones, multiply, weight_on_input=False, width=n
    ).astype(jnp.float32)


def _see(seen, rows, ids, groups, squares):
    """Add `rows` ``[m, k]`` to `seen`, each to its group in `ids` ``[m]``; None: to the first."""
    wide = rows.astype(jnp.float32)
    ids = jnp.zeros(len(rows), jnp.int32) if ids is None else jnp.where(ids < 0, groups, ids)
    here = {
        "amax": jnp.zeros(groups).at[ids].max(jnp.abs(wide).max(axis=-1), mode="drop"),
        "count": jnp.zeros(groups, jnp.int32).at[ids].add(1, mode="drop"),
    }
    if squares:
        sums = jnp.zeros((groups, rows.shape[-1]))
        here["squares"] = sums.at[ids].add(jnp.square(wide), mode="drop")
    before = seen.get_value()
    if before is not None:
        here = {
            name: (jnp.maximum if name == "amax" else jnp.add)(before[name], value)
            for name, value in here.items()
        }
    seen.set_value(here)


@nnx.jit
def _run(layer, x, positions):
    """Return what `layer` makes of ``x [b, t, h]``; what its parts have seen is updated."""
    return layer(x, positions, None)[0]


class Watcher:
    """A `models.settings.Observer` that runs windows through each layer and keeps their traces.

    Attributes:
      inputs: module of a linear -> `Inputs`.
      experts: `Inputs` of both products of the experts of each layer, in the order of layers.
    """

    def __init__(
        self, windows: np.ndarray, squares: bool, note: Callable[[str], None] = lambda name: None
    ):
        """Watch `windows`, token ids ``[w, t]``; `note` is told the linears of layers that run."""
        self._note = note
        self.inputs: dict[str, Inputs] = {}
        self.experts: list[tuple[Inputs, Inputs]] = []
        self._windows, self._squares = windows, squares
        self._hidden: list[jax.Array] = []
        self._linears: dict[str, ObservedLinear] = {}

    def embedding(self, table: Any) -> Any:
        """Look the windows up; the table is not kept."""
        size = max(_TOKENS // self._windows.shape[1], 1)
        starts = range(0, len(self._windows), size)
        self._hidden = [jnp.asarray(table)[self._windows[at : at + size]] for at in starts]
        return jnp.zeros((0, table.shape[1]), table.dtype)

    def linear(self, prefix: str, module: Any) -> Any:
        """Watch one linear."""
        self._linears[prefix] = ObservedLinear(module, self._squares)
        return self._linears[prefix]

    def layer(self, module: Any) -> Any:
        """Run all windows through the layer, keep what its parts have seen, and drop it."""
        for prefix in self._linears:
            self._note(prefix)
        watching = []
        for _, block in expert_blocks(module):
            watching.append(ObservedExperts(self._squares))
            block.run_dense = nnx.data(watching[-1])
        for index, x in enumerate(self._hidden):
            steps = jnp.arange(x.shape[1], dtype=jnp.int32)
            positions = jnp.broadcast_to(steps[None, :], x.shape[:2])
            self._hidden[index] = jax.block_until_ready(_run(module, x, positions))
        for prefix, linear in self._linears.items():
            self.inputs[prefix] = _kept(linear.seen, single=True)
        for experts in watching:
            self.experts.append((_kept(experts.first), _kept(experts.second)))
        self._linears = {}
        return None


def _kept(seen, single=False) -> Inputs:
    values = {name: np.asarray(value) for name, value in (seen.get_value() or {}).items()}
    if not values:  # nothing ever entered
        return Inputs(np.zeros((), np.float32), np.zeros((), np.int32), None)
    values = {name: value[0] for name, value in values.items()} if single else values
    return Inputs(values["amax"], values["count"], values.get("squares"))


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What entered all products of a model.

    Attributes:
      linears: module -> `Inputs`.
      experts: the experts' module -> `Inputs` of the first product and of the second, by expert.
    """

    linears: dict[str, Inputs]
    experts: dict[str, tuple[Inputs, Inputs]]


def calibrate(
    checkpoint: Checkpoint,
    requests: Requests,
    windows: np.ndarray,
    *,
    squares: bool = False,
    progress: bool | None = None,
) -> Calibration:
    """Run windows of tokens through the model of a checkpoint, layer by layer, and watch.

    Args:
      checkpoint: open, not quantized.
      requests: what its model asks for.
      windows: token ids ``[w, t]``, each on its own.
      squares: whether channels' squares are summed too.
      progress: whether to draw a bar on standard error; None draws one on a terminal, and logs a
        line for each layer elsewhere.

    Raises:
      CheckpointError: as `load_model`.
    """
    watcher = Watcher(windows, squares, log_layers(progress, "calibrating"))
    observe_layers(checkpoint, watcher, progress)
    experts = dict(zip(requests.experts, watcher.experts, strict=True))
    return Calibration(watcher.inputs, experts)
