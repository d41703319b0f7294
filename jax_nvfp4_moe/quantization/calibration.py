"""Calibration: record what enters the linears and experts of a model while it reads a text.

Memory holds one decoder layer at a time. Each layer is read, and all windows of the text run
through it in float32. A few numbers about the inputs of its linears and experts are recorded, and
the layer is dropped before the next one is read. A long window runs through a layer in chunks, with
the cache of this layer between them.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.checkpoint.progress import log_layers
from jax_nvfp4_moe.models.loading import UnreadModel
from jax_nvfp4_moe.nn.experts.routed_experts import RoutedExperts, RoutedTokens
from jax_nvfp4_moe.nn.intermediates import capture
from jax_nvfp4_moe.numerics.activations import ActivationCall, activate
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams, NVFP4Tensor
from jax_nvfp4_moe.ops.dense import dense
from jax_nvfp4_moe.ops.experts.meaning import combine_experts
from jax_nvfp4_moe.ops.gradient import take_expert

# The result of `observe`: "amax", "count" and maybe "squares" of the rows that entered a product.
Statistics = dict[str, Any]

# The number of tokens that run through a layer together, of several windows or of a part of one. It
# bounds the memory for the intermediate activations of the experts.
_TOKENS = 1024


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Statistics of the activations that entered one product, of a linear or of a layer's experts.

    Attributes:
      amax: float32 scalar, or ``[e]`` for experts; the largest magnitude. It is 0 if nothing
        entered.
      count: int32 scalar, or ``[e]`` for experts; the number of rows that entered.
      squares: float32 ``[k]``, or ``[e, k]`` for experts; the sum of the squares of each channel.
        None if squares were not recorded.
    """

    amax: np.ndarray
    count: np.ndarray
    squares: np.ndarray | None

    def importance(self) -> np.ndarray | None:
        """Return the mean square of each channel, float32 ``[k]`` or ``[e, k]``.

        An expert that no row entered gets the mean over all experts. The result is None if squares
        were not recorded.
        """
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
    """Return statistics of the rows that enter a product.

    Args:
      rows: ``[m, k]``, the rows.
      ids: int ``[m]``, the group of each row. A row whose id is negative, or at least `groups`, is
        not counted. None puts all rows into group 0.
      groups: the number of groups, such as the number of experts.
      squares: whether to sum the squares of each channel.

    Returns:
      "amax" float32 ``[groups]``, "count" int32 ``[groups]``, and with `squares` also "squares"
      float32 ``[groups, k]``.
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
    experts: MoEParams | DenseExperts,
    call: ActivationCall,
    routed: RoutedTokens,
    *,
    weight_on_input: bool,
    squares: bool,
) -> tuple[Statistics, Statistics]:
    """Return statistics of the inputs of the first and of the second product, for each expert.

    Args:
      experts: the experts of one layer, in any layout.
      call: their activation.
      routed: the tokens, their experts and their weights.
      weight_on_input: whether routing weights multiply the rows before the first product.
      squares: whether to sum the squares of each channel.
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
        one = take_expert(weight, expert)
        values = one.dequantize() if isinstance(one, NVFP4Tensor) else one.astype(jnp.float32)
        y = dense(piece, values)
        return y if bias is None else y + bias[expert][None].astype(jnp.float32)

    e, n, _ = weight.shape
    ones = jnp.ones((len(ids), 1), jnp.float32)
    rows = rows.astype(jnp.float32)
    return combine_experts(
        rows, e, ids[:, None], ones, multiply, weight_on_input=False, width=n
    ).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames="squares", donate_argnames="entries")
def _run(layer, stream, start, entries, squares):
    """Run the residual stream ``[b, t, h]`` of tokens from position `start` on through `layer`.

    Returns:
      The output, the updated cache entries, and the statistics of the inputs of its linears and of
      its experts.
    """
    b, t = jax.tree.leaves(stream)[0].shape[:2]  # a layer may hand on more than the tokens
    positions = jnp.broadcast_to(start + jnp.arange(t, dtype=jnp.int32)[None, :], (b, t))
    with capture(layer) as seen:
        y, entries = layer(stream, positions, entries)
    # The layer constrains the layout of its cache, which jax.jit would not put in donated memory.
    entries = lax.optimization_barrier(entries)
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
    return y, entries, linears, experts


def _add(total: Any, seen: Any) -> Any:
    """Return the statistics of two batches together."""
    if total is None:
        return seen
    if isinstance(seen, tuple):
        return tuple(map(_add, total, seen))
    return {
        name: (jnp.maximum if name == "amax" else jnp.add)(total[name], value)
        for name, value in seen.items()
    }


