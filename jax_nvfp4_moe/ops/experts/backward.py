"""The backward pass of an expert layer as grouped products of all rows, on kernels.

For a slot, which is a token with one of its experts, with ``u = gate_up(x)`` and ``a = act(u)``,
the layer adds ``weight * down(a)`` to the token. From the cotangent ``y_bar`` of the token follow::

  g = y_bar @ W_down           a product with transposed weights
  weight_bar = g . a
  u_bar = vjp(act, u)(weight * g)
  x_bar = u_bar @ W_gate_up    a product with transposed weights, added up for each token

`u` is computed again by the kernel of the forward pass. So there are three products of slots where
the forward pass has two, and 5/3 of its operations. Weights stay packed.
"""

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_nvfp4_moe.backends.plan import Plan
from jax_nvfp4_moe.numerics.activations import (
    ActivationCall,
    activate_parts,
    join_parts,
    split_parts,
)
from jax_nvfp4_moe.numerics.layouts import LAYOUTS
from jax_nvfp4_moe.numerics.tensor import MoEParams, NVFP4Tensor
from jax_nvfp4_moe.numerics.varying import vary_like
from jax_nvfp4_moe.ops.experts.meaning import (
    find_groups,
    group_bounds,
    round_activations,
    round_to,
    sort_slots,
)
from jax_nvfp4_moe.ops.gradient import BIASES, sum_groups
from jax_nvfp4_moe.ops.preparation import plan_product
from jax_nvfp4_moe.ops.running import find_plan
from jax_nvfp4_moe.scheme import Scheme

# Platform -> the slots whose rows exist at once. They bound the memory. The kernels of CPUs are as
# fast as with more rows when each expert has 64.
_CHUNK_SLOTS = {"cuda": 65536, "cpu": 16384}
# In a layout of two halves, gate and up rows take turns in groups of so many.
_TURN = 8
# Such a layout -> the layout of the plain weight that its bytes are.
_PLAIN = {layout.of_halves: layout.name for layout in LAYOUTS.values() if layout.of_halves}


class GroupedBars(NamedTuple):
    """How the backward pass of an expert layer runs; all fields are static.

    Attributes:
      call: the activation.
      scheme: how the inputs of products are rounded. Roundings count as the identity.
      weight_on_input: whether the weight of an expert multiplies its input.
      multiply: plan of the grouped GEMM of the forward pass.
      transposed: plan of that with transposed weights.
    """

    call: ActivationCall
    scheme: Scheme
    weight_on_input: bool
    multiply: Plan
    transposed: Plan


def plan_transposed(plan: Plan, dtype) -> Plan | None:
    """Return the plan of `transposed_gemm` for the weights of `plan`.

    It is None if no kernel reads them where they are, and the definition has to run.
    """
    sizes = {name: getattr(plan.problem, name) for name in _SIZES}
    found = find_plan("transposed_gemm", target=plan.target, dtype=jnp.dtype(dtype).name, **sizes)
    return found if found.backend.platform and found.layout == plan.layout else None


_SIZES = "num_experts", "hidden", "intermediate"


def plan_grouped_bars(
    params: MoEParams, plan: Plan, tokens, dtype, call: ActivationCall, weight_on_input: bool
) -> GroupedBars | None:
    """Return how `grouped_bars` runs for a layer of `plan`.

    It is None if the layer has no kernels, or if the number of tokens is a symbol of `jax.export`:
    `grouped_bars` cuts tokens into chunks, and must know how many there are.

    Args:
      params: the experts, in the layout of `plan`.
      plan: the plan of `moe_mlp`.
      tokens: number of tokens, an integer or a symbol.
      dtype: dtype of the tokens.
      call, weight_on_input: as in `ops.moe_mlp`.
    """
    transposed = plan_transposed(plan, dtype)
    if transposed is None or plan.scheme is None or not isinstance(tokens, int):
        return None
    declared = Scheme.W4A4 if plan.scheme is Scheme.W4A4 else Scheme.W4A16
    how = {"checkpoint_scheme": declared, "scheme": plan.scheme, "target": plan.target}
    multiply = plan_product(params.gate_up, dtype=dtype, backend=plan.requested_backends, **how)
    if multiply.layout != plan.layout:
        return None
    return GroupedBars(call, plan.scheme, weight_on_input, multiply, transposed)


