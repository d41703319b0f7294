"""The CPU kernels against float64 on their own operands, and what must hold to the bit.

Everything calls the FFI targets directly, once for every instruction set that this CPU has. Truth
and yardstick are in `float64_layer`: the yardstick is the same layer in plain XLA, products in the
activations' dtype; for float32 a plain float32 loop over k.
"""

import concurrent.futures
import dataclasses
import functools
import subprocess

import cpu_calls
import float64_layer
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from float64_layer import E4M3, Options
from given import PROGRAMS

from jax_nvfp4_moe.backends.cpu import grouped_gemm_workspace_bytes, moe_workspace_bytes
from jax_nvfp4_moe.testing import assert_as_accurate_as

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
DTYPES = {"bf16": BF16, "f16": F16, "f32": F32}
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
ISAS = cpu_calls.present_isas()
CPU = jax.devices("cpu")[0]

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
modes = pytest.mark.parametrize("mode", ["none", "static", "token"])
isas = pytest.mark.parametrize("isa", cpu_calls.isa_levels())


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu():
    """A machine with a GPU tests these kernels too."""
    with jax.default_device(CPU):
        yield


def uniform(t, k, e):
    return lambda rng: rng.integers(0, e, (t, k))


def constant(t, k, expert):
    return lambda rng: np.full((t, k), expert)


# tokens, top_k, experts, hidden, intermediate, expert_ids
CASES = {
    "no_tokens": (0, 2, 4, 64, 48, uniform(0, 2, 4)),
    "one_token": (1, 2, 4, 64, 48, uniform(1, 2, 4)),
    "smallest": (3, 1, 1, 16, 16, constant(3, 1, 0)),
    "fills_no_tile": (5, 3, 7, 80, 48, uniform(5, 3, 7)),
    "two_rows_each": (8, 2, 8, 96, 32, uniform(8, 2, 8)),
    "one_tile_of_rows": (16, 1, 1, 64, 64, constant(16, 1, 0)),
    "two_tiles_of_rows": (31, 1, 1, 64, 64, constant(31, 1, 0)),
    "three_tiles_of_rows": (33, 1, 1, 544, 64, constant(33, 1, 0)),
    "one_takes_all": (300, 1, 5, 64, 32, constant(300, 1, 3)),
    "long_rows": (3, 2, 3, 1040, 1856, uniform(3, 2, 3)),
    "out_of_range": (40, 4, 6, 64, 32, lambda rng: rng.integers(-3, 9, (40, 4))),
    "extreme_ids": (
        3,
        2,
        4,
        32,
        32,
        lambda rng: np.array([[2**31 - 1, 1], [-(2**31), 4], [-1, 3]]),
    ),
    "none_routed": (9, 2, 4, 32, 32, constant(9, 2, -1)),
    "same_expert_twice": (10, 4, 3, 48, 16, constant(10, 4, 1)),
    "many_experts": (9, 32, 512, 32, 16, uniform(9, 32, 512)),
}


@dataclasses.dataclass
class Call:
    """One expert layer with its tokens, in numpy."""

    x: np.ndarray
    layer: float64_layer.Layer
    ids: np.ndarray
    weights: np.ndarray
    options: Options

    @functools.cached_property
    def prepared(self):
        return cpu_calls.prepare(self.layer)

    def run(self, isa="auto", workspace=None):
        operands = jax.device_put((self.x, self.prepared, self.ids, self.weights), CPU)
        return cpu_calls.moe(*operands, self.options, isa=isa, workspace=workspace)

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


def assert_accurate(call, names=ISAS, workspace=None):
    yardstick, truth = call.yardstick(), call.truth()
    for isa in names:
        actual = call.run(isa, workspace)
        assert actual.dtype == call.x.dtype
        assert_as_accurate_as(actual, yardstick, truth)


def bits(array):
    return np.asarray(array).tobytes()


@pytest.mark.parametrize("case", CASES)
@dtypes
def test_layer_matches_float64(case, dtype):
    assert_accurate(make(case, dtype, Options()))


