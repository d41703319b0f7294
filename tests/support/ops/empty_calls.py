"""Calls of every op, whose numbers of rows and of tokens a test chooses.

The shape of an array is a tuple of numbers and of names: "b" stands for the number of rows, and "t"
for the number of tokens in each row, or of all tokens if the op has no rows.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe import Router, ops, quantize, testing
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.rope import Rope
from jax_nvfp4_moe.numerics.tensor import DenseExperts
from jax_nvfp4_moe.ops.block_attention import BlockChoice, block_attention
from jax_nvfp4_moe.ops.chosen_keys import attend_to_chosen, choose_keys
from jax_nvfp4_moe.ops.compressed_keys import attend_to_compressed
from jax_nvfp4_moe.ops.dense import dense, dense_fp8
from jax_nvfp4_moe.ops.dense_moe import dense_moe
from jax_nvfp4_moe.ops.head_products import absorb_queries, expand_values

Shape = tuple[int | str, ...]
FULL = {"b": 2, "t": 3}
ROPE = Rope((1.0, 0.5, 0.25, 0.125))
BT, TOKENS = ("b", "t"), ("b", "t", 64)
# Arrays that keep their dtype, whatever that of the activations.
F32, I32, FP8 = np.float32, np.int32, jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an op.

    Attributes:
      run: the op, a function of the operands and of options.
      operands: shape of each operand, and its dtype if it is not that of the activations.
      results: shape of each result.
      kept: index of a result -> index of the operand that it equals if there are no tokens.
      dtypes: dtypes of activations that the op takes.
      options: names of the arguments among `backend` and `target` that the op has.
    """

    run: Callable[..., Any]
    operands: Sequence[tuple[Any, ...]]
    results: Sequence[Shape]
    kept: Mapping[int, int] = dataclasses.field(default_factory=dict)
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    options: tuple[str, ...] = ("backend", "target")

    def make(self, dtype: str, sizes: Mapping[str, int]) -> list[jax.Array]:
        """Return the operands for some numbers of rows and tokens."""
        rng = np.random.default_rng(0)
        made = []
        for shape, *own in self.operands:
            own = own[0] if own else dtype
            size = resolve(shape, sizes)
            if own == I32:
                values = np.broadcast_to(np.arange(size[-1] if size else 1), size) % 4
            else:
                values = np.abs(rng.normal(size=size))
            made.append(jnp.asarray(values).astype(own))
        return made

    def results_of(self, *operands, **options) -> list[jax.Array]:
        """Run the op, and return the arrays of its results."""
        return jax.tree.leaves(self.run(*operands, **options))

    @property
    def axes(self) -> set[str]:
        """Return which of "b" and "t" the call has."""
        return {name for shape, *_ in self.operands for name in shape if isinstance(name, str)}


