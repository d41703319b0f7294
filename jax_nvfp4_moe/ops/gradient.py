"""Gradients of the ops to activations, expert weights and biases; quantized weights are frozen.

The kernels have no derivative. Only the operands are kept for the backward pass. Where a device has
a kernel for transposed weights, `ops.experts.backward` multiplies all rows at once. Elsewhere the
backward pass is plain XLA, and visits one expert at a time: it dequantizes the weights of the
expert to float32, runs the rows of the expert again in chunks, and differentiates that computation.
So only one expert's weights exist in float32.

Roundings count as the identity (straight-through estimator). This concerns activations that w4a4
schemes round to NVFP4, and the values between the two GEMMs, which are rounded to the dtype of the
tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_nvfp4_moe.backends.by_rows import by_rows
from jax_nvfp4_moe.numerics.auto_axes import on_auto_axes
from jax_nvfp4_moe.numerics.varying import vary_like, vary_together
from jax_nvfp4_moe.ops.experts.meaning import (
    CHUNK_ROWS,
    by_chunks,
    find_groups,
    group_bounds,
    round_to,
    sort_slots,
    visit_each,
)


def straight_through(function: Callable, x):
    """Return ``function(x)`` with the derivative of the identity.

    Args:
      function: maps an array to one of the same shape and dtype.
      x: its argument.
    """
    fixed = lax.stop_gradient(x)
    return function(fixed) + (x - fixed)


def take_expert(weights, expert):
    """Return the weights of one expert: every array of the tree `weights` at index `expert`."""
    return jax.tree.map(lambda leaf: leaf[expert], weights)


BIASES = "gate_up_bias", "down_bias"


def in_float32(params):
    """Return expert parameters with biases in float32, the dtype of their cotangents."""
    biases = {name: getattr(params, name) for name in BIASES}
    return dataclasses.replace(params, **jax.tree.map(lambda b: b.astype(jnp.float32), biases))


def _only(params, biases):
    """Return the cotangent of expert parameters that are frozen except for `biases`."""
    frozen = dict.fromkeys(field.name for field in dataclasses.fields(params) if _has_arrays(field))
    return dataclasses.replace(params, **(frozen | biases))


def _has_arrays(field):
    """Whether a dataclass field holds arrays, and is not static."""
    return not field.metadata.get("static")


class ExpertLayer(NamedTuple):
    """An expert layer as the backward pass needs it: the rows of one expert, in float32.

    Attributes:
      num_experts: number of experts. Ids below 0, and ids from this number on, contribute nothing.
      read_expert: ``(params, expert) -> weights`` of one expert, without its biases.
      run_rows: ``(weights, biases of the expert, rows [m, h]) -> [m, h]``, in differentiable
        operations. Functions that compute the same are equal, so that calls outside of `jax.jit`
        do not compile the backward pass again.
      weight_on_input: whether the weight of an expert multiplies its input instead of its output.
    """

    num_experts: int
    read_expert: Callable
    run_rows: Callable
    weight_on_input: bool


def with_expert_gradient(forward: Callable, find_bars: Callable) -> Callable:
    """Return `forward` with a gradient to tokens, expert weights and biases.

    The forward pass does not change.

    Args:
      forward: ``(x [t, h], params, expert_ids [t, k], expert_weights float32 [t, k])`` to
        ``[t, h]`` in the dtype of x. `params` are `MoEParams` or `DenseExperts` with biases in
        float32.
      find_bars: ``(operands, y_bar [t, h])`` to the float32 cotangents of tokens ``[t, h]`` and
        expert weights ``[t, k]``, and a dictionary of those of the biases.
    """
    run = jax.custom_vjp(_varying(by_rows(forward, "t, -, t, t -> t")))
    bars = by_rows(lambda *given: find_bars(given[:-1], given[-1]), "t, -, t, t, t -> t, t, +")

    def ahead(*operands):
        return run(*operands), operands

    def back(operands, y_bar):
        x_bar, weights_bar, biases_bar = bars(*operands, y_bar)
        return x_bar.astype(y_bar.dtype), _only(operands[1], biases_bar), None, weights_bar

    run.defvjp(ahead, back)
    return on_auto_axes(lambda *operands: run(*vary_together(operands)))


def _varying(forward):
    """Return `forward` with a result that varies between devices if its operands do."""
    return lambda *operands: vary_like(forward(*operands), operands)


@functools.partial(jax.jit, inline=True, static_argnums=0)
def visit_experts(layer: ExpertLayer, operands, y_bar):
    """Return the float32 cotangents of tokens, expert weights and biases, expert by expert.

    With ``e = expert_ids[t, j]``, this differentiates
    ``y[t] = sum_j expert_weights[t, j] * run_rows(read_expert(params, e), biases[e], x[t])``. The
    first argument is that computation; `with_expert_gradient` describes the others.
    """
    # Arrays of NumPy that a function closes over cannot be indexed by values of a trace.
    x, params, expert_ids, expert_weights = jax.tree.map(jnp.asarray, operands)
    biases = {name: getattr(params, name) for name in BIASES}
    bars = jax.tree.map(_zeros, (x, expert_weights.reshape(-1), biases))
    bars = vary_like(bars, operands)
    if expert_ids.size and layer.num_experts:
        slots, starts, ends = sort_slots(expert_ids, layer.num_experts)
        given = x, expert_weights.reshape(-1), biases, y_bar
        tokens, top_k = expert_ids.shape
        chunk = _chunk_rows(tokens, top_k, layer.num_experts)

        def visit(expert, bars):
            weights = layer.read_expert(params, expert)

            def run_chunk(start, bars):
                here = lax.dynamic_slice(slots, (start,), (chunk,))
                alive = start + jnp.arange(chunk, dtype=jnp.int32) < ends[expert]
                token = here // expert_ids.shape[1]
                return _add_piece(layer, weights, given, expert, (token, here, alive), bars)

            return by_chunks(run_chunk, starts[expert], ends[expert], bars, chunk)

        bars = visit_each(starts, ends, visit, bars)
    x_bar, weights_bar, biases_bar = bars
    return x_bar, weights_bar.reshape(expert_weights.shape), biases_bar


def _chunk_rows(tokens, top_k, num_experts) -> int:
    """Return the number of rows of one expert that are differentiated at once.

    It is twice the mean number of rows of an expert, rounded up to a power of two. A chunk is
    computed as a whole: with 128 rows for each expert, one token would take the time of 128. There
    are at least two rows, because XLA multiplies a single one on a CPU five times slower.
    """
    if not isinstance(tokens, int):  # a symbol of `jax.export`
        return CHUNK_ROWS
    mean = -(-tokens * top_k // num_experts)
    return min(CHUNK_ROWS, max(2, 1 << (min(tokens, 2 * mean) - 1).bit_length()))


def _add_piece(layer, weights, given, expert, rows, bars):
    """Add the contribution of one chunk of an expert's rows to the cotangents."""
    x, expert_weights, biases, y_bar = given
    token, slot, alive = rows

    def run(rows, weight, own):
        if layer.weight_on_input:
            scaled = straight_through(lambda rows: round_to(rows, x.dtype), rows * weight[:, None])
            return layer.run_rows(weights, own, scaled)
        return layer.run_rows(weights, own, rows) * weight[:, None]

    # A chunk may extend into the rows of the next expert. These rows become zeros: they then add
    # nothing, and their NaN cannot spread.
    own_rows = jnp.where(alive[:, None], x[token].astype(jnp.float32), 0.0)
    own_weights = jnp.where(alive, expert_weights[slot], 0.0)
    own_biases = take_expert(biases, expert)
    bar = jnp.where(alive[:, None], y_bar[token].astype(jnp.float32), 0.0)
    rows_bar, weight_bar, bias_bar = jax.vjp(run, own_rows, own_weights, own_biases)[1](bar)
    x_bar, weights_bar, biases_bar = bars
    return (
        x_bar.at[token].add(rows_bar),
        weights_bar.at[slot].add(weight_bar),
        jax.tree.map(lambda sums, one: sums.at[expert].add(one), biases_bar, bias_bar),
    )