@pytest.mark.parametrize("case", ["fills_no_tile", "three_tiles_of_rows", "out_of_range"])
@pytest.mark.parametrize("mode", ["static", "token"])
@dtypes
def test_quantized_activations_match_float64(case, dtype, mode):
    assert_accurate(make(case, dtype, Options(activation_scale=mode)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("limit", [np.inf, 0.5])
@dtypes
def test_activation_matches_float64(activation, limit, dtype):
    options = Options(activation=activation, alpha=1.25, beta=0.75, limit=limit)
    assert_accurate(make("fills_no_tile", dtype, options, bias=True))


@pytest.mark.parametrize(
    ("activation", "mode"), [("silu", "none"), ("swigluoai", "static"), ("relu2", "token")]
)
@dtypes
def test_weight_on_input_matches_float64(activation, dtype, mode):
    options = Options(activation=activation, activation_scale=mode, weight_on_input=True)
    assert_accurate(make("fills_no_tile", dtype, options))


@dtypes
def test_input_scale_shared_by_all_experts(dtype):
    call = make("fills_no_tile", dtype, Options(activation_scale="static"))
    call.layer.gate_up_input_scale[:] = np.float32(0.0025)
    assert_accurate(call)


@modes
def test_small_workspace_takes_several_rounds(mode):
    call = make("out_of_range", BF16, Options(activation_scale=mode))
    one_token = moe_workspace_bytes(1, 4, 6, 64, 32, gated=True, dtype=BF16)
    assert_accurate(call, workspace=3 * one_token)


@isas
def test_tiny_workspace_is_refused(isa):
    call = make("out_of_range", BF16, Options())
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"workspace \[bytes\]: expected at least"):
        call.run(isa, workspace=100)


def test_large_sums_do_not_depend_on_the_form_of_rows():
    """Columns of 14336 values, more than one panel of every kind, for few and for many rows."""
    for rows in (1, 2, 40):
        assert_accurate(make((rows, 1, 1, 32, 14336, constant(rows, 1, 0)), BF16, Options()))


@isas
def test_negative_control_a_wrong_scale_byte_is_noticed(isa):
    call = make("fills_no_tile", BF16, Options())
    yardstick, truth = call.yardstick(), call.truth()
    used = call.ids[0, 0]
    call.layer.down_block_scale.view(np.uint8)[used, 0, 0] ^= 0x40
    with pytest.raises(AssertionError, match="yardstick"):
        assert_as_accurate_as(call.run(isa), yardstick, truth)


@isas
@pytest.mark.parametrize(("dtype", "mode"), [(BF16, "none"), (F32, "none"), (F16, "token")])
def test_same_bits_every_time_and_from_many_threads(isa, dtype, mode):
    call = make((64, 4, 8, 144, 80, uniform(64, 4, 8)), dtype, Options(activation_scale=mode))
    first = bits(call.run(isa))
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda _: bits(call.run(isa)), range(24)))
    assert set(results) == {first}


@isas
@dtypes
@modes
def test_special_values_stay_in_their_row(isa, dtype, mode):
    call = make("two_tiles_of_rows", dtype, Options(activation_scale=mode))
    clean = np.asarray(call.run(isa))
    others = np.arange(len(clean)) != 17
    for value in (np.nan, np.inf, -np.inf):
        call.x[17, 5] = value
        spoiled = np.asarray(call.run(isa))
        assert not np.isfinite(spoiled[17].astype(np.float32)).any()
        assert bits(spoiled[others]) == bits(clean[others])


@isas
@modes
def test_zero_tokens_give_zeros(isa, mode):
    call = make("fills_no_tile", BF16, Options(activation_scale=mode))
    call.x[:] = 0
    assert not np.asarray(call.run(isa), np.float32).any()


@isas
@dtypes
def test_subnormal_half_and_tiny_activations_count(isa, dtype):
    """What XLA's flush-to-zero mode would drop."""
    call = make("two_rows_each", dtype, Options(activation="relu2"))
    tiny = {BF16: 2.0**-60, F16: 2.0**-14, F32: 2.0**-60}[dtype]
    call.x[:] = (call.x.astype(np.float64) * tiny).astype(dtype)
    call.layer.gate_up_global_scale[:] /= np.float32(tiny)
    assert_accurate(call, (isa,))


@isas
def test_block_scales_of_all_kinds_are_exact(isa):
    """One code of one, zeros else, and every scale byte: products are the scales themselves."""
    bytes_ = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)
    rows = np.resize(bytes_, 256)
    packed = np.zeros((1, 256, 8), np.uint8)
    packed[..., 0] = 0x02
    y = cpu_calls.grouped_gemm(
        np.eye(1, 16, dtype=np.float32),
        packed,
        rows.reshape(1, 256, 1).view(E4M3),
        np.ones((1, 1), np.float32),
        np.zeros(0, np.float32),
        np.zeros((0, 0), np.float32),
        np.array([1], np.int32),
        "none",
        isa,
    )
    np.testing.assert_array_equal(np.asarray(y)[0], rows.view(E4M3).astype(np.float32))


