"""Calls of every op, whose numbers of rows and of tokens a test chooses.

Arrays are written as their shapes with commas between them, such as "b t 64, i32 b t". Here "b" is
the number of rows, and "t" that of tokens in each row, or of all tokens if the op has no rows. A
dtype stands before the shape if it is not that of the activations.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.ops.numpy_weights import random_experts, random_tensor

from jax_nvfp4_moe import Router, ops
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
DTYPES = {"f32": np.float32, "i32": np.int32, "fp8": jnp.float8_e4m3fn}


def parse(arrays: str) -> list[tuple[Shape, Any]]:
    """Return the shape of each array, and its dtype or None for that of the activations."""
    made = []
    for words in (array.split() for array in arrays.split(",")):
        own = DTYPES.get(words[0])
        sizes = words if own is None else words[1:]
        made.append((tuple(int(size) if size.isdigit() else size for size in sizes), own))
    return made


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an op.

    Attributes:
      run: the op, a function of the operands and of options.
      takes: the operands.
      gives: the results.
      kept: index of a result -> index of the operand that it equals if there are no tokens.
      dtypes: dtypes of activations that the op takes.
      options: names of the arguments among `backend` and `target` that the op has.
    """

    run: Callable[..., Any]
    takes: str
    gives: str
    kept: Mapping[int, int] = dataclasses.field(default_factory=dict)
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    options: tuple[str, ...] = ("backend", "target")

    @functools.cached_property
    def operands(self) -> list[tuple[Shape, Any]]:
        """Return the shape and the dtype of each operand."""
        return parse(self.takes)

    @property
    def results(self) -> list[Shape]:
        """Return the shape of each result."""
        return [shape for shape, _ in parse(self.gives)]

    def make(self, dtype: str, sizes: Mapping[str, int]) -> list[jax.Array]:
        """Return the operands for some numbers of rows and tokens."""
        rng = np.random.default_rng(0)
        made = []
        for shape, own in self.operands:
            size = resolve(shape, sizes)
            if own == np.int32:
                values = np.broadcast_to(np.arange(size[-1] if size else 1), size) % 4
            else:
                values = np.abs(rng.normal(size=size))
            made.append(jnp.asarray(values).astype(own or dtype))
        return made

    def results_of(self, *operands, **options) -> list[jax.Array]:
        """Run the op, and return the arrays of its results."""
        return jax.tree.leaves(self.run(*operands, **options))

    @property
    def axes(self) -> set[str]:
        """Return which of "b" and "t" the call has."""
        return {name for shape, _ in self.operands for name in shape if isinstance(name, str)}


