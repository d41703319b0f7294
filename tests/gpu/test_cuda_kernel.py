"""The CUDA kernels against float64 on their own operands, and what must hold to the bit.

Everything calls the FFI targets directly. Truth and yardstick are in `float64_layer`: the
yardstick is the same layer in plain XLA, products in the activations' dtype; for float32 a plain
float32 loop over k.
"""

import dataclasses
import json
import os
import subprocess
import sys

import cuda_calls
import float64_layer
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import rounding_case
from float64_layer import Options
from given import PROGRAMS

from jax_nvfp4_moe.backends import BACKENDS
from jax_nvfp4_moe.backends.cuda import (
    grouped_gemm_w4a4_workspace_bytes,
    grouped_gemm_w4a16_workspace_bytes,
    grouped_gemm_workspace_bytes,
    moe_w4a4_workspace_bytes,
    moe_w4a16_workspace_bytes,
    moe_workspace_bytes,
)
from jax_nvfp4_moe.backends.cuda_notes import few_slots_shared_bytes
from jax_nvfp4_moe.testing import assert_as_accurate_as

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
DTYPES = {"bf16": BF16, "f16": F16, "f32": F32}
MODES = ("none", "static", "token")
ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "swigluoai",
    "swigluoai_uninterleave",
    "relu2",
    "silu_no_mul",
    "gelu_no_mul",
    "gelu_tanh_no_mul",
)

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
modes = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(scope="module", autouse=True)
def _targets():
    if any(device.platform in ("gpu", "cuda") for device in jax.devices()):
        cuda_calls.register()


def uniform(t, k, e):
    return lambda rng: rng.integers(0, e, (t, k))


# tokens, top_k, experts, hidden, intermediate, expert_ids
CASES = {
    "one_token": (1, 2, 4, 64, 48, uniform(1, 2, 4)),
    "fills_no_tile": (5, 3, 7, 80, 48, uniform(5, 3, 7)),
    "fills_tiles": (128, 2, 2, 256, 128, uniform(128, 2, 2)),
    "several_tiles": (150, 2, 3, 144, 208, uniform(150, 2, 3)),
    "one_takes_all": (150, 1, 5, 64, 32, lambda rng: np.full((150, 1), 3)),
    "smallest": (3, 1, 1, 16, 16, lambda rng: np.zeros((3, 1))),
    "out_of_range": (40, 4, 6, 64, 32, lambda rng: rng.integers(-3, 9, (40, 4))),
    "extreme_ids": (
        3,
        2,
        4,
        32,
        32,
        lambda rng: np.array([[2**31 - 1, 1], [-(2**31), 4], [-1, 3]]),
    ),
    "none_routed": (9, 2, 4, 32, 32, lambda rng: np.full((9, 2), -1)),
    "same_expert_twice": (10, 4, 3, 48, 16, lambda rng: np.full((10, 4), 1)),
    "few_slots_of_one_expert": (8, 4, 3, 80, 48, lambda rng: np.full((8, 4), 1)),
    "few_slots_long_k": (3, 8, 16, 1104, 592, uniform(3, 8, 16)),
    # Of shared memory dynamic 40 and 36 KiB, in W4A16 and W4A4, and with the rest over 48.
    "few_slots_of_four_rows": (4, 2, 4, 5120, 16, uniform(4, 2, 4)),
    "few_slots_of_one_row": (1, 8, 16, 2048, 16, uniform(1, 8, 16)),
    "many_experts": (9, 32, 512, 32, 16, uniform(9, 32, 512)),
    "slots_in_one_warp_segment": (70, 8, 16, 32, 16, uniform(70, 8, 16)),
    "more_blocks_than_threads": (40, 1, 2, 16448, 16, uniform(40, 1, 2)),
}


# 32 slots whose rows take 90624 bytes in the second product.
WIDE_FEW_SLOTS = (16, 2, 4, 64, 1408, uniform(16, 2, 4))
# As CASES: layers whose output is zeros, because no token has an expert.
EMPTY = {
    "no_choices": (5, 0, 4, 64, 48, uniform(5, 0, 4)),
    "no_experts": (5, 2, 0, 64, 48, lambda rng: rng.integers(-1, 3, (5, 2))),
    "neither": (5, 0, 0, 64, 48, uniform(5, 0, 1)),
}