def with_product_gradient(forward: Callable, transposed: Callable) -> Callable:
    """Return `forward`, a grouped GEMM, with a gradient to rows and biases.

    The backward pass differentiates ``y[i] = W[g] @ x[i] + bias[g]`` for row i of group g:
    ``x_bar[i] = W[g].T @ y_bar[i]``. The cotangent of a bias is the sum of the ``y_bar`` of its
    group.

    Args:
      forward: ``(x [m, k], weight, group_sizes [e], input_scale, bias)`` to ``[m, n]`` in the dtype
        of x. `weight` is an `NVFP4Tensor` ``[e, n, k]``; `bias` is float32 ``[e, n]`` or None.
        `group_sizes` is None if one group has all rows. x may then be ``[..., k]``.
      transposed: ``(y_bar [m, n], weight, group_sizes)`` to ``[m, k]``, such as `transposed_gemm`.
    """
    run = jax.custom_vjp(_varying(forward))
    bars = functools.partial(_product_bars, transposed)
    linear_bars = by_rows(functools.partial(_linear_bars, bars), "-, -, ... _ -> ... _, +")

    def ahead(x, weight, group_sizes, input_scale, bias):
        return run(x, weight, group_sizes, input_scale, bias), (bias, weight, group_sizes)

    def back(kept, y_bar):
        bias, weight, group_sizes = kept
        if group_sizes is None:
            x_bar, bias_bar = linear_bars(bias, weight, y_bar)
        else:
            x_bar, bias_bar = bars(bias, weight, group_sizes, y_bar)
        return x_bar.astype(y_bar.dtype), None, None, None, bias_bar

    run.defvjp(ahead, back)
    return on_auto_axes(lambda *operands: run(*vary_together(operands)))


