"""Dispatch of tokens to experts, with both sharded along `expert`, and combination of the results.

Each shard holds a part of the tokens. It sends a token once to every shard that holds one of the
token's experts. The ids and weights of those experts travel with it, as words of the same
collective. That shard runs its experts, and the results return. They are added up in float32, in
the order of the shards::

  y[t] = sum over shards d of back(run(sent(x[t]), part of shard d, its ids, weights))

Under w4a4 schemes, rows may travel as NVFP4 codes and scales, with 0.28 of the bytes of bfloat16.
The receiver quantizes again and gets the same codes, except for blocks below half of the smallest
scale. With one scale per token, the largest value of the row travels too. Without it, the product
of code and scale could be off by an ulp. If every expert has its own calibrated scale, one row per
chosen expert travels in both directions. Rows then travel unquantized if that takes fewer bytes.

GPUs that `connect_peers` has connected exchange few tokens by sums through each other's memory, in
place of collectives of XLA, which take longer to start. Each of them then gets all tokens, runs its
experts on them, and adds up, as "psum" does.

"all_to_all" uses slots of a fixed number of rows per pair of shards, on any platform. If `capacity`
is below a shard's number of tokens, it takes several rounds, so that no row is dropped. "ragged"
uses ``lax.ragged_all_to_all`` on GPUs, which sends no empty slots.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int

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
from jax_nvfp4_moe.parallel.expert_mesh import DATA, EXPERT, TENSOR, ExpertMesh
from jax_nvfp4_moe.parallel.expert_specs import expert_specs
from jax_nvfp4_moe.parallel.experts import own_part, run_sharded
from jax_nvfp4_moe.scheme import W4A4_SCHEMES, Scheme, Target


class Exchange(NamedTuple):
    """One collective to the experts and one back, with buffers of `size` rows.

    Attributes:
      shard: int32 ``[size]``, the shard to which each row of the buffer goes.
      taken: bool ``[size]``, which rows of the buffer are used; None if all are.
      travels: bool ``[r, shards]``, which shards each row visits in this round.
      pack: ``[r, n] -> [size, n]``, puts rows at their places in the buffer.
      unpack: ``([size, h], shard) -> [r, h]``, the results from that shard; arbitrary values for
        rows that did not visit it.
      send: words ``[size, n] -> [received, n]``; ids of empty rows are -1.
      back: ``[received, h] -> [size, h]``.
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
    """Run an expert layer on a mesh.

    The gradient is that of "psum" for every `dispatch`: the backward pass gathers the tokens. There
    is no forward-mode derivative, so `jax.jvp` and `jax.jacfwd` raise TypeError.

    Args:
      run: ``(x, params, expert_ids, expert_weights) -> [t, h]``; skips ids that are out of range.
      x: tokens ``[t, h]``: replicated for "psum", else sharded along `expert`.
      params: the weights, as `shard_experts` returns them.
      expert_ids, expert_weights: ``[t, k]``, on the devices of `x`.
      expert_mesh: the mesh of `params`.
      dispatch: "psum" (default), "all_to_all" or "ragged".
      capacity: rows from one shard to another in one round of "all_to_all"; None (default) for all.
      scheme: w4a4 schemes may send quantized rows, see `choose_wire_format`; None (default) sends
        rows unquantized.
      weight_on_input: whether `run` weights rows before it quantizes them; they then travel
        unquantized.

    Returns:
      ``[t, h]``, on the devices of `x`.

    Raises:
      ValueError: if it is called in `ExpertMesh.shard_whole` with another `dispatch` than "psum".
    """
    psum = functools.partial(run_sharded, run, expert_mesh=expert_mesh)
    if dispatch == "psum" or not expert_mesh.has(EXPERT) or not x.shape[0]:
        return psum(x, params, expert_ids, expert_weights)
    if expert_mesh.is_inside:
        raise ValueError(
            f"dispatch: expected 'psum' in the program of each device, where all devices have the "
            f"same tokens, got {dispatch!r}"
        )
    ids = jnp.where((expert_ids >= 0) & (expert_ids < params.num_experts), expert_ids, -1)
    given = x, params, ids.astype(jnp.int32), expert_weights.astype(jnp.float32)
    if _are_few(x, ids, expert_mesh):
        few = functools.partial(_share_few_rows, run, expert_mesh)
        return _with_psum_gradient(few, psum)(*given)
    (t, hidden), shards = x.shape, expert_mesh.expert
    each = -(-t // expert_mesh.data)  # tokens that travel among the shards of one part of `data`
    wire = choose_wire_format(
        None if weight_on_input else scheme,
        hidden=hidden,
        top_k=ids.shape[1],
        dtype=x.dtype,
        shards=shards,
        rounds=(capacity or each) < -(-each // shards),
    )
    near = expert_mesh.in_one_process(EXPERT)
    exchange = functools.partial(_RUNS[dispatch], capacity=capacity, near=near)
    forward = functools.partial(_send_rows, run, wire, exchange, expert_mesh)
    return _with_psum_gradient(forward, psum)(*given)


def _send_rows(run, wire, exchange, expert_mesh, x, params, ids, weights):
    """Return ``[t, h]``: send rows to the shards of their experts, apply `run`, and combine."""
    local_experts = params.num_experts // expert_mesh.expert

    def body(rows, params):
        x, ids, weights = rows
        own = own_part(params, expert_mesh)

        def run_own(x, ids, weights):
            y = run(x, own, ids, weights)
            if expert_mesh.tensor == 1:
                return y
            return expert_mesh.add_up(y, TENSOR)

        (r, k), shards = ids.shape, expert_mesh.expert
        if wire.by_slot:
            x, ids = jnp.repeat(x, k, axis=0), ids.reshape(-1, 1)
            weights = weights.reshape(-1, 1)
        axis, scale = expert_mesh.name(EXPERT), params.gate_up_input_scale
        rows = Rows(x, ids, weights, local_experts, wire, scale, axis)
        y = exchange(rows, run_own, shards)
        # A reduction may add in an order that depends on its fusion, so slots are added one by one.
        slots = jnp.unstack(y.reshape(r, -1, x.shape[1]), axis=1)
        return functools.reduce(jnp.add, slots).astype(x.dtype)

    specs = (expert_specs(params, expert_mesh),)
    return share_rows(body, expert_mesh, (x, ids, weights), params, specs=specs)


def _are_few(x, ids, expert_mesh: ExpertMesh) -> bool:
    """Return whether GPUs share all tokens by sums through each other's memory.

    These are the sums of the tokens, and of their ids and weights.
    """
    rows = -(-x.shape[0] // (expert_mesh.data * expert_mesh.expert)) * expert_mesh.expert
    sizes = (x.shape[1] * x.dtype.itemsize, 2 * ids.shape[1] * 4)
    return all(expert_mesh.adds_up_by_peers(rows * size, EXPERT, TENSOR) for size in sizes)


def _share_few_rows(run, expert_mesh, x, params, ids, weights):
    """Return ``[t, h]``: share all rows of a part of `data`, run each shard, and add up.

    A shard contributes its rows, and zeros for those of others, so that each sum equals one of its
    terms. Ids are exact as float32.
    """
    local_experts = params.num_experts // expert_mesh.expert

    def body(rows, params):
        x, ids, weights = rows
        me = lax.axis_index(expert_mesh.name(EXPERT))
        first = me * x.shape[0]
        contributes = True
        if expert_mesh.has(TENSOR):  # its shards have the same rows
            contributes = lax.axis_index(expert_mesh.name(TENSOR)) == 0

        def share(own):
            room = jnp.zeros((expert_mesh.expert * own.shape[0], own.shape[1]), own.dtype)
            own = jnp.where(contributes, own, jnp.zeros_like(own))
            placed = lax.dynamic_update_slice_in_dim(room, own, first, 0)
            return expert_mesh.add_up(placed, EXPERT, TENSOR)

        every = share(x)
        chosen, shares = jnp.split(share(jnp.hstack([ids.astype(jnp.float32), weights])), 2, axis=1)
        chosen = chosen.astype(jnp.int32) - me * local_experts
        y = run(every, own_part(params, expert_mesh), chosen, shares)
        y = expert_mesh.add_up(y, EXPERT, TENSOR)
        return lax.dynamic_slice_in_dim(y, first, x.shape[0])

    specs = (expert_specs(params, expert_mesh),)
    return share_rows(body, expert_mesh, (x, ids, weights), params, specs=specs)


def _with_psum_gradient(forward, psum):
    """Return `forward` with the gradient of `psum`.

    Rows travel as integer words, and JAX takes the derivative of integers to be zero.
    """
    dispatched = jax.custom_vjp(forward)

    def ahead(*operands):
        return dispatched(*operands), operands

    def back(operands, y_bar):
        return jax.vjp(psum, *operands)[1](y_bar)

    dispatched.defvjp(ahead, back)
    return dispatched


def check_platform(dispatch: str, target: Target) -> None:
    """Check that a device can send tokens as `dispatch` says.

    Raises:
      ValueError: it cannot.
    """
    if dispatch == "ragged" and target.platform == "cpu":
        raise ValueError("dispatch: expected GPUs for 'ragged', got CPUs; use 'all_to_all'")


def share_rows(
    run: Callable, expert_mesh: ExpertMesh, rows: Any, *args: Any, specs: Any = None
) -> Any:
    """Return ``run(rows, *args)`` with rows and result sharded along `data` and `expert`.

    Args:
      run: the function of each shard; it returns one row for each given row.
      expert_mesh: the mesh of the shards.
      rows: arrays ``[t, ...]``; if the shards do not divide t, rows of zeros are added. Over
        Explicit axes the result is sharded like the first array.
      args: further arguments, replicated or sharded by `specs`.
      specs: specifications of `args`; None (default) if they are replicated.
    """
    leaves = jax.tree.leaves(rows)
    t = leaves[0].shape[0]
    missing, roles = -t % (expert_mesh.data * expert_mesh.expert), (DATA, EXPERT)

    def pad(leaf):
        # Rows of zeros also visit experts; `crop` removes their results.
        leaf = jnp.pad(leaf, [(0, missing), *[(0, 0)] * (leaf.ndim - 1)]) if missing else leaf
        return expert_mesh.reshard(leaf, roles)

    def crop(leaf):
        # A sharding needs equal parts, so a result that is cropped is replicated first.
        leaf = expert_mesh.reshard(leaf)[:t] if missing else leaf
        return expert_mesh.reshard(leaf, jax.typeof(leaves[0]).sharding.spec[0])

    split = expert_mesh.spec(roles)
    given = split, *(specs or (expert_mesh.spec(),) * len(args))
    y = expert_mesh.shard_map(run, given, split)(jax.tree.map(pad, rows), *args)
    return jax.tree.map(crop, y)


@dataclasses.dataclass(frozen=True)
class WireFormat:
    """The format in which rows travel.

    Attributes:
      by_slot: whether a row travels once per chosen expert instead of once per shard.
      scheme: the scheme that quantizes the rows; None (default) if they travel unquantized.
    """

    by_slot: bool = False
    scheme: Scheme | None = None

    def row_bytes(self, hidden: int, top_k: int, dtype: DTypeLike) -> int:
        """Return the bytes of one row on its way to an expert; the way back has `hidden` values.

        Args:
          hidden: number of features of a token.
          top_k: number of ids and weights that travel with a row, unless `by_slot`.
          dtype: dtype of the activations.
        """
        if self.scheme is None:
            row = _up(hidden * jnp.dtype(dtype).itemsize, _WORD)
        else:
            row = _up(hidden // 2, _WORD) + _up(hidden // BLOCK, _WORD)
        own_scale = 4 if self.scheme is Scheme.W4A4_TOKEN_SCALE else 0
        return _up(row + 8 * (1 if self.by_slot else top_k) + own_scale, _ROW)


def choose_wire_format(
    scheme: Scheme | None, *, hidden: int, top_k: int, dtype: DTypeLike, shards: int, rounds: bool
) -> WireFormat:
    """Return the format with the fewest bytes in both directions if routing is uniform.

    Without rounds, buffers have room for all tokens of the other shard, or `top_k` times as many
    rows if a row travels once per expert. With rounds, they have room for the expected rows:
    ``1 - (1 - 1 / shards)^top_k`` of the tokens, or ``top_k / shards`` rows per token.

    Args:
      scheme: scheme of the layer; None if rows cannot be quantized before they are weighted.
      hidden, top_k, dtype: features of a token, experts per token, dtype of the tokens.
      shards: number of shards along `expert`.
      rounds: whether rows travel in rounds, with less room than all rows could need.
    """
    if scheme not in W4A4_SCHEMES:
        return WireFormat()
    if scheme is not Scheme.W4A4:
        return WireFormat(scheme=scheme)  # the scale is not per expert: one row per shard suffices
    visits, slots = (1 - (1 - 1 / shards) ** top_k, top_k / shards) if rounds else (1, top_k)
    rows = {WireFormat(): visits, WireFormat(True, scheme): slots}
    back = hidden * jnp.dtype(dtype).itemsize
    return min(rows, key=lambda wire: rows[wire] * (wire.row_bytes(hidden, top_k, dtype) + back))


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows that one shard sends, and the experts that each of them visits.

    Attributes:
      x, ids, weights: ``[r, h]``, ``[r, k]``, ``[r, k]``.
      local_experts: number of experts of one shard.
      wire: the format in which rows travel.
      scales: float32 ``[e]``, the calibrated input scales of the experts, or None.
      axis: name of the mesh axis over which the experts are sharded.
    """

    x: Float[Array, "r h"]
    ids: Int[Array, "r k"]
    weights: Float[Array, "r k"]
    local_experts: int
    wire: WireFormat
    scales: Float[Array, " e"] | None
    axis: str

    def visits(self, shards: int) -> Bool[Array, "r s"]:
        """Return which of the `shards` each row visits."""
        owner = jnp.where(self.ids >= 0, self.ids // self.local_experts, -1)
        return (owner[:, :, None] == jnp.arange(shards, dtype=jnp.int32)[None, None, :]).any(axis=1)

    def dispatch(self, exchange: Exchange, run_own: Callable, shards: int):
        """Return float32 ``[r, h]``: the sum over all visits of each row."""
        r, h = self.x.shape
        ids = exchange.pack(self.ids) - exchange.shard[:, None] * self.local_experts
        own = (ids >= 0) & (ids < self.local_experts)
        own = own if exchange.taken is None else own & exchange.taken[:, None]
        words, forms = _as_words([self.weights, *self._encoded()])
        missing = -(self.ids.shape[1] + words.shape[1]) % (_ROW // _WORD)
        words = jnp.pad(words, [(0, 0), (0, missing)]) if missing else words
        ids = lax.bitcast_convert_type(jnp.where(own, ids, -1), jnp.uint32)
        received = exchange.send(jnp.concatenate([ids, exchange.pack(words)], axis=1))
        ids, words = jnp.split(received, [ids.shape[1]], axis=1)
        ids = lax.bitcast_convert_type(ids, jnp.int32)
        weights, *parts = _from_words(words, forms)
        y = exchange.back(run_own(self._decoded(parts, ids), ids, weights))
        total = jnp.zeros((r, h), jnp.float32)
        for d in range(shards):  # a fixed order, so that all runs have the same bits
            back = exchange.unpack(y, d).astype(jnp.float32)
            total += jnp.where(exchange.travels[:, d : d + 1], back, 0.0)
        return total

    def _encoded(self):
        """Return the arrays that represent the rows while they travel."""
        if self.wire.scheme is None:
            return [self.x]
        x = self.x.astype(jnp.float32)
        largest = amax(x, -1) if self.wire.scheme is Scheme.W4A4_TOKEN_SCALE else None
        scale = self._scale(largest, self.ids[:, 0])
        packed, block_scale, _ = quantize(x[:, None, :], scale)
        parts = [packed[:, 0], block_scale[:, 0]]
        return parts if largest is None else [*parts, largest]

    def _decoded(self, parts, ids):
        """Return rows that quantize to the codes and scales that were received."""
        if self.wire.scheme is None:
            return parts[0]
        packed, block_scale, *rest = parts
        first = lax.axis_index(self.axis) * self.local_experts
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
        """Return the global scale of each row; token scales follow from its `largest` value."""
        if self.wire.scheme is Scheme.W4A4_TOKEN_SCALE:
            return divide(largest, jnp.float32(SCALE_RANGE))
        if self.wire.scheme is Scheme.W4A4:
            assert self.scales is not None
            return self.scales[jnp.clip(ids, 0, self.scales.shape[0] - 1)]
        return jnp.ones(ids.shape, jnp.float32)


def _run_fixed(rows: Rows, run_own, shards, capacity, near):
    """Dispatch in slots of `capacity` rows per pair of shards, in as many rounds as needed."""
    del near
    visits, r = rows.visits(shards), rows.x.shape[0]
    capacity = r if capacity is None else min(capacity, r)
    size = shards * capacity

    def dispatch(array):
        cut = array.reshape(shards, capacity, -1)
        return lax.all_to_all(cut, rows.axis, 0, 0).reshape(size, -1)

    if capacity == r:  # each row has its own slot for each shard, so rows need no counting
        shard = jnp.repeat(jnp.arange(shards, dtype=jnp.int32), r)
        pack = functools.partial(_repeat_rows, shards=shards)
        unpack = functools.partial(_pick_part, shards=shards)
        exchange = Exchange(shard, None, visits, pack, unpack, dispatch, dispatch)
        return rows.dispatch(exchange, run_own, shards)
    ranks = _rank(visits)

    def run_round(number, total):
        rank = ranks - number * capacity
        travels = visits & (rank >= 0) & (rank < capacity)
        slots = jnp.arange(shards, dtype=jnp.int32)[None, :] * capacity + rank
        exchange = _pack(slots, travels, size, dispatch, dispatch)
        return total + rows.dispatch(exchange, run_own, shards)

    most = lax.pmax(
        visits.sum(axis=0).max(), rows.axis
    )  # all shards need the same number of rounds
    rounds = (most + capacity - 1) // capacity
    return lax.fori_loop(0, rounds, run_round, jnp.zeros(rows.x.shape, jnp.float32))


def _repeat_rows(part, shards):
    """Return ``[shards * r, n]``: the rows of `part`, once for each shard."""
    return jnp.broadcast_to(part, (shards, *part.shape)).reshape(-1, part.shape[1])


def _pick_part(y, d, shards):
    """Return the rows that came back from shard `d`, out of the rows of all shards."""
    return y.reshape(shards, -1, y.shape[1])[d]


def _rank(visits):
    """Return int32 ``[r, shards]``: how many earlier rows visit the same shard."""
    return jnp.cumsum(visits.astype(jnp.int32), axis=0) - 1


def _pack(slots, travels, size, send, back) -> Exchange:
    """Return the exchange of rows that travel to the places `slots` ``[r, s]`` in the buffer."""
    r, shards = slots.shape
    slots = jnp.where(travels, slots, size)
    number = jnp.arange(r * shards, dtype=jnp.int32).reshape(r, shards)
    visit = jnp.full(size, r * shards, jnp.int32).at[slots].set(number, mode="drop")
    here = jnp.minimum(visit // shards, r - 1)

    def pack(part):
        return part[here]

    def unpack(y, d):
        return y[jnp.minimum(slots[:, d], size - 1)]

    return Exchange(visit % shards, visit < r * shards, travels, pack, unpack, send, back)


def _run_ragged(rows: Rows, run_own, shards, capacity, near):
    """Dispatch rows without empty slots; `capacity` has no effect here."""
    del capacity
    visits, (r, k) = rows.visits(shards), rows.ids.shape
    size, received, me = r * min(k, shards), r * shards, lax.axis_index(rows.axis)
    counts = lax.all_gather(visits.sum(axis=0, dtype=jnp.int32), rows.axis)  # [from, to]
    starts = jnp.cumsum(counts, axis=1) - counts  # in the sender's buffer
    places = jnp.cumsum(counts, axis=0) - counts  # in the receiver's
    updates = _count_updates(r, shards, near)
    cut = functools.partial(_cut_rows, updates=updates)

    def send(array):
        room = jnp.full((received, array.shape[1]), 0xFFFFFFFF, jnp.uint32)
        (first, sent), (there, _) = cut(starts[me], counts[me]), cut(places[me], counts[me])
        came = cut(places[:, me], counts[:, me])[1]
        return lax.ragged_all_to_all(array, room, first, sent, there, came, axis_name=rows.axis)

    def back(array):
        room = jnp.zeros((size, array.shape[1]), array.dtype)
        (first, sent), (there, _) = (cut(at[:, me], counts[:, me]) for at in (places, starts))
        came = cut(starts[me], counts[me])[1]
        return lax.ragged_all_to_all(array, room, first, sent, there, came, axis_name=rows.axis)

    exchange = _pack(starts[me][None, :] + _rank(visits), visits, size, send, back)
    return rows.dispatch(exchange, run_own, shards)


# XLA's kernel for GPUs with access to each other's memory accepts this many pointers.
_MOST_POINTERS = 8
_BLOCKS = 512


def _count_updates(r: int, shards: int, near: bool) -> int:
    """Return the number of chunks in which a shard sends its rows to another shard.

    If the GPUs belong to one process, XLA runs a kernel with one block of 128 threads per chunk. On
    two H200s, two blocks moved 3 to 5 GB/s, 514 blocks 70 GB/s, and 4098 blocks no more. The number
    of chunks is odd: with an even number, blocks alternate between the chunks in case their sizes
    differ, and ours are equal. Otherwise each chunk is an NCCL send and receive, and one chunk is
    best.

    Source: openxla/xla, xla/backends/gpu/runtime/ragged_all_to_all.cc (RunRaggedAllToAllKernelImpl)
    and ragged_all_to_all_thunk.cc (RunCollective); issue 33386.

    Args:
      r: largest number of rows for one shard.
      shards: number of shards along `expert`.
      near: whether the shards belong to one process.
    """
    return min(r, _BLOCKS // shards) | 1 if near and shards <= _MOST_POINTERS else 1


def _cut_rows(starts, counts, updates):
    """Return int32 ``[shards * updates]``: the first row and the number of rows of each chunk."""
    ends = counts[:, None] * jnp.arange(updates + 1, dtype=jnp.int32)[None, :] // updates
    return (starts[:, None] + ends[:, :-1]).reshape(-1), jnp.diff(ends, axis=1).reshape(-1)


_RUNS = {"all_to_all": _run_fixed, "ragged": _run_ragged}
DISPATCHES = ("psum", *_RUNS)
_WORD, _ROW = 4, 8  # bytes; XLA's kernel copies 8 bytes at a time if rows are a multiple of 8


def _as_words(parts):
    """Join arrays ``[r, ...]`` to uint32 ``[r, n]``; also return the shapes that undo it.

    XLA copies what it converts from one width to another. Ids and weights already have the width of
    words, and tokens are in a buffer anyway, so words avoid further copies.
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
    """Undo `_as_words`: return arrays of the shapes and dtypes in `forms`."""
    parts, start = [], 0
    for shape, dtype in forms:
        count, size = int(np.prod(shape, dtype=np.int64)), jnp.dtype(dtype).itemsize
        width = -(-count * size // _WORD)
        values = lax.bitcast_convert_type(words[:, start : start + width], dtype)
        start += width
        parts.append(values.reshape(words.shape[0], -1)[:, :count].reshape(-1, *shape))
    return parts


def _up(n, step):
    """Round `n` up to a multiple of `step`."""
    return -(-n // step) * step
