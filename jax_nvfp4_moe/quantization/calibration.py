"""Calibration: what enters the products of an unquantized model while a text runs through it.

One decoder layer is in memory at a time: it is read, all windows of the text go through it in
float32, what entered its linears and experts is kept as a few numbers, and it is dropped.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.backends.reference import combine_experts
from jax_nvfp4_moe.checkpoint.progress import log_layers
from jax_nvfp4_moe.models.loading import LoadPlan
from jax_nvfp4_moe.nn.building import ExpertPart
from jax_nvfp4_moe.nn.experts import RoutedExperts, RoutedTokens
from jax_nvfp4_moe.nn.intermediates import capture
from jax_nvfp4_moe.numerics.activations import ActivationCall, activate
from jax_nvfp4_moe.numerics.tensor import DenseExperts
from jax_nvfp4_moe.ops.dense import dense

Statistics = dict[str, Any]  # of rows that entered a product: amax, count and squares by group

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


def observe(
    rows: Float[Array, "m k"],
    ids: Int[Array, " m"] | None = None,
    groups: int = 1,
    squares: bool = False,
) -> Statistics:
    """Return what is kept of the rows that enter a product.

    Args:
      rows: that enter.
      ids: group of each row; rows of other ids than 0 to `groups` leave no trace. All rows are of
        the first group where None.
      groups: number of groups, such as experts.
      squares: whether squares of channels are summed.

    Returns:
      "amax" float32 ``[groups]``, "count" int32 ``[groups]``, "squares" float32 ``[groups, k]``.
    """
    wide = rows.astype(jnp.float32)
    ids = jnp.zeros(len(rows), jnp.int32) if ids is None else jnp.where(ids < 0, groups, ids)
    seen = {
        "amax": jnp.zeros(groups).at[ids].max(jnp.abs(wide).max(axis=-1), mode="drop"),
        "count": jnp.zeros(groups, jnp.int32).at[ids].add(1, mode="drop"),
    }
    if squares:
        sums = jnp.zeros((groups, rows.shape[-1]))
        seen["squares"] = sums.at[ids].add(jnp.square(wide), mode="drop")
    return seen


def observe_experts(
    experts: DenseExperts,
    call: ActivationCall,
    routed: RoutedTokens,
    *,
    weight_on_input: bool,
    squares: bool,
) -> tuple[Statistics, Statistics]:
    """Return what enters the first product and the second of each expert, see `observe`.

    Args:
      experts: of one layer.
      call: their activation.
      routed: tokens, their experts and weights.
      weight_on_input: whether rows are weighted before the first product.
      squares: whether squares of channels are summed.
    """
    x = routed.x.reshape(-1, routed.x.shape[-1])
    top_k, e = routed.expert_ids.shape[-1], experts.num_experts
    slots = routed.expert_ids.reshape(-1)
    rows = jnp.repeat(x, top_k, axis=0)
    if weight_on_input:
        weights = routed.expert_weights.reshape(-1, 1).astype(jnp.float32)
        rows = (rows * weights).astype(x.dtype)
    inner = _grouped(rows, experts.gate_up, experts.gate_up_bias, slots)
    inner = activate(call, inner).astype(x.dtype)
    return observe(rows, slots, e, squares), observe(inner, slots, e, squares)


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


@functools.partial(jax.jit, static_argnames="squares")
def _run(layer, x, positions, squares):
    """Return what `layer` makes of ``x [b, t, h]``, and what its linears and experts read."""
    with capture(layer) as seen:
        y, _ = layer(x, positions, None)
    parts = {".".join(map(str, path)): part for path, part in nnx.iter_modules(layer)}
    linears, experts = {}, {}
    for path, values in seen.items():
        (value,) = values
        part = parts[path]
        if isinstance(part, RoutedExperts):
            experts[path] = observe_experts(
                part.params.get_value(),
                part.options.activation,
                value,
                weight_on_input=part.options.weight_on_input,
                squares=squares,
            )
        else:
            linears[path] = observe(value.reshape(-1, value.shape[-1]), squares=squares)
    return y, linears, experts


def _add(total: Any, seen: Any) -> Any:
    """Return what was seen of two batches together."""
    if total is None:
        return seen
    if isinstance(seen, tuple):
        return tuple(map(_add, total, seen))
    return {
        name: (jnp.maximum if name == "amax" else jnp.add)(total[name], value)
        for name, value in seen.items()
    }


def _inputs(seen: Statistics, single: bool = False) -> Inputs:
    values = {name: np.asarray(value) for name, value in seen.items()}
    values = {name: value[0] for name, value in values.items()} if single else values
    return Inputs(values["amax"], values["count"], values.get("squares"))


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What entered all products of a model.

    Attributes:
      linears: module of the file -> `Inputs`.
      experts: the experts' module -> `Inputs` of the first product and of the second, by expert.
    """

    linears: dict[str, Inputs]
    experts: dict[str, tuple[Inputs, Inputs]]


def calibrate(
    plan: LoadPlan,
    windows: np.ndarray,
    *,
    squares: bool = False,
    progress: bool | None = None,
) -> Calibration:
    """Run windows of tokens through a model, layer by layer, and keep what its products read.

    Args:
      plan: of a checkpoint that is not quantized, see `models.loading.plan_unquantized`.
      windows: token ids ``[w, t]``, each on its own.
      squares: whether channels' squares are summed too.
      progress: whether to draw a bar on standard error; None draws one on a terminal, and logs a
        line for each layer elsewhere.

    Raises:
      CheckpointError: as `load_model`.
    """
    note, found = log_layers(progress, "calibrating"), Calibration({}, {})
    size = max(_TOKENS // windows.shape[1], 1)
    with plan.open_reader(progress, "calibrating") as reader:
        table = plan.read("embedding", reader).get_value()
        hidden = [table[windows[at : at + size]] for at in range(0, len(windows), size)]
        del table
        for index in range(len(plan.model.layers)):
            path = f"layers.{index}"
            layer = plan.materialize(reader, path)
            linears, experts = None, None
            for batch, x in enumerate(hidden):
                steps = jnp.arange(x.shape[1], dtype=jnp.int32)
                positions = jnp.broadcast_to(steps[None, :], x.shape[:2])
                y, own_linears, own_experts = _run(layer, x, positions, squares)
                hidden[batch] = jax.block_until_ready(y)
                linears = _merge(linears, own_linears)
                experts = _merge(experts, own_experts)
            del layer  # before the next one is read
            _keep(found, plan, path, linears or {}, experts or {}, note)
    return found


def _merge(total, seen):
    return seen if total is None else {path: _add(total[path], seen[path]) for path in seen}


def _keep(found: Calibration, plan: LoadPlan, layer: str, linears, experts, note) -> None:
    """Enter what one layer's products read, under their names in the file."""
    for part in plan.parts:
        path = part.path.removeprefix(f"{layer}.")
        if path == part.path:
            continue
        if isinstance(part, ExpertPart):
            module = path.rpartition(".")[0]
            first, second = map(_inputs, experts[module])
            found.experts[part.source.name] = first, second
        elif path in linears:
            for source in part.sources.values():
                note(source.name)
                found.linears[source.name] = _inputs(linears[path], single=True)
