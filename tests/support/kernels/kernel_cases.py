"""Expert layers and grouped GEMMs that every kernel must compute, with truth and yardstick.

`float64_layer` computes both. The yardstick is the same computation in plain XLA, with GEMMs in the
dtype of the activations. For float32, it is a plain float32 loop over k. The sizes cross every
boundary inside the kernels: less than a tile, whole tiles, partial tiles, one row, and more rows
than a kernel takes at once.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from support.kernels import float64_layer
from support.kernels.float64_layer import Layer, Options

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
DTYPES = {"bf16": BF16, "f16": F16, "f32": F32}
MODES = ("none", "static", "token")  # values of the attribute activation_scale
ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "swigluoai",
    "swigluoai_uninterleave",
    "swiglustep",
    "relu2",
    "silu_no_mul",
    "gelu_no_mul",
    "gelu_tanh_no_mul",
)


def uniform(t, k, e):
    return lambda rng: rng.integers(0, e, (t, k))


def constant(t, k, expert):
    return lambda rng: np.full((t, k), expert)


def _one_of_many(rng):
    """One expert gets a row of each token; some of the others get none or do not exist."""
    return np.stack([np.full(40, 3), rng.integers(-2, 34, 40)], axis=1)


def _extreme_ids(rng):
    return np.array([[2**31 - 1, 1], [-(2**31), 4], [-1, 3]])


# tokens, top_k, experts, hidden, intermediate, expert_ids
LAYERS = {
    "no_tokens": (0, 2, 4, 64, 48, uniform(0, 2, 4)),
    "one_token": (1, 2, 4, 64, 48, uniform(1, 2, 4)),
    "smallest": (3, 1, 1, 16, 16, constant(3, 1, 0)),
    "fills_no_tile": (5, 3, 7, 80, 48, uniform(5, 3, 7)),
    "two_rows_each": (8, 2, 8, 96, 32, uniform(8, 2, 8)),
    "sixteen_rows": (16, 1, 1, 64, 64, constant(16, 1, 0)),
    "thirty_one_rows": (31, 1, 1, 64, 64, constant(31, 1, 0)),
    "thirty_three_rows": (33, 1, 1, 544, 64, constant(33, 1, 0)),
    "several_tiles": (150, 2, 3, 144, 208, uniform(150, 2, 3)),
    "one_takes_all": (300, 1, 5, 64, 32, constant(300, 1, 3)),
    "long_rows": (3, 2, 3, 1040, 1856, uniform(3, 2, 3)),
    "out_of_range": (40, 4, 6, 64, 32, lambda rng: rng.integers(-3, 9, (40, 4))),
    "extreme_ids": (3, 2, 4, 32, 32, _extreme_ids),
    "none_routed": (9, 2, 4, 32, 32, constant(9, 2, -1)),
    "same_expert_twice": (10, 4, 3, 48, 16, constant(10, 4, 1)),
    "many_experts": (9, 32, 512, 32, 16, uniform(9, 32, 512)),
}
# Sizes at boundaries that only the CUDA kernels have.
CUDA_LAYERS = {
    "fills_tiles": (128, 2, 2, 256, 128, uniform(128, 2, 2)),
    "odd_sizes": (37, 3, 5, 320, 112, uniform(37, 3, 5)),
    "two_tiles_of_scales": (300, 2, 3, 144, 48, uniform(300, 2, 3)),
    "few_slots_of_one_expert": (8, 4, 3, 80, 48, constant(8, 4, 1)),
    "few_slots_long_k": (3, 8, 16, 1104, 592, uniform(3, 8, 16)),
    # Rows of x take 40 KiB of shared memory in GEMM 1 besides weights, more than 48 KiB together.
    "few_slots_of_four_rows": (4, 2, 4, 5120, 16, uniform(4, 2, 4)),
    "few_slots_of_one_row": (1, 8, 16, 2048, 16, uniform(1, 8, 16)),
    "few_slots_of_one_choice": (4, 1, 3, 112, 80, uniform(4, 1, 3)),
    "few_slots_of_32_choices": (1, 32, 40, 80, 112, uniform(1, 32, 40)),
    "few_slots_out_of_range": (4, 8, 6, 208, 336, lambda rng: rng.integers(-3, 9, (4, 8))),
    "few_slots_none_routed": (2, 3, 4, 48, 80, constant(2, 3, 4)),
    # Each device has fewer multiprocessors than the output has slabs of 16 columns.
    "few_slots_of_many_columns": (3, 2, 3, 4240, 48, uniform(3, 2, 3)),
    "slots_in_one_warp_segment": (70, 8, 16, 32, 16, uniform(70, 8, 16)),
    "more_blocks_than_threads": (40, 1, 2, 16448, 16, uniform(40, 1, 2)),
    # Steps of 256 of k, and the rest of k is no multiple of 64. The last tile of weights is alone.
    "few_rows_of_many_experts": (40, 2, 32, 592, 336, _one_of_many),
    "few_rows_of_whole_steps": (50, 3, 34, 512, 256, uniform(50, 3, 34)),
    # More slots than the kernels for few slots take, and less than one for twelve experts.
    "most_experts_without_rows": (12, 3, 448, 272, 16, uniform(12, 3, 448)),
}
# Layers whose output is zeros, because no token has an expert.
EMPTY = {
    "no_choices": (5, 0, 4, 64, 48, uniform(5, 0, 4)),
    "no_experts": (5, 2, 0, 64, 48, lambda rng: rng.integers(-1, 3, (5, 2))),
    "neither": (5, 0, 0, 64, 48, uniform(5, 0, 1)),
}
# Grouped products of one group that has all rows, without group sizes.
ONE_GROUP = {
    "one_group": (130, 200, 96, None),
    "one_row_of_one_group": (1, 48, 1040, None),
    "many_rows_of_one_group": (270, 40, 592, None),
    "no_rows_of_one_group": (0, 40, 48, None),
}
# Grouped products: m, n, k, group sizes.
PRODUCTS = {
    "one_row": (1, 32, 64, [1]),
    "no_rows": (0, 64, 32, [3, 4]),
    "linear": (130, 200, 96, [130]),
    "odd_width": (43, 77, 48, [3, 40]),
    "linear_of_many_rows": (270, 40, 48, [270]),
    "groups": (37, 112, 80, [5, 0, 11, 21]),
    "one_row_each": (4, 48, 64, [1, 1, 1, 1]),
    "empty_groups": (48, 128, 128, [0, 32, 0, 0, 16, 0]),
    "padding_rows": (100, 48, 80, [7, 0, 60]),
    "negative_size": (40, 48, 80, [-5, 20, -(2**31), 20]),
    "sum_over_m": (20, 64, 32, [9, 40, 3]),
    "sizes_over_m": (40, 48, 80, [30, 2**31 - 1, 2**31 - 1]),
    "all_padding": (70, 24, 16, [0, 0]),
    "full_tiles": (192, 256, 64, [64, 128]),
    **ONE_GROUP,
}
NO_EXPERTS = (70, 24, 16, [])
# Tests of several kernels and dtypes share what they make from equal arguments: operands, float64
# results, and the outputs that a test module keeps.
_shared = functools.lru_cache(maxsize=256)
# More rows than a CUDA kernel takes at once: a group crosses the end of the first chunk, an empty
# group comes before it, and rows follow after all groups.
CHUNKED = (2**18 + 70, 24, 16, [2**18 - 40, 0, 60, 29])


@jax.jit
def _matmul(x, w):
    return jnp.matmul(x, w.T)


def xla(dtype):
    """Return a function that computes x @ w.T by plain XLA in `dtype`.

    Small sizes are padded with zeros, so that products of different sizes share a program.
    """

    def product(x, w):
        (m, k), n = x.shape, len(w)
        rows, columns, inner = _up(m, 8), _up(n, 4), _up(k, 4)
        x = np.pad(x.astype(dtype), ((0, rows - m), (0, inner - k)))
        w = np.pad(w.astype(dtype), ((0, columns - n), (0, inner - k)))
        return np.asarray(_matmul(x, w))[:m, :n]

    return product


def _up(size, factor):
    """Round up to a power of `factor`, or to a multiple of 256 if that is less."""
    power = 1
    while power < size:
        power *= factor
    return min(power, -(-size // 256) * 256)


# How far the yardstick may be from the truth where activations are rounded to FP4. The first
# product is not exact in either, so that some of its values take the next code in one of them.
NEXT_CODES = 2**-3


def tolerated(mode):
    """Return what `assert_as_accurate_as` tolerates of the yardstick."""
    return 2**-6 if mode == "none" else NEXT_CODES


def _yardstick_product(dtype):
    return float64_layer.sequential_float32 if dtype == F32 else xla(dtype)


def _frozen(arrays):
    """Make the arrays read-only, because tests share them, and return them."""
    for array in arrays:
        array.flags.writeable = False
    return arrays


@dataclasses.dataclass(frozen=True, eq=False)
class LayerCall:
    """One expert layer with its tokens, in numpy."""

    x: np.ndarray
    layer: Layer
    ids: np.ndarray
    weights: np.ndarray
    options: Options

    @property
    def operands(self):
        return self.x, self.layer, self.ids, self.weights, self.options

    @functools.cached_property
    def truth(self):
        return float64_layer.moe(*self.operands)

    @functools.cached_property
    def yardstick(self):
        product = _yardstick_product(self.x.dtype)
        return float64_layer.moe(*self.operands, matmul=product).astype(self.x.dtype)

    @property
    def mode(self):
        return self.options.activation_scale

    def of_tokens(self, rows):
        """Return the call for some of its tokens."""
        own = {"x": self.x[rows], "ids": self.ids[rows], "weights": self.weights[rows]}
        return dataclasses.replace(self, **own)

    def with_layer(self, **changes):
        """Return the call with some operands of its layer replaced."""
        return dataclasses.replace(self, layer=self.layer._replace(**changes))

    def with_value(self, row, column, value):
        """Return the call with one element of its tokens replaced."""
        return _with_value(self, row, column, value)


@dataclasses.dataclass(frozen=True, eq=False)
class ProductCall:
    """One grouped GEMM in numpy, with the operands and mode of `float64_layer.grouped_gemm`."""

    operands: tuple
    mode: str

    @property
    def x(self):
        return self.operands[0]

    @functools.cached_property
    def truth(self):
        return float64_layer.grouped_gemm(*self.operands, self.mode)

    @functools.cached_property
    def yardstick(self):
        product = _yardstick_product(self.x.dtype)
        found = float64_layer.grouped_gemm(*self.operands, self.mode, matmul=product)
        return found.astype(self.x.dtype)

    @property
    def rows(self):
        """Return how many rows belong to a group. Output rows after them are zeros."""
        sizes = np.clip(self.operands[-1].astype(np.int64), 0, None)
        return int(min(sizes.sum(), len(self.x))) if sizes.size else len(self.x)

    def with_sizes(self):
        """Return the call of one group with the number of its rows."""
        sizes = np.array([len(self.x)], np.int32)
        return dataclasses.replace(self, operands=(*self.operands[:-1], sizes))


@_shared
def _with_value(call, row, column, value):
    x = call.x.copy()
    x[row, column] = value
    return dataclasses.replace(call, x=x)


@_shared
def _make_operands(case, gated, seed, bias):
    """Return x in float64, layer, ids and weights."""
    t, k, e, h, i, draw_ids = case
    rng = np.random.default_rng(seed)
    layer = float64_layer.random_layer(rng, e, h, i, gated=gated, bias=bias)
    x = rng.normal(0, 1, (t, h))
    weights = rng.uniform(0.1, 1, (t, k)).astype(np.float32)
    ids = draw_ids(rng).astype(np.int32)
    _frozen((x, ids, weights, *layer))
    return x, layer, ids, weights


@_shared
def _make_tokens(case, dtype, gated, seed, bias):
    return _frozen((_make_operands(case, gated, seed, bias)[0].astype(dtype),))[0]


@_shared
def _make_layer(case, dtype, options, seed, bias):
    which = options.gated, seed, bias
    return LayerCall(_make_tokens(case, dtype, *which), *_make_operands(case, *which)[1:], options)


def make_layer(case, dtype, options, *, seed=0, bias=False) -> LayerCall:
    """Return a layer for a name in the tables or for any sizes. Equal arguments share an object."""
    return _make_layer(
        {**LAYERS, **CUDA_LAYERS, **EMPTY}.get(case, case), dtype, options, seed, bias
    )


@_shared
def _make_named_operands(case, dtype, parts, bias):
    return _make_product_operands(PRODUCTS[case], dtype, parts, bias)


@_shared
def _make_named_product(case, dtype, mode, parts, bias):
    return ProductCall(_make_named_operands(case, dtype, parts, bias), mode)


def make_product(case, dtype, mode="none", *, parts=1, bias=False) -> ProductCall:
    """Return a grouped GEMM for a name in PRODUCTS or for any such sizes.

    Equal arguments share an object if `case` is a name. `parts` is the number of global scales of a
    matrix; None for one for each row.
    """
    if isinstance(case, str):
        return _make_named_product(case, dtype, mode, parts, bias)
    return ProductCall(_make_product_operands(case, dtype, parts, bias), mode)


def _make_product_operands(sizes_of_case, dtype, parts, bias):
    m, n, k, sizes = sizes_of_case
    rng, e = np.random.default_rng(1), 1 if sizes is None else len(sizes)
    packed, block_scale = float64_layer.random_weight(rng, e, n, k)
    operands = (
        rng.normal(0, 1, (m, k)).astype(dtype),
        packed,
        block_scale,
        rng.uniform(0.5, 1, (e, n if parts is None else parts)).astype(np.float32),
        rng.uniform(0.5, 1, e).astype(np.float32) / np.float32(400),
        rng.normal(0, 1, (e, n)).astype(np.float32) if bias else np.zeros((0, 0), np.float32),
        np.array([] if sizes is None else sizes, np.int32),
    )
    return _frozen(operands)


@_shared
def with_input_scale(call: LayerCall, value: float) -> LayerCall:
    """Return the call with this input scale of the first product for all experts."""
    scale = np.full_like(call.layer.gate_up_input_scale, value)
    return call.with_layer(gate_up_input_scale=scale)


# Faults that a kernel could have, as changes of the weights. Each one must exceed the bound.


@_shared
def _up_under_the_scale_of_gate(call):
    wrong = call.layer.gate_up_global_scale.copy()
    wrong[:, 1] = wrong[:, 0]
    return call.with_layer(gate_up_global_scale=wrong)


@_shared
def _one_scale_of_an_expert(call):
    wrong = call.layer.down_global_scale.copy()
    wrong[call.ids[0, 0]] *= 1.1
    return call.with_layer(down_global_scale=wrong)


@_shared
def _block_scales_of_an_expert(call):
    wrong, expert = call.layer.down_block_scale.copy(), call.ids[0, 0]
    wrong[expert] = np.roll(wrong[expert], 1, axis=-1)
    return call.with_layer(down_block_scale=wrong)


@_shared
def _one_byte_of_block_scales(call):
    wrong = call.layer.down_block_scale.copy()
    wrong.view(np.uint8)[call.ids[0, 0], 0, 0] ^= 0x40
    return call.with_layer(down_block_scale=wrong)


# Fault -> the layer in which it shows, and the change.
FAULTS = {
    "up_under_the_scale_of_gate": ("fills_no_tile", _up_under_the_scale_of_gate),
    "block_scales_of_an_expert": ("fills_no_tile", _block_scales_of_an_expert),
    "one_byte_of_block_scales": ("fills_no_tile", _one_byte_of_block_scales),
}
# The rows of "few_slots_long_k", with fewer experts.
_LONG_ROWS = (3, 2, 4, 1104, 592, uniform(3, 2, 4))
# If activations are rounded to FP4, the yardstick's own error hides these faults.
FAULTS_OF_W4A16 = {
    "one_scale_of_an_expert": ("fills_no_tile", _one_scale_of_an_expert),
    "block_scales_over_long_rows": (_LONG_ROWS, _block_scales_of_an_expert),
}


@_shared
def with_wrong_row_of_scales(call: ProductCall) -> ProductCall:
    """Return the call with the block scales of one row of one group shifted by one block."""
    wrong = call.operands[2].copy()
    wrong[2, 17] = np.roll(wrong[2, 17], 1)
    return dataclasses.replace(call, operands=(*call.operands[:2], wrong, *call.operands[3:]))


@_shared
def with_global_scales_of_other_rows(call: ProductCall) -> ProductCall:
    """Return the call with the global scales of the rows shifted by one row."""
    wrong = np.roll(call.operands[3], 1, axis=1)
    return dataclasses.replace(call, operands=(*call.operands[:3], wrong, *call.operands[4:]))
