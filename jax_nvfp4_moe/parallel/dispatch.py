"""Experts and tokens both shared out along `expert`: rows go to their experts and come back.

Each shard has a share of the tokens. It sends a token once to every shard with an expert that the
token chose, together with the ids and weights of those, as words in one collective; the shard runs
its experts, and what comes back is added up in float32, in the order of the shards::

  y[t] = sum over shards d of back(run(sent(x[t]), own part of d, own ids, weights))

Under w4a4 the rows go as the NVFP4 codes and scales that the first product would make of them, 0.28
of the bytes of bfloat16. Scales calibrated for each expert make that a row for each expert chosen,
there and back, so then they go as they are where that is fewer bytes. Quantizing what was quantized
gives the same codes but for blocks below half of the smallest scale: where the scale is the row's
own, the largest value goes along, since a product would be an ulp off.

Two ways to send: "all_to_all" in slots of a fixed number of rows for each pair of shards, on any
platform, in rounds where `capacity` is less than a shard's tokens, so that no row is ever dropped;
"ragged" by ``lax.ragged_all_to_all``, which moves no empty slots, on GPUs.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jax_nvfp4_moe.numerics.nvfp4 import (
    BLOCK,
    SCALE_RANGE,
    amax,
    decode_scale,
    dequantize,
    divide,
    quantize,
)
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams
from jax_nvfp4_moe.parallel.expert_mesh import EXPERT, TENSOR, ExpertMesh
from jax_nvfp4_moe.parallel.expert_specs import expert_specs
from jax_nvfp4_moe.parallel.experts import own_part, run_sharded
from jax_nvfp4_moe.scheme import W4A4_SCHEMES, Scheme


class DispatchPlan(NamedTuple):
    """One collective there and one back, of buffers of `size` rows.

    Attributes:
      shard: int32 ``[size]``, where each row of the buffer goes.
      taken: bool ``[size]``, which of them are rows; all where None.
      travels: bool ``[r, shards]``, which shards each row visits this time.
      pack: ``[r, n]`` -> ``[size, n]``, rows in their places.
      unpack: ``[size, h]`` and a shard -> ``[r, h]``, what came back from there; any row for one
        that was not there.
      send: words ``[size, n]`` -> words ``[received, n]``; ids of empty rows are -1.
      back: ``[received, h]`` -> ``[size, h]``.
    """

    shard: Int[Array, " size"]
    taken: Bool[Array, " size"] | None
    travels: Bool[Array, "r s"]
    pack: Callable
    unpack: Callable
    send: Callable
    back: Callable


def run_dispatched(
    run: Callable,
    x: Float[Array, "t h"],
    params: MoEParams | DenseExperts,
    expert_ids: Int[Array, "t k"],
    expert_weights: Float[Array, "t k"],
    *,
    expert_mesh: ExpertMesh,
    dispatch: str = "psum",
    capacity: int | None = None,
    scheme: Scheme | None = None,
    weight_on_input: bool = False,
) -> Float[Array, "t h"]:
    """Run an expert layer over a mesh.

    The gradient is that of "psum", whatever `dispatch` is: a backward pass gathers the tokens. As
    the kernels it has no forward mode: of `jax.jvp` and `jax.jacfwd` JAX raises a TypeError.

    Args:
      run: ``(x, params, expert_ids, expert_weights) -> [t, h]``; skips ids that are out of range.
      x: tokens; with "psum" whole on every device, else shared out along `expert`.
      params: the weights, as `shard_experts` returns them.
      expert_ids, expert_weights: as `x`.
      expert_mesh: of `params`.
      dispatch: "psum", "all_to_all" or "ragged".
      capacity: rows of a shard for another one in one round of "all_to_all"; all where None.
      scheme: w4a4 schemes may send quantized rows; see `choose_wire_format`.
      weight_on_input: whether `run` weights rows before it quantizes them; those go as they are.

    Returns:
      ``[t, h]``, as `x` over the devices.
    """
    psum = functools.partial(run_sharded, run, expert_mesh=expert_mesh)
    if dispatch == "psum" or EXPERT not in expert_mesh.axes or not x.shape[0]:
        return psum(x, params, expert_ids, expert_weights)
    ids = jnp.where((expert_ids >= 0) & (expert_ids < params.num_experts), expert_ids, -1)
    (t, hidden), shards = x.shape, expert_mesh.expert
    wire = choose_wire_format(
        None if weight_on_input else scheme,
        hidden=hidden,
        top_k=ids.shape[1],
        dtype=x.dtype,
        shards=shards,
        rounds=(capacity or t) < -(-t // shards),
    )
    near = expert_mesh.in_one_process(EXPERT)
    plan = functools.partial(_PLANS[dispatch], capacity=capacity, near=near)
    forward = functools.partial(_send_rows, run, wire, plan, expert_mesh)
    given = x, params, ids.astype(jnp.int32), expert_weights.astype(jnp.float32)
    return _with_psum_gradient(forward, psum)(*given)


def _send_rows(run, wire, plan, expert_mesh, x, params, ids, weights):
    """Return ``[t, h]``: `run` on rows that go to their experts and back."""
    local_experts = params.num_experts // expert_mesh.expert

    def body(rows, params):
        x, ids, weights = rows
        own = own_part(params, expert_mesh)

        def run_own(x, ids, weights):
            y = run(x, own, ids, weights)
            if expert_mesh.tensor == 1:
                return y
            return lax.psum(y.astype(jnp.float32), TENSOR).astype(y.dtype)

        (r, k), shards = ids.shape, expert_mesh.expert
        if wire.by_slot:
            x, ids = jnp.repeat(x, k, axis=0), ids.reshape(-1, 1)
            weights = weights.reshape(-1, 1)
        rows = Rows(x, ids, weights, local_experts, wire, params.gate_up_input_scale)
        y = plan(rows, run_own, shards)
        # One by one: a reduction may add in an order that hangs on what it is fused with.
        slots = jnp.unstack(y.reshape(r, -1, x.shape[1]), axis=1)
        return functools.reduce(jnp.add, slots).astype(x.dtype)

    specs = (expert_specs(params, expert_mesh),)
    return share_rows(body, expert_mesh, (x, ids, weights), params, specs=specs)


def _with_psum_gradient(forward, psum):
    """Return `forward` with the gradient of `psum`.

    Rows travel as words, whose derivative JAX takes to be zero.
    """
    dispatched = jax.custom_vjp(forward)

    def ahead(*operands):
        return dispatched(*operands), operands

    def back(operands, y_bar):
        return jax.vjp(psum, *operands)[1](y_bar)

    dispatched.defvjp(ahead, back)
    return dispatched


def share_rows(
    run: Callable, expert_mesh: ExpertMesh, rows: Any, *args: Any, specs: Any = None
) -> Any:
    """Return ``run(rows, *args)`` with rows shared out along `expert`, and what it returns too.

    Args:
      run: what each shard runs; the rows that it returns are those that it was given.
      expert_mesh: of the shards.
      rows: arrays ``[t, ...]``; where shards do not divide t, some get rows of zeros. Over
        Explicit axes the result is sharded as the first of them.
      args: whole on every device, or as `specs` say.
      specs: of `args`.
    """
    leaves = jax.tree.leaves(rows)
    t = leaves[0].shape[0]
    missing = -t % expert_mesh.expert

    def pad(leaf):
        # Zeros are rows as others, which cost a visit to an expert and come to nothing below.
        leaf = jnp.pad(leaf, [(0, missing), *[(0, 0)] * (leaf.ndim - 1)]) if missing else leaf
        return expert_mesh.reshard(leaf, EXPERT)

    def crop(leaf):
        # Parts that are not equal are no sharding: such a result is whole on every device.
        leaf = expert_mesh.reshard(leaf)[:t] if missing else leaf
        return expert_mesh.reshard(leaf, jax.typeof(leaves[0]).sharding.spec[0])

    split = expert_mesh.spec(EXPERT)
    given = split, *(specs or (expert_mesh.spec(),) * len(args))
    y = expert_mesh.shard_map(run, given, split)(jax.tree.map(pad, rows), *args)
    return jax.tree.map(crop, y)


@dataclasses.dataclass(frozen=True)
class WireFormat:
    """How rows travel.

    Attributes:
      by_slot: whether a row goes once for each expert and not once for each shard.
      scheme: of the quantized rows; None where they go as they are.
    """

    by_slot: bool = False
    scheme: Scheme | None = None

    def row_bytes(self, hidden: int, top_k: int, dtype: Any) -> int:
        """Return the bytes of one row on its way to an expert; the way back has `hidden` values.

        Args:
          hidden: width of a token.
          top_k: ids and weights that go along where a row is not one of a single expert.
          dtype: of activations.
        """
        if self.scheme is None:
            row = _up(hidden * jnp.dtype(dtype).itemsize, _WORD)
        else:
            row = _up(hidden // 2, _WORD) + _up(hidden // BLOCK, _WORD)
        own_scale = 4 if self.scheme is Scheme.W4A4_TOKEN_SCALE else 0
        return _up(row + 8 * (1 if self.by_slot else top_k) + own_scale, _ROW)


def choose_wire_format(
    scheme: Scheme | None, *, hidden: int, top_k: int, dtype: Any, shards: int, rounds: bool
) -> WireFormat:
    """Return how rows travel: so that the fewest bytes go there and back, if routing is uniform.

    Buffers have room for all tokens of another shard, `top_k` times as many where a row is one of
    a single expert. In rounds they have room for as many rows as there are, a mean of
    ``1 - (1 - 1 / shards)^top_k`` of the tokens, or ``top_k / shards`` rows for each of them.

    Args:
      scheme: as for `run_dispatched`; None where rows cannot be quantized before they are weighted.
      hidden, top_k, dtype: of the tokens, and how many experts each of them chooses.
      shards: along `expert`.
      rounds: whether rows go in rounds, in less room than all could need.
    """
    if scheme not in W4A4_SCHEMES:
        return WireFormat()
    if scheme is not Scheme.W4A4:
        return WireFormat(scheme=scheme)  # no more rows than of those as they are
    visits, slots = (1 - (1 - 1 / shards) ** top_k, top_k / shards) if rounds else (1, top_k)
    rows = {WireFormat(): visits, WireFormat(True, scheme): slots}
    back = hidden * jnp.dtype(dtype).itemsize
    return min(rows, key=lambda wire: rows[wire] * (wire.row_bytes(hidden, top_k, dtype) + back))


@dataclasses.dataclass(frozen=True)
class Rows:
    """What one shard sends: rows, and the experts that each one visits.

    Attributes:
      x, ids, weights: ``[r, h]``, ``[r, k]``, ``[r, k]``.
      local_experts: of one shard.
      wire: how rows travel.
      scales: float32 ``[e]``, scales of the rows of each expert where those are calibrated.
    """

    x: Any
    ids: Any
    weights: Any
    local_experts: int
    wire: WireFormat
    scales: Any

    def visits(self, shards: int) -> Bool[Array, "r s"]:
        """Return which of `shards` each row visits."""
        owner = jnp.where(self.ids >= 0, self.ids // self.local_experts, -1)
        return (owner[:, :, None] == jnp.arange(shards, dtype=jnp.int32)[None, None, :]).any(axis=1)

    def dispatch(self, plan: DispatchPlan, run_own: Callable, shards: int):
        """Return float32 ``[r, h]``: what all visits of each row add up to."""
        r, h = self.x.shape
        ids = plan.pack(self.ids) - plan.shard[:, None] * self.local_experts
        own = (ids >= 0) & (ids < self.local_experts)
        own = own if plan.taken is None else own & plan.taken[:, None]
        words, forms = _as_words([self.weights, *self._encoded()])
        missing = -(self.ids.shape[1] + words.shape[1]) % (_ROW // _WORD)
        words = jnp.pad(words, [(0, 0), (0, missing)]) if missing else words
        ids = lax.bitcast_convert_type(jnp.where(own, ids, -1), jnp.uint32)
        received = plan.send(jnp.concatenate([ids, plan.pack(words)], axis=1))
        ids, words = jnp.split(received, [ids.shape[1]], axis=1)
        ids = lax.bitcast_convert_type(ids, jnp.int32)
        weights, *parts = _from_words(words, forms)
        y = plan.back(run_own(self._decoded(parts, ids), ids, weights))
        total = jnp.zeros((r, h), jnp.float32)
        for d in range(shards):  # in the order of the shards, so that runs are equal to the bit
            back = plan.unpack(y, d).astype(jnp.float32)
            total += jnp.where(plan.travels[:, d : d + 1], back, 0.0)
        return total

    def _encoded(self):
        """Return the arrays that stand for the rows on the wire."""
        if self.wire.scheme is None:
            return [self.x]
        x = self.x.astype(jnp.float32)
        largest = amax(x, -1) if self.wire.scheme is Scheme.W4A4_TOKEN_SCALE else None
        scale = self._scale(largest, self.ids[:, 0])
        packed, block_scale, _ = quantize(x[:, None, :], scale)
        parts = [packed[:, 0], block_scale[:, 0]]
        return parts if largest is None else [*parts, largest]

    def _decoded(self, parts, ids):
        """Return rows that quantize to what came in."""
        if self.wire.scheme is None:
            return parts[0]
        packed, block_scale, *rest = parts
        first = lax.axis_index(EXPERT) * self.local_experts
        largest = rest[0] if rest else None
        scale = self._scale(largest, ids[:, 0] + first)[:, None]
        values = dequantize(packed, decode_scale(block_scale), jnp.float32)
        if largest is not None:
            at_top = jnp.abs(values) == SCALE_RANGE
            values = jnp.where(at_top, jnp.copysign(largest[:, None], values), values * scale)
        else:
            values *= scale
        return values.astype(self.x.dtype)

    def _scale(self, largest, ids):
        """Return the global scale of each row, whose own `largest` value counts under some."""
        if self.wire.scheme is Scheme.W4A4_TOKEN_SCALE:
            return divide(largest, jnp.float32(SCALE_RANGE))
        if self.wire.scheme is Scheme.W4A4:
            return self.scales[jnp.clip(ids, 0, self.scales.shape[0] - 1)]
        return jnp.ones(ids.shape, jnp.float32)


def _run_fixed(rows: Rows, run_own, shards, capacity, near):
    """Dispatch in slots of `capacity` rows for each pair of shards, in as many rounds as needed."""
    del near
    visits, r = rows.visits(shards), rows.x.shape[0]
    capacity = r if capacity is None else min(capacity, r)
    size = shards * capacity

    def dispatch(array):
        cut = array.reshape(shards, capacity, -1)
        return lax.all_to_all(cut, EXPERT, 0, 0).reshape(size, -1)

    if capacity == r:  # each row has its own slot for each shard, and nothing has to be counted
        shard = jnp.repeat(jnp.arange(shards, dtype=jnp.int32), r)
        pack = functools.partial(_repeat_rows, shards=shards)
        unpack = functools.partial(_pick_part, shards=shards)
        plan = DispatchPlan(shard, None, visits, pack, unpack, dispatch, dispatch)
        return rows.dispatch(plan, run_own, shards)
    ranks = _rank(visits)

    def run_round(number, total):
        rank = ranks - number * capacity
        travels = visits & (rank >= 0) & (rank < capacity)
        slots = jnp.arange(shards, dtype=jnp.int32)[None, :] * capacity + rank
        plan = _pack(slots, travels, size, dispatch, dispatch)
        return total + rows.dispatch(plan, run_own, shards)

    most = lax.pmax(visits.sum(axis=0).max(), EXPERT)  # all shards make as many rounds
    rounds = (most + capacity - 1) // capacity
    return lax.fori_loop(0, rounds, run_round, jnp.zeros(rows.x.shape, jnp.float32))


def _repeat_rows(part, shards):
    return jnp.broadcast_to(part, (shards, *part.shape)).reshape(-1, part.shape[1])


def _pick_part(y, d, shards):
    return y.reshape(shards, -1, y.shape[1])[d]


def _rank(visits):
    """Return int32 ``[r, shards]``: how many rows before each one visit the same shard."""
    return jnp.cumsum(visits.astype(jnp.int32), axis=0) - 1


def _pack(slots, travels, size, send, back) -> DispatchPlan:
    """Return the trip of rows that have the places `slots [r, s]` where they travel."""
    r, shards = slots.shape
    slots = jnp.where(travels, slots, size)
    number = jnp.arange(r * shards, dtype=jnp.int32).reshape(r, shards)
    visit = jnp.full(size, r * shards, jnp.int32).at[slots].set(number, mode="drop")
    here = jnp.minimum(visit // shards, r - 1)

    def pack(part):
        return part[here]

    def unpack(y, d):
        return y[jnp.minimum(slots[:, d], size - 1)]

    return DispatchPlan(visit % shards, visit < r * shards, travels, pack, unpack, send, back)


def _run_ragged(rows: Rows, run_own, shards, capacity, near):
    """Dispatch rows without empty slots; `capacity` has no meaning here."""
    del capacity
    visits, (r, k) = rows.visits(shards), rows.ids.shape
    size, received, me = r * min(k, shards), r * shards, lax.axis_index(EXPERT)
    counts = lax.all_gather(visits.sum(axis=0, dtype=jnp.int32), EXPERT)  # [from, to]
    starts = jnp.cumsum(counts, axis=1) - counts  # in the sender's buffer
    places = jnp.cumsum(counts, axis=0) - counts  # in the receiver's
    updates = _count_updates(r, shards, near)
    cut = functools.partial(_cut_rows, updates=updates)

    def send(array):
        room = jnp.full((received, array.shape[1]), 0xFFFFFFFF, jnp.uint32)
        (first, sent), (there, _) = cut(starts[me], counts[me]), cut(places[me], counts[me])
        came = cut(places[:, me], counts[:, me])[1]
        return lax.ragged_all_to_all(array, room, first, sent, there, came, axis_name=EXPERT)

    def back(array):
        room = jnp.zeros((size, array.shape[1]), array.dtype)
        (first, sent), (there, _) = (cut(at[:, me], counts[:, me]) for at in (places, starts))
        came = cut(starts[me], counts[me])[1]
        return lax.ragged_all_to_all(array, room, first, sent, there, came, axis_name=EXPERT)

    plan = _pack(starts[me][None, :] + _rank(visits), visits, size, send, back)
    return rows.dispatch(plan, run_own, shards)


# XLA's kernel for GPUs that reach each other's memory takes so many of them.
_MOST_POINTERS = 8
_BLOCKS = 512


def _count_updates(r: int, shards: int, near: bool) -> int:
    """Return in how many chunks a shard sends its rows to another.

    Between GPUs of one process XLA runs a kernel with one block of 128 threads for each chunk: on
    two H200 two blocks moved 3 to 5 GB/s, 514 move 70, and 4098 no more. Their number is odd, since
    of an even one the blocks take turns at each other's chunks, in case those are unequal, and ours
    are equal. Elsewhere each chunk is an NCCL send and receive, and one is best. openxla/xla,
    xla/backends/gpu/runtime/ragged_all_to_all.cc (RunRaggedAllToAllKernelImpl) and
    ragged_all_to_all_thunk.cc (RunCollective); issue 33386.

    Args:
      r: most rows for one shard.
      shards: along `expert`.
      near: whether they are of one process.
    """
    return min(r, _BLOCKS // shards) | 1 if near and shards <= _MOST_POINTERS else 1


def _cut_rows(starts, counts, updates):
    """Return int32 ``[shards * updates]``: first rows and numbers of rows of all chunks."""
    ends = counts[:, None] * jnp.arange(updates + 1, dtype=jnp.int32)[None, :] // updates
    return (starts[:, None] + ends[:, :-1]).reshape(-1), jnp.diff(ends, axis=1).reshape(-1)


_PLANS = {"all_to_all": _run_fixed, "ragged": _run_ragged}
DISPATCHES = ("psum", *_PLANS)
_WORD, _ROW = 4, 8  # bytes; XLA's kernel copies rows of whole eights by eight


def _as_words(parts):
    """Join arrays ``[r, ...]`` to uint32 ``[r, n]``; returns what undoes it too.

    In words, since XLA makes a buffer of what it converts from one width to another: ids and
    weights have this one, and tokens have their buffer already.
    """
    joined = []
    for part in parts:
        flat = part.reshape(part.shape[0], -1)
        size = flat.dtype.itemsize
        missing = -flat.shape[1] % (_WORD // size)
        flat = jnp.pad(flat, [(0, 0), (0, missing)]) if missing else flat
        if size < _WORD:
            flat = flat.reshape(flat.shape[0], -1, _WORD // size)
        joined.append(lax.bitcast_convert_type(flat, jnp.uint32))
    forms = [(part.shape[1:], part.dtype) for part in parts]
    return jnp.concatenate(joined, axis=1), forms


def _from_words(words, forms):
    parts, start = [], 0
    for shape, dtype in forms:
        count, size = int(np.prod(shape, dtype=np.int64)), jnp.dtype(dtype).itemsize
        width = -(-count * size // _WORD)
        values = lax.bitcast_convert_type(words[:, start : start + width], dtype)
        start += width
        parts.append(values.reshape(words.shape[0], -1)[:, :count].reshape(-1, *shape))
    return parts


def _up(n, step):
    return -(-n // step) * step