def _inputs(seen: Statistics, single: bool = False) -> Inputs:
    """Return statistics as `Inputs`; `single` takes those of group 0, for a linear."""
    values = {name: np.asarray(value) for name, value in seen.items()}
    values = {name: value[0] for name, value in values.items()} if single else values
    return Inputs(values["amax"], values["count"], values.get("squares"))


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The statistics of the inputs of all linears and experts of a model.

    Attributes:
      linears: the module in the file -> `Inputs`.
      experts: the experts' module -> `Inputs` of the first product and of the second, by expert.
    """

    linears: dict[str, Inputs]
    experts: dict[str, tuple[Inputs, Inputs]]


def calibrate(
    unread: UnreadModel,
    windows: np.ndarray,
    *,
    squares: bool = False,
    progress: bool | None = None,
) -> Calibration:
    """Run windows of tokens through a model, layer by layer, and record what enters its products.

    Args:
      unread: an unquantized model; see `models.loading.find_unquantized`.
      windows: int ``[w, t]``, token ids. Each window is a sequence of its own.
      squares: whether to sum the squares of each channel.
      progress: whether to draw a progress bar on standard error. None draws it on a terminal, and
        logs a line for each layer if standard error is no terminal.

    Raises:
      CheckpointError: as for `load_model`.
    """
    note, found = log_layers(progress, "calibrating"), Calibration({}, {})
    with unread.open_reader(progress, "calibrating") as reader:
        hidden, opening = _open(unread, reader, windows, squares)
        for path, linears in opening.items():
            _keep(found, unread, path, linears, {}, note)
        for index in range(len(unread.model.layers)):
            path = f"layers.{index}"
            layer = unread.materialize(reader, path)
            linears, experts = None, None
            for pieces in hidden:
                entries, start = _make_entries(layer, windows.shape[1], pieces), 0
                for place, stream in enumerate(pieces):
                    t = jax.tree.leaves(stream)[0].shape[1]
                    y, entries, own_linears, own_experts = _run(
                        layer, stream, np.int32(start), entries, squares
                    )
                    pieces[place] = jax.block_until_ready(y)
                    linears = _merge(linears, own_linears)
                    experts = _merge(experts, own_experts)
                    start += t
            del layer  # free its memory before the next layer is read
            _keep(found, unread, path, linears or {}, experts or {}, note)
    return found


def _open(unread: UnreadModel, reader, windows, squares) -> tuple[list[list[Any]], dict[str, Any]]:
    """Return what enters the first layer, in batches of pieces, and statistics before that.

    The statistics are those of the linears in each part of `Decoder.opening_parts`.
    """
    table = unread.read("embedding", reader).get_value()
    leaves, tree = jax.tree.flatten(unread.model)
    model = tree.unflatten(leaves)  # a copy: the modules of the unread model stay without weights
    for name in model.opening_parts:
        setattr(model, name, unread.materialize(reader, name))
    opening: dict[str, Any] = dict.fromkeys(model.opening_parts)
    hidden = []
    for batch in _divide(windows):
        hidden.append([])
        for piece in batch:
            with capture(model) as seen:
                hidden[-1].append(model.open_stream(table, piece))
            for name, total in opening.items():
                own = {
                    path.removeprefix(f"{name}."): observe(
                        value.reshape(-1, value.shape[-1]), squares=squares
                    )
                    for path, (value,) in seen.items()
                    if path.startswith(f"{name}.")
                }
                opening[name] = _merge(total, own)
    return hidden, opening


def _divide(windows: np.ndarray) -> Iterator[list[np.ndarray]]:
    """Yield batches of windows, each in pieces along the tokens.

    A piece has about `_TOKENS` tokens, of several short windows or of a part of a long one.
    """
    size = max(_TOKENS // windows.shape[1], 1)
    for start in range(0, len(windows), size):
        batch = windows[start : start + size]
        yield [batch[:, at : at + _TOKENS] for at in range(0, windows.shape[1], _TOKENS)]


def _make_entries(layer, length: int, pieces) -> Any:
    """Return the empty cache of a layer for windows of several pieces; None for a single piece."""
    if len(pieces) == 1:
        return None
    return layer.init_cache(jax.tree.leaves(pieces[0])[0].shape[0], length)


def _merge(total, seen):
    """Return the statistics of a layer's modules in two batches together."""
    return seen if total is None else {path: _add(total[path], seen[path]) for path in seen}


def _keep(found: Calibration, unread: UnreadModel, layer: str, linears, experts, note) -> None:
    """Add the statistics of one layer to `found`, by the names of its modules in the file."""
    for part in unread.parts:
        path = part.path.removeprefix(f"{layer}.")
        if path == part.path:
            continue
        if part.experts is not None:
            module = path.rpartition(".")[0]
            first, second = map(_inputs, experts[module])
            found.experts[part.experts.name] = first, second
        elif path in linears:
            for source in part.sources.values():
                note(source.name)
                found.linears[source.name] = _inputs(linears[path], single=True)