def _linear_bars(bars, bias, weight, y_bar):
    """Return the cotangents of rows ``[..., k]`` of one group, and of its bias."""
    flat = y_bar.reshape(-1, y_bar.shape[-1])
    x_bar, bias_bar = bars(bias, weight, None, flat)
    return x_bar.reshape(*y_bar.shape[:-1], weight.shape[-1]), bias_bar


@functools.partial(jax.jit, inline=True, static_argnums=0)
def _product_bars(transposed, bias, weight, group_sizes, y_bar):
    """Return the cotangents of rows, in their dtype, and of biases, in float32."""
    weight, group_sizes = jax.tree.map(jnp.asarray, (weight, group_sizes))
    x_bar = transposed(y_bar, weight, group_sizes)
    if bias is None:
        return x_bar, None
    return x_bar, sum_groups(y_bar.astype(jnp.float32), group_sizes, len(bias))


# Rows of a group that are added up at once.
_SUM_ROWS = 128


def sum_groups(rows, group_sizes, num_groups: int):
    """Return the sums ``[num_groups, n]`` of float32 rows ``[m, n]`` that are sorted by group.

    The order of additions is fixed. On GPUs, that of `jax.ops.segment_sum` is not: its results
    differ in the last bits from call to call. So tiles of rows of one group are added up, and then
    the tiles of each group.

    Args:
      rows: the rows.
      group_sizes: integers ``[num_groups]``, or None if one group has all rows.
      num_groups: number of groups.
    """
    if group_sizes is None:
        return rows.sum(axis=0, keepdims=True)
    m, groups = len(rows), jnp.arange(num_groups, dtype=jnp.int32)
    if m * num_groups == 0:
        return jnp.zeros((num_groups, rows.shape[1]), rows.dtype)
    tile_rows = max(1, min(_SUM_ROWS, m // max(num_groups, 1)))
    starts, ends = group_bounds(group_sizes, m)
    last_tiles = jnp.cumsum((ends - starts + tile_rows - 1) // tile_rows)
    tiles = m // tile_rows + num_groups
    tile = jnp.arange(tiles, dtype=last_tiles.dtype)
    own = find_groups(last_tiles, tiles)  # num_groups for tiles of no group
    group = jnp.minimum(own, num_groups - 1)
    before = jnp.concatenate([jnp.zeros(1, last_tiles.dtype), last_tiles[:-1]])
    first = starts[group] + (tile - before[group]) * tile_rows
    row = first[:, None] + jnp.arange(tile_rows, dtype=first.dtype)[None]
    there = (row < ends[group][:, None]) & (own < num_groups)[:, None]
    sums = jnp.where(there[..., None], rows[jnp.minimum(row, m - 1)], 0.0).sum(axis=1)
    # A product with ones and zeros would spread NaN from one group to the others.
    belongs = own[None] == groups[:, None]
    return jnp.where(belongs[..., None], sums[None], 0.0).sum(axis=1)


def _zeros(leaf):
    return jnp.zeros(leaf.shape, jnp.float32)