@dataclasses.dataclass
class Call:
    """One expert layer with its tokens, in numpy."""

    x: np.ndarray
    layer: float64_layer.Layer
    ids: np.ndarray
    weights: np.ndarray
    options: Options

    def run(self, suffix="w4a16_sm90"):
        call = jax.jit(lambda *operands: cuda_calls.moe(*operands, self.options, suffix))
        operands = (self.x, self.layer, self.ids, self.weights)
        return call(*jax.tree.map(jnp.asarray, operands))

    def truth(self):
        return float64_layer.moe(self.x, self.layer, self.ids, self.weights, self.options)

    def yardstick(self):
        product = float64_layer.sequential_float32 if self.x.dtype == F32 else xla(self.x.dtype)
        operands = (self.x, self.layer, self.ids, self.weights, self.options)
        return float64_layer.moe(*operands, matmul=product).astype(self.x.dtype)


def xla(dtype):
    """Return x @ w.T by plain XLA in `dtype`."""

    def product(x, w):
        return np.asarray(jnp.matmul(jnp.asarray(x.astype(dtype)), jnp.asarray(w.astype(dtype)).T))

    return product


def make(case, dtype, options, seed=0, bias=False):
    t, k, e, h, i, draw_ids = CASES[case] if isinstance(case, str) else case
    rng = np.random.default_rng(seed)
    layer = float64_layer.random_layer(rng, e, h, i, gated=options.gated, bias=bias)
    x = rng.normal(0, 1, (t, h)).astype(dtype)
    weights = rng.uniform(0.1, 1, (t, k)).astype(np.float32)
    return Call(x, layer, draw_ids(rng).astype(np.int32), weights, options)


def assert_accurate(call, suffix="w4a16_sm90"):
    actual = call.run(suffix)
    assert actual.dtype == call.x.dtype
    assert_as_accurate_as(actual, call.yardstick(), call.truth())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@dtypes
@modes
def test_layer_matches_float64(case, dtype, mode):
    assert_accurate(make(case, dtype, Options(activation_scale=mode)))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("limit", [np.inf, 0.5])
@dtypes
def test_activation_matches_float64(activation, limit, dtype):
    options = Options(activation=activation, alpha=1.25, beta=0.75, limit=limit)
    assert_accurate(make("fills_no_tile", dtype, options, bias=True))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("suffix", ["w4a16_sm80", "w4a16_sm90"])
def test_quantized_activation_matches_float64(suffix, activation):
    options = Options(activation=activation, limit=np.inf, activation_scale="static")
    assert_accurate(make("several_tiles", F16, options, bias=True), suffix)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("activation", rounding_case.ACTIVATIONS)