@functools.partial(jax.jit, inline=True, static_argnums=0)
def grouped_bars(how: GroupedBars, operands, y_bar):
    """Return the float32 cotangents of tokens, expert weights and biases.

    Args:
      how: of `plan_grouped_bars`.
      operands: those of `with_expert_gradient`.
      y_bar: cotangent ``[t, h]`` of the result.
    """
    x, params, expert_ids, expert_weights = jax.tree.map(jnp.asarray, operands)
    tokens, top_k = expert_ids.shape
    if tokens * top_k == 0 or params.num_experts == 0:
        biases = {name: getattr(params, name) for name in BIASES}
        bars = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (x, expert_weights))
        return vary_like((*bars, jax.tree.map(jnp.zeros_like, biases)), operands)
    chunk = max(1, _CHUNK_SLOTS[how.transposed.target.platform] // top_k)
    if tokens <= chunk:
        return _chunk_bars(how, params, (x, expert_ids, expert_weights, y_bar))
    chunks = -(-tokens // chunk)

    def cut(rows, fill):
        pads = [(0, chunks * chunk - tokens), *[(0, 0)] * (rows.ndim - 1)]
        return jnp.pad(rows, pads, constant_values=fill).reshape(chunks, chunk, *rows.shape[1:])

    given = cut(x, 0), cut(expert_ids, -1), cut(expert_weights, 0), cut(y_bar, 0)
    x_bar, weights_bar, biases_bar = lax.map(functools.partial(_chunk_bars, how, params), given)
    return (
        x_bar.reshape(-1, x.shape[1])[:tokens],
        weights_bar.reshape(-1, top_k)[:tokens],
        jax.tree.map(lambda bars: bars.sum(axis=0), biases_bar),
    )


def _chunk_bars(how, params, given):
    """Return the cotangents of one chunk of tokens; their sum for the biases."""
    x, expert_ids, expert_weights, y_bar = given
    (tokens, top_k), e = expert_ids.shape, params.num_experts
    slots, starts, ends = sort_slots(expert_ids, e)
    slots, sizes = slots[: tokens * top_k], ends - starts
    place = jnp.arange(tokens * top_k, dtype=jnp.int32)
    alive, token = (place < ends[-1])[:, None], slots // top_k
    owner = jnp.minimum(find_groups(ends, tokens * top_k), e - 1)
    weight = jnp.where(alive, expert_weights.reshape(-1)[slots][:, None], 0.0)
    # Rows of no expert come last. Products give zeros for them, and NaN in them does not spread.
    rows, bar = x[token], y_bar[token]
    if how.weight_on_input:
        rows = (rows.astype(jnp.float32) * weight).astype(x.dtype)
    tiled, ratio = _as_plain(params.gate_up)
    multiply = functools.partial(how.multiply.lower, scheme=how.scheme)
    u = multiply(rows, tiled, sizes, params.gate_up_input_scale, None)
    parts = _split_tiles(how.call, u.astype(jnp.float32), params.gate_up.layout)
    factors = (1.0,) * len(parts) if ratio is None else jnp.split(ratio[owner], 2, axis=1)
    parts = tuple(map(operator.mul, parts, factors))
    if params.gate_up_bias is not None:
        biases = split_parts(how.call, params.gate_up_bias)
        parts = tuple(part + bias[owner] for part, bias in zip(parts, biases, strict=True))
    inner, back = jax.vjp(functools.partial(activate_parts, how.call), *parts)
    inner = round_to(inner, x.dtype)
    if how.scheme is not Scheme.W4A16:
        scale = params.down_input_scale
        inner = round_activations(inner, None if scale is None else scale[owner], how.scheme)
    g = how.transposed.lower(bar, params.down, sizes).astype(jnp.float32)
    weighted = 1.0 if how.weight_on_input else weight
    parts_bar = back(jnp.where(alive, g * weighted, 0.0))
    ready = map(operator.mul, parts_bar, factors)
    ready = _join_tiles(how.call, *ready, layout=params.gate_up.layout)
    rows_bar = how.transposed.lower(ready.astype(x.dtype), tiled, sizes).astype(jnp.float32)
    if how.weight_on_input:
        weight_bar = jnp.sum(rows_bar * x[token].astype(jnp.float32), axis=1)
        rows_bar = rows_bar * weight
    else:
        weight_bar = jnp.sum(g * inner, axis=1)
        if params.down_bias is not None:
            weight_bar += jnp.sum(bar.astype(jnp.float32) * params.down_bias[owner], axis=1)
    weight_bar = jnp.where(alive[:, 0], weight_bar, 0.0)
    biases_bar = dict.fromkeys(BIASES)
    if params.gate_up_bias is not None:
        sums = (sum_groups(part_bar, sizes, e) for part_bar in parts_bar)
        biases_bar["gate_up_bias"] = join_parts(how.call, *sums)
    if params.down_bias is not None:
        biases_bar["down_bias"] = sum_groups(bar.astype(jnp.float32) * weighted, sizes, e)
    order = jnp.zeros_like(slots).at[slots].set(place)  # slot -> its row
    x_bar = rows_bar[order].reshape(tokens, top_k, -1).sum(axis=1)
    return x_bar, weight_bar[order].reshape(tokens, top_k), biases_bar


def _as_plain(weight: NVFP4Tensor):
    """Return `gate_up` as the plain weight that its bytes are, and factors of its rows.

    In a layout of two halves, the rows of the plain weight take turns as `_split_tiles` says. The
    factors are those of `_split_scale`.
    """
    scale, ratio = _split_scale(weight.global_scale)
    plain = {"layout": _PLAIN.get(weight.layout, weight.layout), "global_divisor": None}
    return dataclasses.replace(weight, global_scale=scale, **plain), ratio


def fold_parts(x, weight: NVFP4Tensor, group_sizes):
    """Return operands of the kernel for `transposed_gemm`, with one global scale for each expert.

    Args:
      x: rows ``[m, n]``.
      weight: `NVFP4Tensor` ``[e, n, k]`` with global scales ``[e]`` or ``[e, parts]``.
      group_sizes: int32 ``[e]``, or None if one group has all rows.

    Returns:
      The rows, multiplied by the factors of their columns where global scales differ, and the
      weight with the largest global scale of each expert.
    """
    scale, ratio = _split_scale(weight.global_scale)
    if ratio is None:
        return x, weight
    if group_sizes is not None:
        rows = x.shape[0]
        groups = find_groups(group_bounds(group_sizes, rows)[1], rows)
        ratio = ratio[jnp.minimum(groups, len(ratio) - 1)]
    columns = jnp.repeat(ratio, x.shape[1] // ratio.shape[1], axis=1)
    x = (x.astype(jnp.float32) * columns).astype(x.dtype)
    return x, dataclasses.replace(weight, global_scale=scale, global_divisor=None)


def _split_scale(scale):
    """Return one global scale ``[e]`` for each expert, and the factors of its parts.

    The factors, at most 1, are ``[e, parts]``; None if an expert has one global scale.
    """
    if scale.ndim == 1:
        return scale, None
    largest = jnp.max(scale, axis=1)
    return largest, jnp.where(largest[:, None] > 0, scale / largest[:, None], 0.0)


def _split_tiles(call, u, layout):
    """Return the gate and up columns of ``u [m, n]``, which has those of the plain weight.

    Without a copy: gate and up take turns in groups of eight, unless the matrix has no halves.
    """
    if layout not in _PLAIN:
        return split_parts(call, u)
    m, n = u.shape
    turns = u.reshape(m, n // (2 * _TURN), 2, _TURN)
    halves = turns[:, :, 0].reshape(m, n // 2), turns[:, :, 1].reshape(m, n // 2)
    return split_parts(call, jnp.concatenate(halves, axis=1)) if call.row.interleaved else halves


def _join_tiles(call, *parts, layout):
    """Undo `_split_tiles`."""
    if layout not in _PLAIN:
        return join_parts(call, *parts)
    if call.row.interleaved:
        parts = jnp.split(join_parts(call, *parts), 2, axis=1)
    m, i = parts[0].shape
    gate, up = (part.reshape(m, i // _TURN, 1, _TURN) for part in parts)
    # A choice for each element is one pass over memory. A concatenation would be several.
    side = jnp.arange(2, dtype=jnp.int32).reshape(1, 1, 2, 1)
    return jnp.where(side == 0, gate, up).reshape(m, 2 * i)