GEMMS = {
    "groups": (37, 112, 80, [5, 0, 11, 21]),
    "one_row_each": (4, 48, 64, [1, 1, 1, 1]),
    "rows_left_over": (20, 64, 32, [3, -2, 7]),
    "sum_too_large": (20, 64, 32, [9, 40, 3]),
    "no_rows": (0, 64, 32, [3, 4]),
    "linear_of_odd_width": (3, 77, 48, [3]),
    "linear_of_many_rows": (270, 40, 48, [270]),
}


@pytest.mark.parametrize("case", GEMMS)
@dtypes
@pytest.mark.parametrize(("mode", "parts"), [("none", 1), ("static", 2), ("token", 1)])
def test_grouped_gemm_matches_float64(case, dtype, mode, parts):
    m, n, k, sizes = GEMMS[case]
    rng, e = np.random.default_rng(1), len(sizes)
    packed, block_scale = float64_layer.random_weight(rng, e, n, k)
    parts = 1 if n % 2 else parts
    scale = rng.uniform(0.01, 0.02, (e, parts)).astype(np.float32)
    input_scale = rng.uniform(1e-3, 2e-3, e).astype(np.float32)
    bias = rng.normal(0, 0.5, (e, n)).astype(np.float32)
    x = rng.normal(0, 1, (m, k)).astype(dtype)
    operands = (x, packed, block_scale, scale, input_scale, bias, np.array(sizes, np.int32), mode)
    product = float64_layer.sequential_float32 if dtype == F32 else xla(dtype)
    truth = float64_layer.grouped_gemm(*operands)
    yardstick = float64_layer.grouped_gemm(*operands, matmul=product).astype(dtype)
    for isa in ISAS:
        actual = cpu_calls.grouped_gemm(*operands, isa=isa)
        assert_as_accurate_as(actual, yardstick, truth)
        routed = np.minimum(np.maximum(sizes, 0).sum(), m)
        assert not np.asarray(actual, np.float32)[routed:].any()


def test_grouped_gemm_in_rounds():
    m, n, k, sizes = GEMMS["groups"]
    rng, e = np.random.default_rng(2), len(sizes)
    packed, block_scale = float64_layer.random_weight(rng, e, n, k)
    scale, none = np.ones((e, 1), np.float32), np.zeros((0, 0), np.float32)
    x = rng.normal(0, 1, (m, k)).astype(F32)
    operands = (
        x,
        packed,
        block_scale,
        scale,
        np.zeros(0, np.float32),
        none,
        np.array(sizes, np.int32),
    )
    truth = float64_layer.grouped_gemm(*operands, "none")
    yardstick = float64_layer.grouped_gemm(
        *operands, "none", matmul=float64_layer.sequential_float32
    ).astype(F32)
    small = 2 * grouped_gemm_workspace_bytes(1, e, n, k, dtype=F32)
    for isa in ISAS:
        actual = cpu_calls.grouped_gemm(*operands, "none", isa, small)
        assert_as_accurate_as(actual, yardstick, truth)


def test_every_instruction_set_has_its_marker():
    """So that a machine shows those that it lacks as skipped."""
    assert {*ISAS} - {*cpu_calls.NEED_CPU} == {"scalar"}


@isas
def test_a_layer_of_each_instruction_set(isa):
    """Tests that go through all sets in one piece do not show which this machine has."""
    assert_accurate(make("fills_no_tile", BF16, Options()), [isa])


def test_unknown_isa_names_what_this_cpu_has():
    call = make("one_token", BF16, Options())
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"isa: expected auto or .*scalar, got vax"
    ):
        call.run("vax")


def test_wrong_shape_names_the_operand():
    call = make("one_token", BF16, Options())
    call.layer = call.layer._replace(down_global_scale=np.ones((4, 2), np.float32))
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=r"down_global_scale \[e, 1\]: expected \[4, 1\], got \[4, 2\]",
    ):
        call.run()


@pytest.mark.slow
def test_sanitizers_find_nothing(tmp_path):
    """Build the kernels with ASan and UBSan around their own thread pool, and run the edges."""
    script = PROGRAMS / "run_sanitizers.sh"
    done = subprocess.run(["bash", script, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