@pytest.mark.parametrize("suffix", cuda_calls.MOE_TARGETS)
def test_activations_are_rounded_as_the_format_says(suffix, activation, dtype):
    operands, expected = rounding_case.make(activation, dtype)
    actual = Call(*operands).run(suffix)
    np.testing.assert_array_equal(np.asarray(actual), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2"])
@dtypes
@modes
def test_weight_on_input_matches_float64(activation, dtype, mode):
    options = Options(activation=activation, activation_scale=mode, weight_on_input=True)
    assert_accurate(make("out_of_range", dtype, options, bias=True))


@pytest.mark.gpu
@pytest.mark.parametrize("suffix", cuda_calls.MOE_TARGETS)
@modes
def test_every_layer_target_matches_float64(suffix, mode):
    assert_accurate(make("several_tiles", BF16, Options(activation_scale=mode)), suffix)


@pytest.mark.gpu
@dtypes
def test_bound_catches_one_wrong_scale(dtype):
    call = make("fills_no_tile", dtype, Options())
    wrong = call.layer.gate_up_global_scale.copy()
    wrong[:, 1] = wrong[:, 0]  # the up half under the gate's scale
    actual = dataclasses.replace(call, layer=call.layer._replace(gate_up_global_scale=wrong)).run()
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_as_accurate_as(actual, call.yardstick(), call.truth())


WRONG_SCALE_CASES = ["fills_no_tile", "few_slots_long_k"]


def with_wrong_block_scales(call):
    """The call with the block scales of one expert moved on by one."""
    wrong = call.layer.down_block_scale.copy()
    expert = call.ids[0, 0]
    wrong[expert] = np.roll(wrong[expert], 1, axis=-1)
    return dataclasses.replace(call, layer=call.layer._replace(down_block_scale=wrong))


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("case", WRONG_SCALE_CASES)
def test_bound_catches_wrong_block_scales(case, dtype):
    call = make(case, dtype, Options())
    actual = with_wrong_block_scales(call).run()
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_as_accurate_as(actual, call.yardstick(), call.truth())


@pytest.mark.gpu
@modes
def test_no_tokens(mode):
    case = (0, 2, 4, 64, 48, uniform(0, 2, 4))
    assert make(case, BF16, Options(activation_scale=mode)).run().shape == (0, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("suffix", cuda_calls.MOE_TARGETS)
@dtypes
@modes
def test_layer_without_choices_or_experts_gives_zeros(suffix, case, dtype, mode):
    call = make(EMPTY[case], dtype, Options(activation_scale=mode), bias=True)
    assert_zeros(call.run(suffix))


@pytest.mark.gpu
@dtypes
@modes
def test_same_bits_twice_and_alone(dtype, mode):
    """A call has the same bits each time. Beside other tokens of the same kernel a token has those
    that it has alone; a handful of slots is another kernel, with another order of sums."""
    call = make("several_tiles", dtype, Options(activation_scale=mode), bias=True)
    first, second = map(np.asarray, (call.run(), call.run()))
    assert first.tobytes() == second.tobytes()

    def alone(rows):
        return dataclasses.replace(
            call, x=call.x[rows], ids=call.ids[rows], weights=call.weights[rows]
        )

    rows = slice(77, 97)
    assert np.asarray(alone(rows).run()).tobytes() == first[rows].tobytes()
    few = alone(slice(77, 80))
    if mode == "none" and dtype != np.float32:
        assert_accurate(few)
    else:
        assert np.asarray(few.run()).tobytes() == first[77:80].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@dtypes
@modes
def test_non_finite_token_stays_alone(activation, value, dtype, mode):
    call = make("several_tiles", dtype, Options(activation=activation, activation_scale=mode))
    clean = np.asarray(call.run(), np.float64)
    x = call.x.copy()
    x[70, 33] = value
    actual = np.asarray(dataclasses.replace(call, x=x).run(), np.float64)
    assert not np.isfinite(actual[70]).any()
    others = np.arange(len(x)) != 70
    np.testing.assert_array_equal(actual[others], clean[others])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("top_k", [2, 3])
@modes
def test_many_tokens_equal_few(mode, top_k):
    """65536 tokens go through in chunks; each token's output is that of a short call."""
    case = (65536, top_k, 8, 64, 32, uniform(65536, top_k, 8))
    call = make(case, BF16, Options(activation_scale=mode))
    actual = np.asarray(call.run())
    for first in (0, 10922, 16384 - 8, 65536 - 16):
        rows = slice(first, first + 16)
        few = dataclasses.replace(
            call, x=call.x[rows], ids=call.ids[rows], weights=call.weights[rows]
        )
        assert np.asarray(few.run()).tobytes() == actual[rows].tobytes()


def assert_graph_follows_the_routing(tmp_path, suffix, mode):
    """One compiled program inside a CUDA graph, called with changing routing."""
    environment = dict(
        os.environ,
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} "
        "--xla_gpu_enable_command_buffer=CUSTOM_CALL "
        f"--xla_gpu_graph_min_graph_size=1 --xla_dump_to={tmp_path}",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
    )
    process = subprocess.run(
        [sys.executable, PROGRAMS / "replay_cuda_graph.py", suffix, mode],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    calls = json.loads(process.stdout.splitlines()[-1])
    assert calls["different_outputs"] == calls["calls"]
    assert calls["wrong"] == 0
    assert cuda_calls.graphs_hold_custom_call(tmp_path)


@pytest.mark.gpu
def test_graph_replay_follows_the_routing(tmp_path):
    assert_graph_follows_the_routing(tmp_path, "w4a16_sm90", "token")


# Grouped products: m, n, k, group sizes.
PRODUCTS = {
    "one_row": (1, 32, 64, [1]),
    "linear": (130, 200, 96, [130]),
    "empty_groups": (48, 128, 128, [0, 32, 0, 0, 16, 0]),
    "padding_rows": (100, 48, 80, [7, 0, 60]),
    "negative_size": (40, 48, 80, [-5, 20, -(2**31), 20]),
    "sizes_over_m": (40, 48, 80, [30, 2**31 - 1, 2**31 - 1]),
    "all_padding": (70, 24, 16, [0, 0]),
    "full_tiles": (192, 256, 64, [64, 128]),
}
NO_EXPERTS = (70, 24, 16, [])
# More rows than an engine takes at once: a group over the end of the first chunk, an empty one
# beside it, and rows past all groups.
CHUNKED = (2**18 + 70, 24, 16, [2**18 - 40, 0, 60, 29])


def assert_zeros(y):
    assert not np.asarray(y, np.float32).any()


def make_product(case, dtype, parts=1, bias=False):
    m, n, k, sizes = PRODUCTS[case] if isinstance(case, str) else case
    rng, e = np.random.default_rng(1), len(sizes)
    packed, block_scale = float64_layer.random_weight(rng, e, n, k)
    return (
        rng.normal(0, 1, (m, k)).astype(dtype),
        packed,
        block_scale,
        rng.uniform(0.5, 1, (e, parts)).astype(np.float32),
        rng.uniform(0.5, 1, e).astype(np.float32) / np.float32(400),
        rng.normal(0, 1, (e, n)).astype(np.float32) if bias else np.zeros((0, 0), np.float32),
        np.array(sizes, np.int32),
    )


def run_product(operands, mode, suffix="w4a16_sm90"):
    call = jax.jit(lambda *operands: cuda_calls.grouped_gemm(*operands, mode, suffix))
    return call(*map(jnp.asarray, operands))


def assert_product_accurate(operands, mode, suffix="w4a16_sm90"):
    x = operands[0]
    product = float64_layer.sequential_float32 if x.dtype == F32 else xla(x.dtype)
    yardstick = float64_layer.grouped_gemm(*operands, mode, matmul=product).astype(x.dtype)
    truth = float64_layer.grouped_gemm(*operands, mode)
    assert_as_accurate_as(run_product(operands, mode, suffix), yardstick, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("case", PRODUCTS)
@dtypes
@modes
def test_product_matches_float64(case, dtype, mode):
    assert_product_accurate(make_product(case, dtype), mode)


@pytest.mark.gpu
@pytest.mark.parametrize("suffix", cuda_calls.MOE_TARGETS)
@pytest.mark.parametrize("parts", [1, 2])
@dtypes
def test_every_product_target_matches_float64(suffix, parts, dtype):
    assert_product_accurate(make_product("padding_rows", dtype, parts, bias=True), "none", suffix)


@pytest.mark.gpu
@pytest.mark.parametrize("suffix", cuda_calls.MOE_TARGETS)
@pytest.mark.parametrize("dtype", [BF16, F16])
@modes
def test_product_of_several_chunks_matches_float64(suffix, dtype, mode):
    operands = make_product(CHUNKED, dtype, parts=2, bias=True)
    assert_product_accurate(operands, mode, suffix)
    past = sum(CHUNKED[3])
    assert_zeros(run_product(operands, mode, suffix)[past:])


@pytest.mark.parametrize("k", [64, 2**18])
def test_scratch_memory_of_products_does_not_grow_past_a_chunk(k):
    """Products of 16 bits took the plain kernel from 2**18 rows on, and its memory with it."""
    for formula in (grouped_gemm_w4a16_workspace_bytes, grouped_gemm_w4a4_workspace_bytes):
        sizes = [formula(rows, 4, 64, k, dtype=np.dtype(F16)) for rows in (2**18, 2**22)]
        assert sizes[0] == sizes[1]


@pytest.mark.gpu
@dtypes
def test_rows_past_the_groups_are_zero(dtype):
    operands = make_product("padding_rows", dtype, bias=True)
    assert not np.asarray(run_product(operands, "none"), np.float32)[67:].any()


@pytest.mark.gpu
def test_no_rows():
    operands = make_product("one_row", BF16)
    operands = (operands[0][:0], *operands[1:])
    assert run_product(operands, "none").shape == (0, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("suffix", cuda_calls.MOE_TARGETS)
@dtypes
@modes
def test_product_without_experts_gives_zeros(suffix, dtype, mode):
    assert_zeros(run_product(make_product(NO_EXPERTS, dtype), mode, suffix))


# What a target says of wrong operands.

OPERANDS = (
    "x",
    *float64_layer.Layer._fields,
    "expert_ids",
    "expert_weights",
)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_wrong_operand_is_named(name, what):
    call = make("fills_no_tile", BF16, Options(activation_scale="static"), bias=True)
    layer = jax.tree.map(np.asarray, cuda_calls.prepare(call.layer, gated=True))
    operands = [call.x, *layer, call.ids, call.weights]
    index = OPERANDS.index(name)
    if what == "shape":
        operands[index] = np.repeat(operands[index], 2, axis=-1)
        # The hidden size is read from x, the number of experts from gate_up_packed.
        named = {"x": "gate_up_packed", "expert_ids": "expert_weights|workspace"}.get(name, name)
    else:
        operands[index] = operands[index].view(np.int8)
        named = name
    arrays = [jnp.asarray(operand) for operand in operands]
    prepared, i = float64_layer.Layer(*arrays[1:11]), CASES["fills_no_tile"][4]
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match=rf"({named}).*expected .*got"
    ):
        cuda_calls.moe_prepared(
            arrays[0], prepared, *arrays[11:], call.options, i
        ).block_until_ready()


@pytest.mark.cuda_build
def test_shared_memory_of_the_records_is_that_of_the_kernels():
    from jax_nvfp4_moe import _nvfp4_cuda

    of_records = {b.name: b.can.shared_bytes for b in BACKENDS if b.can.shared_bytes}
    assert of_records == _nvfp4_cuda.max_shared_bytes()


@pytest.mark.cuda_build
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("slots", [1, 6, 32])
@pytest.mark.parametrize("k", [16, 1408, 4096])
def test_shared_memory_of_few_slots_is_that_of_the_kernel(k, slots, rounds):
    from jax_nvfp4_moe import _nvfp4_cuda

    for slots_per_row in (1, 4):
        ours = few_slots_shared_bytes(slots, slots_per_row, k, rounds=rounds)
        assert ours == _nvfp4_cuda.few_slots_shared_bytes(slots, slots_per_row, k, rounds)


@pytest.mark.cuda_build
@pytest.mark.parametrize("shape", [(0, 2, 4, 64, 48), (1, 8, 128, 2048, 768), (9, 32, 512, 32, 16)])
@pytest.mark.parametrize("tokens", [0, 1, 1023, 1024, 1025, 65536, 2**18 + 1])
def test_workspace_formula_is_that_of_the_kernels(shape, tokens):
    from jax_nvfp4_moe import _nvfp4_cuda

    _, top_k, e, h, i = shape
    for dtype in (np.dtype(np.float16), np.dtype(np.float32)):
        ours = moe_workspace_bytes(tokens, top_k, e, h, i, gated=True, dtype=dtype)
        name = "moe_f32_workspace_bytes" if dtype == np.float32 else "moe_workspace_bytes"
        assert ours == getattr(_nvfp4_cuda, name)(tokens, top_k, e, h, i)
        hopper = moe_w4a16_workspace_bytes(tokens, top_k, e, h, i, gated=True, dtype=dtype)
        assert hopper == max(ours, _nvfp4_cuda.moe_w4a16_workspace_bytes(tokens, top_k, e, h, i))
        ours = grouped_gemm_workspace_bytes(tokens, e, i, h, dtype=dtype)
        assert ours == _nvfp4_cuda.grouped_gemm_workspace_bytes(tokens, e, i, h)
        hopper = grouped_gemm_w4a16_workspace_bytes(tokens, e, i, h, dtype=dtype)
        own = _nvfp4_cuda.grouped_gemm_w4a16_workspace_bytes(tokens, e, i, h)
        assert hopper == (ours if dtype == np.float32 else own)
        fp4 = moe_w4a4_workspace_bytes(tokens, top_k, e, h, i, gated=True, dtype=dtype)
        assert fp4 == _nvfp4_cuda.moe_w4a4_workspace_bytes(tokens, top_k, e, h, i)
        fp4 = grouped_gemm_w4a4_workspace_bytes(tokens, e, i, h, dtype=dtype)
        assert fp4 == _nvfp4_cuda.grouped_gemm_w4a4_workspace_bytes(tokens, e, i, h)