def resolve(shape: Shape, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return a shape with numbers in place of names."""
    return tuple(sizes[size] if isinstance(size, str) else size for size in shape)


def named(op: Callable[..., Any], names: str, **fixed: Any) -> Callable[..., Any]:
    """Return `op` as a function of its operands alone, of which the last ones have `names`."""

    def run(*given, **how):
        count = len(given) - len(names.split())
        own = dict(zip(names.split(), given[count:], strict=True))
        return op(*given[:count], **own, **fixed, **how)

    return run


def _full(*shape, value=1.0, dtype=np.float32):
    return np.full(shape, value, dtype)


EXPERTS = random_experts(1, 4, 64, 64)
_DENSE = DenseExperts(_full(4, 128, 64, value=1 / 64), _full(4, 64, 64, value=1 / 64))
_MATRIX, _MATRICES = random_tensor(0, 32, 64), random_tensor(0, 3, 32, 64)
_FP8 = FP8Tensor(_full(32, 64, dtype=DTYPES["fp8"]), _full(32))
_ROUTER = Router(2)


def _quantize(x, scale=None, **how):
    weight = ops.quantize_nvfp4(x, global_scale=scale, **how)
    return weight.packed, weight.block_scale, weight.global_scale


def _linears(x, **how):
    return ops.chain_calls(lambda x: ops.linear(x, _MATRIX, **how) * 2)(x)


def _experts(x, *routing, **how):
    return ops.moe_mlp(x, EXPERTS, *routing, **how)


_REFERENCE_ALONE, _TARGETS_ALONE = {"options": ()}, {"options": ("target",)}
_HEADS, _CACHES = "b t 4 64", "b 2 8 64, b 2 8 64"
_DELTA_WEIGHTS = "conv_weight A_log dt_bias norm"

CALLS = {
    "activate": Call(ops.activate, "b t 128", "b t 64"),
    "add_gated": Call(ops.add_gated, "b t 64, b t 1, b t 64", "b t 64"),
    "add_linear_gated": Call(ops.add_linear_gated, "b t 64, b t 64, 64, b t 64", "b t 64"),
    "add_rms_norm": Call(
        partial(ops.add_rms_norm, eps=1e-6), "b t 64, b t 64, 64", "b t 64, b t 64"
    ),
    "add_rms_norm without a sum": Call(
        lambda x, weight, **how: ops.add_rms_norm(x, None, weight, eps=1e-6, **how),
        "b t 64, 64",
        "b t 64, b t 64",
    ),
    "attention": Call(ops.attention, f"{_HEADS}, {_CACHES}, i32 b t", _HEADS),
    "attention to a window of many keys": Call(
        partial(ops.attention, window=3), f"{_HEADS}, b 2 600 64, b 2 600 64, i32 b t", _HEADS
    ),
    "attention to latents": Call(
        lambda q, k, positions, **how: ops.attention(q, k, None, positions, value_width=32, **how),
        f"{_HEADS}, b 1 8 64, i32 b t",
        "b t 4 32",
    ),
    "attention to keys in FP8": Call(
        named(ops.attention, "k_scale v_scale"),
        f"{_HEADS}, fp8 b 2 8 64, fp8 b 2 8 64, i32 b t, f32 2, f32 2",
        _HEADS,
    ),
    "block_attention": Call(
        partial(block_attention, choice=BlockChoice(2, 2, 1)),
        f"{_HEADS}, {_CACHES}, b t 2 16, b 1 8 16, i32 b t",
        _HEADS,
        **_REFERENCE_ALONE,
    ),
    "causal_convolution": Call(
        named(ops.causal_convolution, "weight", widths=(32, 32)),
        "b t 64, i32 b t, b 3 64, f32 64 4",
        "b t 32, b t 32, b 3 64",
        {2: 2},
    ),
    "causal_convolution of heads": Call(
        named(ops.causal_convolution, "weight", widths=(8, 16), heads=2, stride=32),
        "b t 64, i32 b t, b 3 48, f32 48 4",
        "b t 16, b t 32, b 3 48",
        {2: 2},
    ),
    "chain_calls": Call(_linears, "b t 64", "b t 32"),
    "choose_keys": Call(
        partial(choose_keys, count=4),
        "b t 2 16, f32 b t 2, b 8 16, i32 b t",
        "b t 4",
        **_REFERENCE_ALONE,
    ),
    "attend_to_chosen": Call(
        partial(attend_to_chosen, scale=1.0),
        f"{_HEADS}, {_CACHES}, i32 b t, i32 b t 4",
        _HEADS,
        **_REFERENCE_ALONE,
    ),
    "attend_to_compressed": Call(
        partial(attend_to_compressed, window=3, scale=1.0),
        f"{_HEADS}, b 5 64, i32 b t, b 6 64, i32 b t, i32 b t 2, f32 4",
        _HEADS,
        **_REFERENCE_ALONE,
    ),
    "dense": Call(dense, "b t 64, 32 64", "b t 32", **_TARGETS_ALONE),
    "dense_fp8": Call(
        lambda x, **how: dense_fp8(x, _FP8, dtype=x.dtype, **how),
        "b t 64",
        "b t 32",
        **_TARGETS_ALONE,
    ),
    "dense_moe": Call(
        lambda x, *routing: dense_moe(x, _DENSE, *routing),
        "t 64, i32 t 2, f32 t 2",
        "t 64",
        **_REFERENCE_ALONE,
    ),
    "expand_values": Call(expand_values, f"{_HEADS}, 4 32 64", "b t 4 32", **_TARGETS_ALONE),
    "absorb_queries": Call(
        partial(absorb_queries, rope=ROPE, interleaved=False),
        "b t 4 40, 4 32 64, i32 b t",
        "b t 4 72",
        **_TARGETS_ALONE,
    ),
    "gate_heads": Call(ops.gate_heads, f"{_HEADS}, b t 512", _HEADS),
    "gated_delta_rule": Call(
        ops.gated_delta_rule,
        "f32 b t 2 16, f32 b t 2 16, f32 b t 2 3 16, f32 b t 2 3, f32 b t 2 3, f32 b 2 3 16 16",
        "b t 2 3 16, b 2 3 16 16",
        {1: 5},
        ("bfloat16",),
    ),
    "gated_delta_rule with decays of channels": Call(
        partial(ops.gated_delta_rule, normalize=True),
        "f32 b t 2 16, f32 b t 2 16, f32 b t 2 1 16, f32 b t 2 1 16, f32 b t 2 1, f32 b 2 1 16 16",
        "b t 2 1 16, b 2 1 16 16",
        {1: 5},
        ("bfloat16",),
    ),
    "gated_delta_step": Call(
        named(ops.gated_delta_step, _DELTA_WEIGHTS),
        "b 1 268, i32 b 1, b 3 160, f32 b 2 3 16 16, f32 160 4, f32 6, f32 6, f32 16",
        "b 1 96, b 3 160, b 2 3 16 16",
    ),
    "grouped_gemm": Call(
        lambda x, sizes, **how: ops.grouped_gemm(x, _MATRICES, sizes, **how),
        "t 64, i32 3",
        "t 32",
    ),
    "kimi_delta_step": Call(
        named(ops.kimi_delta_step, _DELTA_WEIGHTS),
        "b 1 98, b 1 32, b 1 32, i32 b 1, b 3 96, f32 b 2 16 16, f32 96 4, f32 2, f32 32, f32 16",
        "b 1 32, b 3 96, b 2 16 16",
    ),
    "linear": Call(lambda x, **how: ops.linear(x, _MATRIX, **how), "b t 64", "b t 32"),
    "linear with a bias": Call(
        lambda x, bias, **how: ops.linear(x, _MATRIX, bias=bias, **how), "b t 64, 32", "b t 32"
    ),
    "linear with rounded activations": Call(
        lambda x, **how: ops.linear(x, _MATRIX, input_scale=1.0, scheme="w4a4", **how),
        "b t 64",
        "b t 32",
    ),
    "mamba2_scan": Call(
        ops.mamba2_scan,
        "f32 b t 4 16, f32 b t 4, f32 4, f32 b t 2 16, f32 b t 2 16, f32 4, f32 b 4 16 16",
        "b t 4 16, b 4 16 16",
        {1: 6},
        ("bfloat16",),
    ),
    "mamba2_step": Call(
        named(ops.mamba2_step, "conv_weight A_log dt_bias D norm"),
        "b 1 196, i32 b 1, b 3 128, f32 b 4 16 16, f32 128 4, f32 4, f32 4, f32 4, f32 64",
        "b 1 64, b 3 128, b 4 16 16",
    ),
    "moe_mlp": Call(_experts, "t 64, i32 t 2, f32 t 2", "t 64"),
    "moe_mlp with a scale for each token": Call(
        partial(_experts, scheme="w4a4_token_scale"), "t 64, i32 t 2, f32 t 2", "t 64"
    ),
    "prepare_heads": Call(
        named(ops.prepare_heads, "q_weight k_weight", rope=ROPE),
        f"b t 512, i32 b t, {_CACHES}, 64, 64",
        f"{_HEADS}, {_CACHES}",
        {1: 2, 2: 3},
    ),
    "prepare_heads with an FP8 cache": Call(
        named(ops.prepare_heads, "k_scale v_scale"),
        "b t 512, i32 b t, fp8 b 2 8 64, fp8 b 2 8 64, f32 2, f32 2",
        f"{_HEADS}, {_CACHES}",
        {1: 2, 2: 3},
    ),
    "prepare_latents": Call(
        named(ops.prepare_latents, "q_weight kv_weight", rope=ROPE),
        "b t 104, i32 b t, b 1 8 40, 64, 32",
        "b t 64, b 1 8 40",
        {1: 2},
    ),
    "quantize_nvfp4": Call(_quantize, "t 64", "t 32, t 4, f32"),
    "quantize_nvfp4 with a scale": Call(_quantize, "t 64, f32", "t 32, t 4, f32", {2: 1}),
    "route": Call(
        lambda logits, **how: ops.route(_ROUTER, logits, **how),
        "f32 t 8",
        "t 2, t 2",
        dtypes=("float32",),
    ),
}
