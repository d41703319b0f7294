"""The engines' CUDA kernels and the router, run on a CPU, against float64 on awkward sizes.

No GPU is needed, but g++ and CUDA's headers. Cases, truth and yardstick are those of
`test_cuda_kernel` and `test_route`; what this cannot show is what the real instructions do, and
how fast.
"""

import cuda_emulation
import float64_layer
import ml_dtypes
import numpy as np
import pytest
import quantizer_cases as quantizer
import rounding_case
import test_cuda_kernel as gpu
import test_route as routing
from float64_layer import Options

from jax_nvfp4_moe.testing import assert_as_accurate_as

pytestmark = [pytest.mark.cuda_build, pytest.mark.slow]

BF16, F16 = ml_dtypes.bfloat16, np.float16
engines = pytest.mark.parametrize("engine", cuda_emulation.ENGINES)
# Blocks of threads: one computes all output tiles; few have several each; many split each tile.
multiprocessors = pytest.mark.parametrize("count", [1, 3, 20])
LARGER = {
    "sorted_by_two_blocks": (2100, 2, 5, 32, 16, gpu.uniform(2100, 2, 5)),
    "more_experts_than_threads": (1400, 3, 600, 16, 16, gpu.uniform(1400, 3, 600)),
    "odd_steps": (30, 2, 3, 208, 336, gpu.uniform(30, 2, 3)),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return cuda_emulation.build(tmp_path_factory.mktemp("emulation"))


def run(library, engine, call, count):
    operands = (call.x, call.layer, call.ids, call.weights, call.options)
    return cuda_emulation.moe(library, engine, *operands, count)


def assert_accurate(library, engine, call, count):
    actual = run(library, engine, call, count)
    assert_as_accurate_as(actual, call.yardstick(), call.truth())


@engines
@multiprocessors
@pytest.mark.parametrize("case", gpu.CASES)
def test_layer_matches_float64(library, engine, count, case):
    call = gpu.make(case, BF16, Options(), bias=True)
    assert_accurate(library, engine, call, count)


@pytest.mark.parametrize("mode", gpu.MODES)
@pytest.mark.parametrize("engine", [*cuda_emulation.ENGINES, "sm100", "sm120"])
@pytest.mark.parametrize("case", gpu.EMPTY)
def test_layer_without_choices_or_experts_gives_zeros(library, engine, case, mode):
    """The outputs start as NaN, and a division by zero would end this process."""
    call = gpu.make(gpu.EMPTY[case], BF16, Options(activation_scale=mode), bias=True)
    gpu.assert_zeros(run(library, engine, call, count=3))


@pytest.mark.parametrize("mode", gpu.MODES)
@pytest.mark.parametrize("engine", [*cuda_emulation.ENGINES, "sm100", "sm120"])
def test_product_without_experts_gives_zeros(library, engine, mode):
    operands = gpu.make_product(gpu.NO_EXPERTS, BF16)
    gpu.assert_zeros(cuda_emulation.grouped_gemm(library, engine, operands, mode, 3))


@pytest.mark.parametrize("mode", ["none", "static"])
def test_few_slots_take_no_more_shared_memory_than_the_device_has(library, mode):
    """On 8.6 and 8.9 the rows of these 32 slots fit only without what a block has besides them."""
    call = gpu.make(gpu.WIDE_FEW_SLOTS, BF16, Options(activation_scale=mode))
    slots, width = call.ids.size, call.layer.down_packed.shape[2] * 2
    needed = library.few_slots_shared_bytes(slots, 1, width, mode == "static")
    rows = needed - library.few_slots_shared_bytes(0, 1, width, 0)
    for device, few in ((cuda_emulation.HOPPER_SHARED_BYTES, True), (99 << 10, False)):
        assert rows < device
        assert (needed <= device) == few
        operands = (call.x, call.layer, call.ids, call.weights, call.options)
        actual = cuda_emulation.moe(library, "sm80", *operands, 3, device)
        assert_as_accurate_as(actual, call.yardstick(), call.truth())
        assert (library.largest_dynamic_bytes() == rows) == few


@engines
@pytest.mark.parametrize("case", LARGER)
def test_larger_layer_matches_float64(library, engine, case):
    assert_accurate(library, engine, gpu.make(LARGER[case], F16, Options()), count=3)


@engines
@pytest.mark.parametrize("activation", gpu.ACTIVATIONS)
def test_activation_matches_float64(library, engine, activation):
    call = gpu.make("several_tiles", F16, Options(activation=activation, limit=0.5), bias=True)
    assert_accurate(library, engine, call, count=3)


@engines
def test_weight_on_input_matches_float64(library, engine):
    call = gpu.make("out_of_range", BF16, Options(activation="relu2", weight_on_input=True))
    assert_accurate(library, engine, call, count=3)


@engines
@pytest.mark.parametrize("mode", gpu.MODES[1:])
@pytest.mark.parametrize("case", gpu.CASES)
def test_quantized_layer_matches_float64(library, engine, case, mode):
    call = gpu.make(case, BF16, Options(activation_scale=mode), bias=True)
    assert_accurate(library, engine, call, count=3)


@engines
@pytest.mark.parametrize("mode", gpu.MODES[1:])
def test_quantized_weight_on_input_matches_float64(library, engine, mode):
    options = Options(activation="relu2", weight_on_input=True, activation_scale=mode)
    assert_accurate(library, engine, gpu.make("out_of_range", F16, options), count=3)


@engines
@pytest.mark.parametrize("mode", gpu.MODES[1:])
@pytest.mark.parametrize("case", gpu.PRODUCTS)
def test_quantized_product_matches_float64(library, engine, case, mode):
    operands = gpu.make_product(case, F16, parts=2, bias=True)
    actual = cuda_emulation.grouped_gemm(library, engine, operands, mode, 3)
    yardstick = float64_layer.grouped_gemm(*operands, mode, matmul=gpu.xla(F16)).astype(F16)
    assert_as_accurate_as(actual, yardstick, float64_layer.grouped_gemm(*operands, mode))


@engines
@pytest.mark.parametrize("activation", gpu.ACTIVATIONS)
def test_quantized_activation_matches_float64(library, engine, activation):
    options = Options(activation=activation, limit=np.inf, activation_scale="static")
    assert_accurate(library, engine, gpu.make("several_tiles", F16, options, bias=True), count=3)


@engines
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("activation", rounding_case.ACTIVATIONS)
def test_activations_are_rounded_as_the_format_says(library, engine, activation, dtype):
    operands, expected = rounding_case.make(activation, dtype)
    actual = cuda_emulation.moe(library, engine, *operands, 3)
    np.testing.assert_array_equal(actual, expected)


@engines
def test_bound_catches_one_wrong_scale(library, engine):
    call = gpu.make("several_tiles", BF16, Options())
    actual = run(library, engine, call, count=3)
    call.layer.down_global_scale[1] *= 1.1
    with pytest.raises(AssertionError):
        assert_as_accurate_as(actual, call.yardstick(), call.truth())


@engines
@pytest.mark.parametrize("case", gpu.WRONG_SCALE_CASES)
def test_bound_catches_wrong_block_scales(library, engine, case):
    call = gpu.make(case, BF16, Options())
    actual = run(library, engine, gpu.with_wrong_block_scales(call), count=3)
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_as_accurate_as(actual, call.yardstick(), call.truth())


@engines
@multiprocessors
@pytest.mark.parametrize("case", gpu.PRODUCTS)
def test_product_matches_float64(library, engine, count, case):
    operands = gpu.make_product(case, BF16, parts=2, bias=True)
    x, sizes = operands[0], operands[-1]
    actual = cuda_emulation.grouped_gemm(library, engine, operands, "none", count)
    yardstick = float64_layer.grouped_gemm(*operands, "none", matmul=gpu.xla(BF16)).astype(BF16)
    assert_as_accurate_as(actual, yardstick, float64_layer.grouped_gemm(*operands, "none"))
    rows = int(np.clip(np.cumsum(np.clip(sizes.astype(np.int64), 0, None)), 0, len(x))[-1])
    assert not actual[rows:].astype(np.float32).any()


def test_product_of_several_chunks_matches_float64(library):
    """On one engine: the chunks are the same for all, and this many rows take a while here."""
    operands = gpu.make_product(gpu.CHUNKED, BF16, parts=2, bias=True)
    actual = cuda_emulation.grouped_gemm(library, "sm80", operands, "none", 3)
    yardstick = float64_layer.grouped_gemm(*operands, "none", matmul=gpu.xla(BF16)).astype(BF16)
    assert_as_accurate_as(actual, yardstick, float64_layer.grouped_gemm(*operands, "none"))
    gpu.assert_zeros(actual[sum(gpu.CHUNKED[3]) :])


@pytest.mark.parametrize("form", routing.FORMS)
@pytest.mark.parametrize("experts", [1, 60, 512])
def test_router_routes_as_the_reference(library, form, experts):
    router = routing.with_experts(routing.FORMS[form], experts, 8)
    logits, bias = routing.inputs(70, experts)
    for correction in (None, bias):
        got = cuda_emulation.route(library, router, logits, correction)
        routing.assert_routes_alike(router, logits, correction, got)


@pytest.mark.parametrize("form", routing.FORMS)
def test_router_gives_ties_to_the_lower_expert(library, form):
    router = routing.with_experts(routing.FORMS[form], 60, 32)
    logits, bias = routing.tied_inputs(60)
    got = cuda_emulation.route(library, router, logits, bias)
    np.testing.assert_array_equal(got[0], routing.route(router, logits, bias)[0])
    routing.assert_weights_accurate(router, logits, bias, got)


@pytest.mark.parametrize("dtype", quantizer.DTYPES.values(), ids=quantizer.DTYPES.keys())
@pytest.mark.parametrize("layout", quantizer.LAYOUTS)
def test_quantizer_is_exact(library, dtype, layout):
    def assert_exact(x, g):
        got = cuda_emulation.quantize(library, x, g, layout)
        assert quantizer.differing_bytes(x, g, layout, got) == 0

    for shape in quantizer.SHAPES:
        x = np.random.default_rng(4).normal(0, 1, shape).astype(dtype)
        assert_exact(x, 1 / 2688)
        assert_exact(x, None)
    for g in quantizer.SCALES:
        assert_exact(quantizer.awkward(dtype), g)
        assert_exact(quantizer.numbers(dtype), g)
    assert_exact(quantizer.random(dtype, 100, 3), 0.0173)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_quantizer_is_exact_on_every_finite_value(library, dtype):
    for g in quantizer.SCALES:
        got = cuda_emulation.quantize(library, quantizer.finite(dtype), g)
        assert quantizer.differing_bytes(quantizer.finite(dtype), g, "linear", got) == 0
