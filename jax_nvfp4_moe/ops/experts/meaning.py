"""The definition of every op in float32 `jax.numpy`; it runs on any device and is slow.

Memory stays bounded: only one expert is dequantized at a time, and its tokens go through in chunks
of a fixed number of rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_nvfp4_moe.numerics.activations import ActivationCall, activate
from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.numerics.nvfp4 import SCALE_RANGE, amax, divide, fake_quantize
from jax_nvfp4_moe.numerics.tensor import MoEParams, NVFP4Tensor
from jax_nvfp4_moe.numerics.varying import vary_like
from jax_nvfp4_moe.ops.dense import precision_for
from jax_nvfp4_moe.scheme import Scheme

CHUNK_ROWS = 128  # number of rows of one expert that are processed at once


def round_activations(x, input_scale, scheme: Scheme):
    """Round rows ``x [m, k]`` to NVFP4 and back, by `scheme`, in float32.

    Args:
      x: float32 rows ``[m, k]``.
      input_scale: float32 scalar or ``[m]``; only w4a4 reads it.
      scheme: w4a16 does not change `x`. The other schemes round with the global scale `input_scale`
        (w4a4), 1 (w4a4_unit_scale), or ``amax / 2688`` of each row (w4a4_token_scale).

    Returns:
      float32 ``[m, k]``. NaN and infinite values become NaN.
    """
    if scheme is Scheme.W4A16:
        return x
    if scheme is Scheme.W4A4_UNIT_SCALE:
        scale = jnp.ones((), jnp.float32)
    elif scheme is Scheme.W4A4_TOKEN_SCALE:
        scale = divide(amax(x, -1), jnp.float32(SCALE_RANGE))
    else:
        scale = jnp.asarray(input_scale, jnp.float32)
    rounded = fake_quantize(x[:, None, :], jnp.broadcast_to(scale, x.shape[:1]))[:, 0, :]
    # An infinity would saturate at the largest number, and the finite result would hide the error
    # in that token.
    return jnp.where(jnp.isfinite(x), rounded, jnp.nan)


def _multiply(x, weight: NVFP4Tensor, expert):
    """Return ``x @ dequantize(weight[expert]).T`` in float32."""
    one = jax.tree.map(lambda leaf: leaf[expert], weight)
    return jnp.matmul(x, one.dequantize(jnp.float32).T, precision=lax.Precision.HIGHEST)


def by_chunks(run_chunk, start, end, carry, chunk: int = CHUNK_ROWS):
    """Process the rows from `start` to `end` in chunks: ``carry = run_chunk(row, carry)``.

    `row` is the first row of each chunk. The loop counts chunks. XLA removes a loop that counts
    rows in steps of `chunk` up to a constant of 1.
    """
    chunks = (end - start + (chunk - 1)) // chunk
    return lax.fori_loop(0, chunks, lambda i, carry: run_chunk(start + i * chunk, carry), carry)


def _pick(array, expert):
    """Return ``array[expert]`` in float32, or zero if `array` is None."""
    return jnp.float32(0) if array is None else array[expert].astype(jnp.float32)


def _bias(array, expert):
    """Return the bias of one expert as a row ``[1, n]``, or zero if there is no bias."""
    return 0.0 if array is None else array[expert][None].astype(jnp.float32)


def round_to(x, dtype):
    """Round float32 values to the precision of `dtype`, and keep them in float32.

    XLA may remove a pair of casts as excess precision. It does not remove `lax.reduce_precision`.
    """
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def _expert_mlp(x, params: MoEParams, expert, scheme, call: ActivationCall, dtype):
    """Run rows ``x [m, h]`` of one expert through both GEMMs; return float32 ``[m, h]``."""
    x = round_activations(x, _pick(params.gate_up_input_scale, expert), scheme)
    u = _multiply(x, params.gate_up, expert) + _bias(params.gate_up_bias, expert)
    a = round_to(activate(call, u), dtype)
    a = round_activations(a, _pick(params.down_input_scale, expert), scheme)
    return _multiply(a, params.down, expert) + _bias(params.down_bias, expert)


@functools.partial(jax.jit, inline=True, static_argnames=("num_experts",))
def sort_slots(expert_ids, num_experts: int):
    """Sort slots by their expert.

    The slot ``t * k + j`` stands for token t and its j-th expert. Slots without an expert come
    last.

    Args:
      expert_ids: integers ``[t, k]``. Ids below 0, and ids from `num_experts` on, stand for no
        expert.
      num_experts: number of experts e.

    Returns:
      A tuple ``(slots, starts, ends)``. `slots` is int32 ``[t * k + CHUNK_ROWS]`` and ends with
      zeros. `starts` and `ends`, int32 ``[e]``, are the bounds of each expert's slots.
    """
    e = num_experts
    flat = jnp.where((expert_ids >= 0) & (expert_ids < e), expert_ids, e).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.zeros(e, jnp.int32).at[flat].add(1, mode="drop")
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    slots = jnp.concatenate([order.astype(jnp.int32), jnp.zeros(CHUNK_ROWS, jnp.int32)])
    return slots, starts, ends


def combine_experts(
    x, num_experts, expert_ids, expert_weights, run_rows, *, weight_on_input, width=None
):
    """Return ``y[t] = sum_j expert_weights[t, j] * run_rows(expert_ids[t, j], x[t])``.

    Args:
      x: ``[t, h]`` of any float dtype.
      num_experts: number of experts. Ids below 0, and ids from this number on, contribute nothing.
      expert_ids: integers ``[t, k]``.
      expert_weights: ``[t, k]`` of any float dtype.
      run_rows: ``(expert, float32 rows [m, h]) -> float32 [m, width]``.
      weight_on_input: whether the weight multiplies the rows before `run_rows` instead of the
        result.
      width: number of columns of the result; None (default) for h.

    Returns:
      ``[t, width]`` in the dtype of `x`.
    """
    (t, h), top_k = x.shape, expert_ids.shape[1]
    e = num_experts
    slots, starts, ends = sort_slots(expert_ids, e)
    # The loop over experts cannot index numpy arrays.
    x, weights = jnp.asarray(x), jnp.asarray(expert_weights, jnp.float32).reshape(-1)

    def run_chunk(expert, start, y):
        here = lax.dynamic_slice(slots, (start,), (CHUNK_ROWS,))
        alive = start + jnp.arange(CHUNK_ROWS, dtype=jnp.int32) < ends[expert]
        rows, weight = x[here // top_k], weights[here]
        if weight_on_input:
            rows = round_to(rows.astype(jnp.float32) * weight[:, None], x.dtype)
            weight = jnp.ones_like(weight)
        d = run_rows(expert, rows.astype(jnp.float32))
        # A chunk may extend into the rows of the next expert. `where` drops them, so that their NaN
        # cannot spread.
        d = jnp.where(alive[:, None], d * weight[:, None], 0.0)
        return y.at[jnp.where(alive, here // top_k, t)].add(d, mode="drop")

    def run_expert(expert, y):
        run = functools.partial(run_chunk, expert)
        return by_chunks(run, starts[expert], ends[expert], y)

    y = jnp.zeros((t, h if width is None else width), jnp.float32)
    if t == 0 or top_k == 0 or e == 0:
        return y.astype(x.dtype)
    y = vary_like(y, (x, expert_ids, weights))
    return lax.fori_loop(0, e, run_expert, y).astype(x.dtype)


@functools.partial(jax.jit, inline=True, static_argnames=("scheme", "call", "weight_on_input"))
def moe_mlp(x, params, expert_ids, expert_weights, *, scheme, call, weight_on_input):
    """Compute an expert layer; `ops.moe_mlp` describes the result."""
    params = jax.tree.map(jnp.asarray, params)  # a loop over experts cannot index numpy arrays
    params = params.to_layout(CANONICAL)

    def run_rows(expert, rows):
        return _expert_mlp(rows, params, expert, scheme, call, x.dtype)

    return combine_experts(
        x,
        params.num_experts,
        expert_ids,
        expert_weights,
        run_rows,
        weight_on_input=weight_on_input,
    )


def group_bounds(group_sizes, rows: int):
    """Return the first row of each group and the row after its last one, int32 ``[e]`` each.

    Args:
      group_sizes: integers ``[e]``; a negative size counts as 0. None if one group has all rows.
      rows: number of rows that exist; no group extends past it.
    """
    if group_sizes is None:
        group_sizes = jnp.full(1, rows, jnp.int32)
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(group_sizes, 0)), rows)
    return jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]]), ends


@functools.partial(jax.jit, inline=True)
def transposed_gemm(x, weight: NVFP4Tensor, group_sizes):
    """Multiply rows ``x [m, n]`` by the transposed weights of their groups.

    Row i of group g gives ``y[i] = x[i] @ dequantize(weight)[g]``, and rows of no group give zeros.

    Args:
      x: rows ``[m, n]``, sorted by group, bfloat16, float16 or float32.
      weight: `NVFP4Tensor` ``[e, n, k]``.
      group_sizes: integers ``[e]``, or None if one group has all rows.

    Returns:
      ``[m, k]`` in the dtype of `x`. Sums are float32.
    """
    weight = jax.tree.map(jnp.asarray, weight).to_layout(CANONICAL)
    m, (e, _, k) = x.shape[0], weight.shape
    y = vary_like(jnp.zeros((m, k), x.dtype), (x, weight, group_sizes))
    if m == 0 or e == 0:
        return y
    starts, ends = group_bounds(group_sizes, m)
    chunk = m if e == 1 else CHUNK_ROWS  # one matrix takes all rows in one GEMM
    padded = jnp.concatenate([x, jnp.zeros((chunk, x.shape[1]), x.dtype)])
    precision = precision_for(x.dtype)

    def visit(group, y):
        one = jax.tree.map(lambda leaf: leaf[group], weight).dequantize(jnp.float32)

        def run_chunk(start, y):
            row = start + jnp.arange(chunk, dtype=jnp.int32)
            alive = row < ends[group]
            rows = lax.dynamic_slice_in_dim(padded, start, chunk).astype(jnp.float32)
            rows = jnp.where(alive[:, None], rows, 0.0)
            product = jnp.matmul(rows, one, precision=precision).astype(x.dtype)
            return y.at[jnp.where(alive, row, m)].set(product, mode="drop")

        return by_chunks(run_chunk, starts[group], ends[group], y, chunk)

    return visit_each(starts, ends, visit, y)


def visit_each(starts, ends, visit, carry):
    """Run ``carry = visit(expert, carry)`` for each expert that has rows; return the last carry."""
    there = ends > starts
    visited = jnp.argsort(~there, stable=True)  # those with rows come first, in their order
    count = jnp.sum(there, dtype=jnp.int32)
    return lax.fori_loop(0, count, lambda i, carry: visit(visited[i], carry), carry)


def find_groups(ends, count: int):
    """Return the group of each of `count` sorted rows, int32.

    For rows of no group it is the number of groups.
    `jnp.searchsorted` fails in a `jax.shard_map` over some axes of a mesh with Explicit axes.

    Args:
      ends: integers ``[e]``, the row after the last one of each group.
      count: number of rows.
    """
    row = jnp.arange(count, dtype=ends.dtype)
    return jnp.sum(ends[None] <= row[:, None], axis=1, dtype=jnp.int32)


@functools.partial(jax.jit, inline=True, static_argnames=("scheme",))
def grouped_gemm(x, weight, group_sizes, input_scale, bias, *, scheme):
    """Multiply each row by the weight of its group; `ops.grouped_gemm` describes the result."""
    weight, bias = jax.tree.map(jnp.asarray, (weight, bias))  # as in `moe_mlp`
    m = x.shape[0]
    weight = weight.to_layout(CANONICAL)
    e, n, _ = weight.shape
    starts, ends = group_bounds(group_sizes, m)
    row = jnp.arange(CHUNK_ROWS, dtype=jnp.int32)
    padded = jnp.concatenate([x, jnp.zeros((CHUNK_ROWS, x.shape[1]), x.dtype)])

    def run_chunk(expert, start, y):
        rows = lax.dynamic_slice_in_dim(padded, start, CHUNK_ROWS).astype(jnp.float32)
        rows = round_activations(rows, _pick(input_scale, expert), scheme)
        d = _multiply(rows, weight, expert) + _bias(bias, expert)
        return y.at[jnp.where(start + row < ends[expert], start + row, m)].set(d, mode="drop")

    def run_expert(expert, y):
        run = functools.partial(run_chunk, expert)
        return by_chunks(run, starts[expert], ends[expert], y)

    y = jnp.zeros((m, n), jnp.float32)
    if e == 0:
        return y.astype(x.dtype)
    y = vary_like(y, (x, weight, group_sizes, input_scale, bias))
    return lax.fori_loop(0, e, run_expert, y).astype(x.dtype)