def resolve(shape: Shape, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return a shape with numbers in place of names."""
    return tuple(sizes[size] if isinstance(size, str) else size for size in shape)


def _quantized(*shape):
    return quantize(jax.random.normal(jax.random.key(0), shape))


EXPERTS = testing.random_moe_params(jax.random.key(1), num_experts=4, hidden=64, intermediate=64)
_DENSE = DenseExperts(jnp.ones((4, 128, 64)) / 64, jnp.ones((4, 64, 64)) / 64)
_MATRIX, _MATRICES = _quantized(32, 64), _quantized(3, 32, 64)
_FP8 = FP8Tensor(jnp.ones((32, 64), FP8), jnp.ones(32))
_ROUTER = Router(2)
_HEADS, _CACHE = ("b", "t", 4, 64), ("b", 2, 8, 64)
_DELTA = {"q": ("b", "t", 2, 16), "v": ("b", "t", 2, 3, 16), "rate": ("b", "t", 2, 3)}


def _delta_step(projected, positions, inputs, state, *weights, **how):
    names = "conv_weight", "A_log", "dt_bias", "norm"
    named = dict(zip(names, weights, strict=True))
    return ops.gated_delta_step(projected, positions, inputs, state, **named, **how)


def _kimi_step(projected, decays, gates, positions, inputs, state, *weights, **how):
    names = "conv_weight", "A_log", "dt_bias", "norm"
    named = dict(zip(names, weights, strict=True))
    return ops.kimi_delta_step(projected, decays, gates, positions, inputs, state, **named, **how)


def _mamba2_step(projected, positions, inputs, state, *weights, **how):
    names = "conv_weight", "A_log", "dt_bias", "D", "norm"
    named = dict(zip(names, weights, strict=True))
    return ops.mamba2_step(projected, positions, inputs, state, **named, **how)


def _quantize(x, scale=None, **how):
    weight = ops.quantize_nvfp4(x, global_scale=scale, **how)
    return weight.packed, weight.block_scale, weight.global_scale


def _linears(x, **how):
    return ops.chain_calls(lambda x: ops.linear(x, _MATRIX, **how) * 2)(x)


CALLS = {
    "activate": Call(ops.activate, [(("b", "t", 128),)], [TOKENS]),
    "add_gated": Call(ops.add_gated, [(TOKENS,), (("b", "t", 1),), (TOKENS,)], [TOKENS]),
    "add_linear_gated": Call(
        ops.add_linear_gated, [(TOKENS,), (TOKENS,), ((64,),), (TOKENS,)], [TOKENS]
    ),
    "add_rms_norm": Call(
        lambda *given, **how: ops.add_rms_norm(*given, eps=1e-6, **how),
        [(TOKENS,), (TOKENS,), ((64,),)],
        [TOKENS, TOKENS],
    ),
    "add_rms_norm without a sum": Call(
        lambda x, weight, **how: ops.add_rms_norm(x, None, weight, eps=1e-6, **how),
        [(TOKENS,), ((64,),)],
        [TOKENS, TOKENS],
    ),
    "attention": Call(ops.attention, [(_HEADS,), (_CACHE,), (_CACHE,), (BT, I32)], [_HEADS]),
    "attention to a window of many keys": Call(
        lambda *given, **how: ops.attention(*given, window=3, **how),
        [(_HEADS,), (("b", 2, 600, 64),), (("b", 2, 600, 64),), (BT, I32)],
        [_HEADS],
    ),
    "attention to latents": Call(
        lambda q, k, positions, **how: ops.attention(q, k, None, positions, value_width=32, **how),
        [(_HEADS,), (("b", 1, 8, 64),), (BT, I32)],
        [("b", "t", 4, 32)],
    ),
    "attention to keys in FP8": Call(
        lambda q, k, v, positions, k_scale, v_scale, **how: ops.attention(
            q, k, v, positions, k_scale=k_scale, v_scale=v_scale, **how
        ),
        [(_HEADS,), (_CACHE, FP8), (_CACHE, FP8), (BT, I32), ((2,), F32), ((2,), F32)],
        [_HEADS],
    ),
    "block_attention": Call(
        lambda *given: block_attention(*given, choice=BlockChoice(2, 2, 1)),
        [(_HEADS,), (_CACHE,), (_CACHE,), (("b", "t", 2, 16),), (("b", 1, 8, 16),), (BT, I32)],
        [_HEADS],
        options=(),
    ),
    "causal_convolution": Call(
        lambda x, positions, inputs, weight, **how: ops.causal_convolution(
            x, positions, inputs, weight=weight, widths=(32, 32), **how
        ),
        [(TOKENS,), (BT, I32), (("b", 3, 64),), ((64, 4), F32)],
        [("b", "t", 32), ("b", "t", 32), ("b", 3, 64)],
        {2: 2},
    ),
    "causal_convolution of heads": Call(
        lambda x, positions, inputs, weight, **how: ops.causal_convolution(
            x, positions, inputs, weight=weight, widths=(8, 16), heads=2, stride=32, **how
        ),
        [(TOKENS,), (BT, I32), (("b", 3, 48),), ((48, 4), F32)],
        [("b", "t", 16), ("b", "t", 32), ("b", 3, 48)],
        {2: 2},
    ),
    "chain_calls": Call(_linears, [(TOKENS,)], [("b", "t", 32)]),
    "choose_keys": Call(
        lambda *given: choose_keys(*given, count=4),
        [(("b", "t", 2, 16),), (("b", "t", 2), F32), (("b", 8, 16),), (BT, I32)],
        [("b", "t", 4)],
        options=(),
    ),
    "attend_to_chosen": Call(
        lambda *given: attend_to_chosen(*given, scale=1.0),
        [(_HEADS,), (_CACHE,), (_CACHE,), (BT, I32), (("b", "t", 4), I32)],
        [_HEADS],
        options=(),
    ),
    "attend_to_compressed": Call(
        lambda q, near, places, far, visible, chosen, sinks: attend_to_compressed(
            q, near, places, far, visible, chosen, sinks, window=3, scale=1.0
        ),
        [
            (_HEADS,),
            (("b", 5, 64),),
            (BT, I32),
            (("b", 6, 64),),
            (BT, I32),
            (("b", "t", 2), I32),
            ((4,), F32),
        ],
        [_HEADS],
        options=(),
    ),
    "dense": Call(dense, [(TOKENS,), ((32, 64),)], [("b", "t", 32)], options=("target",)),
    "dense_fp8": Call(
        lambda x, **how: dense_fp8(x, _FP8, dtype=x.dtype, **how),
        [(TOKENS,)],
        [("b", "t", 32)],
        options=("target",),
    ),
    "dense_moe": Call(
        lambda x, ids, weights: dense_moe(x, _DENSE, ids, weights),
        [(("t", 64),), (("t", 2), I32), (("t", 2), F32)],
        [("t", 64)],
        options=(),
    ),
    "expand_values": Call(
        expand_values,
        [(("b", "t", 4, 64),), ((4, 32, 64),)],
        [("b", "t", 4, 32)],
        options=("target",),
    ),
    "absorb_queries": Call(
        lambda q, keys, positions, **how: absorb_queries(
            q, keys, positions, rope=ROPE, interleaved=False, **how
        ),
        [(("b", "t", 4, 40),), ((4, 32, 64),), (BT, I32)],
        [("b", "t", 4, 72)],
        options=("target",),
    ),
    "gate_heads": Call(ops.gate_heads, [(_HEADS,), (("b", "t", 512),)], [_HEADS]),
    "gated_delta_rule": Call(
        ops.gated_delta_rule,
        [
            (_DELTA["q"], F32),
            (_DELTA["q"], F32),
            (_DELTA["v"], F32),
            (_DELTA["rate"], F32),
            (_DELTA["rate"], F32),
            (("b", 2, 3, 16, 16), F32),
        ],
        [_DELTA["v"], ("b", 2, 3, 16, 16)],
        {1: 5},
        ("bfloat16",),
    ),
    "gated_delta_rule with decays of channels": Call(
        lambda *given, **how: ops.gated_delta_rule(*given, normalize=True, **how),
        [
            (_DELTA["q"], F32),
            (_DELTA["q"], F32),
            (("b", "t", 2, 1, 16), F32),
            (("b", "t", 2, 1, 16), F32),
            (("b", "t", 2, 1), F32),
            (("b", 2, 1, 16, 16), F32),
        ],
        [("b", "t", 2, 1, 16), ("b", 2, 1, 16, 16)],
        {1: 5},
        ("bfloat16",),
    ),
    "gated_delta_step": Call(
        _delta_step,
        [
            (("b", 1, 268),),
            (("b", 1), I32),
            (("b", 3, 160),),
            (("b", 2, 3, 16, 16), F32),
            ((160, 4), F32),
            ((6,), F32),
            ((6,), F32),
            ((16,), F32),
        ],
        [("b", 1, 96), ("b", 3, 160), ("b", 2, 3, 16, 16)],
    ),
    "grouped_gemm": Call(
        lambda x, sizes, **how: ops.grouped_gemm(x, _MATRICES, sizes, **how),
        [(("t", 64),), ((3,), I32)],
        [("t", 32)],
    ),
    "kimi_delta_step": Call(
        _kimi_step,
        [
            (("b", 1, 98),),
            (("b", 1, 32),),
            (("b", 1, 32),),
            (("b", 1), I32),
            (("b", 3, 96),),
            (("b", 2, 16, 16), F32),
            ((96, 4), F32),
            ((2,), F32),
            ((32,), F32),
            ((16,), F32),
        ],
        [("b", 1, 32), ("b", 3, 96), ("b", 2, 16, 16)],
    ),
    "linear": Call(lambda x, **how: ops.linear(x, _MATRIX, **how), [(TOKENS,)], [("b", "t", 32)]),
    "linear with a bias": Call(
        lambda x, bias, **how: ops.linear(x, _MATRIX, bias=bias, **how),
        [(TOKENS,), ((32,),)],
        [("b", "t", 32)],
    ),
    "linear with rounded activations": Call(
        lambda x, **how: ops.linear(x, _MATRIX, input_scale=1.0, scheme="w4a4", **how),
        [(TOKENS,)],
        [("b", "t", 32)],
    ),
    "mamba2_scan": Call(
        ops.mamba2_scan,
        [
            (("b", "t", 4, 16), F32),
            (("b", "t", 4), F32),
            ((4,), F32),
            (("b", "t", 2, 16), F32),
            (("b", "t", 2, 16), F32),
            ((4,), F32),
            (("b", 4, 16, 16), F32),
        ],
        [("b", "t", 4, 16), ("b", 4, 16, 16)],
        {1: 6},
        ("bfloat16",),
    ),
    "mamba2_step": Call(
        _mamba2_step,
        [
            (("b", 1, 196),),
            (("b", 1), I32),
            (("b", 3, 128),),
            (("b", 4, 16, 16), F32),
            ((128, 4), F32),
            ((4,), F32),
            ((4,), F32),
            ((4,), F32),
            ((64,), F32),
        ],
        [("b", 1, 64), ("b", 3, 128), ("b", 4, 16, 16)],
    ),
    "moe_mlp": Call(
        lambda x, ids, weights, **how: ops.moe_mlp(x, EXPERTS, ids, weights, **how),
        [(("t", 64),), (("t", 2), I32), (("t", 2), F32)],
        [("t", 64)],
    ),
    "moe_mlp with a scale for each token": Call(
        lambda x, ids, weights, **how: ops.moe_mlp(
            x, EXPERTS, ids, weights, scheme="w4a4_token_scale", **how
        ),
        [(("t", 64),), (("t", 2), I32), (("t", 2), F32)],
        [("t", 64)],
    ),
    "prepare_heads": Call(
        lambda *given, **how: ops.prepare_heads(
            *given[:4], q_weight=given[4], k_weight=given[5], rope=ROPE, **how
        ),
        [(("b", "t", 512),), (BT, I32), (_CACHE,), (_CACHE,), ((64,),), ((64,),)],
        [_HEADS, _CACHE, _CACHE],
        {1: 2, 2: 3},
    ),
    "prepare_heads with an FP8 cache": Call(
        lambda *given, **how: ops.prepare_heads(
            *given[:4], k_scale=given[4], v_scale=given[5], **how
        ),
        [(("b", "t", 512),), (BT, I32), (_CACHE, FP8), (_CACHE, FP8), ((2,), F32), ((2,), F32)],
        [_HEADS, _CACHE, _CACHE],
        {1: 2, 2: 3},
    ),
    "prepare_latents": Call(
        lambda down, positions, cache, q_weight, kv_weight, **how: ops.prepare_latents(
            down, positions, cache, q_weight=q_weight, kv_weight=kv_weight, rope=ROPE, **how
        ),
        [(("b", "t", 104),), (BT, I32), (("b", 1, 8, 40),), ((64,),), ((32,),)],
        [("b", "t", 64), ("b", 1, 8, 40)],
        {1: 2},
    ),
    "quantize_nvfp4": Call(_quantize, [(("t", 64),)], [("t", 32), ("t", 4), ()]),
    "quantize_nvfp4 with a scale": Call(
        _quantize, [(("t", 64),), ((), F32)], [("t", 32), ("t", 4), ()], {2: 1}
    ),
    "route": Call(
        lambda logits, **how: ops.route(_ROUTER, logits, **how),
        [(("t", 8), F32)],
        [("t", 2), ("t", 2)],
        dtypes=("float32",),
    ),
}
