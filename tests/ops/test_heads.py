"""Test `ops.prepare_heads` off GPUs: its definition, its errors, its choice and its derivative."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cpu_calls
from support.kernels import head_suite
from support.kernels.axes import axis
from support.kernels.fp8_head_suite import (
    FP8_HEAD_CASES,
    Fp8HeadSuite,
    assert_same_bytes,
    expected_of,
    in_16_bits,
    with_fp8_cache,
)
from support.kernels.head_call_suite import HeadCallSuite, call_target
from support.kernels.head_suite import (
    CASES,
    PAIRS,
    HeadSuite,
    assert_accurate,
    jitted,
    make,
)

from jax_nvfp4_moe import Problem, Target, explain, ops
from jax_nvfp4_moe.numerics.rope import Rope

# These kernels run on CPUs alone, and would not be chosen where there is a GPU.
pytestmark = pytest.mark.usefixtures("on_cpu")

GPU = Target("cuda", (9, 0))
FP8_CACHE = np.zeros((1, 2, 8, 4), jnp.float8_e4m3fn)
FP8_BOTH = {"keys": FP8_CACHE, "values": FP8_CACHE}
BOTH_SCALES = {"k_scale": np.ones(2, np.float32), "v_scale": np.ones(2, np.float32)}


def prepare(call, qkv=None, **options):
    """Call the op on the operands of `head_suite.Call`."""
    first, *others = call.operands
    operands = (first if qkv is None else qkv, *others)
    return head_suite.prepare(operands, call.options, **options)


class TestReference(HeadSuite):
    """The reference passes its own bound; the suite checks what it leaves alone, and padding."""

    case = axis(*CASES)
    pair = axis(PAIRS[0])

    @pytest.fixture
    def run(self):
        return lambda call: jitted(call, backend="reference")


class TestCpuKernel(HeadSuite):
    case = axis(*CASES)
    pair = axis(PAIRS[0], PAIRS[3])

    @pytest.fixture
    def run(self):
        return lambda call: jitted(call, backend="heads_cpu")


class TestReferenceFp8(Fp8HeadSuite):
    """Cases that differ in sizes alone are left to kernels, which divide them."""

    case = axis(
        "decoding",
        "a part rotates",
        "normalized last",
        "neither",
        "the end of the cache",
        "no rows",
        "gates",
        "many heads with gates",
    )
    pair = axis(PAIRS[0])

    @pytest.fixture
    def run(self):
        return lambda call: jitted(call, backend="reference")


class TestCpuKernelFp8(Fp8HeadSuite):
    case = axis(*FP8_HEAD_CASES)
    pair = axis(PAIRS[0], PAIRS[3])

    @pytest.fixture
    def run(self):
        return lambda call: jitted(call, backend="heads_cpu")


class TestCpuCalls(HeadCallSuite):
    backend = "heads_cpu"
    ffi_target = "nvfp4_prepare_heads_cpu"
    fp8_target = "nvfp4_prepare_heads_fp8_cpu"


def call_kernels(call):
    """Return the results of all instruction sets, which are calls in one program."""
    norms = call.weights or (np.zeros(0, call.qkv.dtype),) * 2
    rope = call.options.rope or Rope(())
    arrays = [*call.operands[:4], *norms, np.float32(rope.frequencies), *(call.scales or ())]
    target, how = "nvfp4_prepare_heads_cpu", {}
    if call.scales is not None:
        target = "nvfp4_prepare_heads_fp8_cpu"
        how = {"multiply_by_reciprocal": call.options.multiply_by_reciprocal}

    @jax.jit
    def run(arrays):
        isas = cpu_calls.present_isas()
        return {isa: call_target(target, arrays, call, isa=isa, **how) for isa in isas}

    return run(arrays)


@functools.cache
def results_of_kernels(case, pair):
    return call_kernels(make(case, pair))


@pytest.mark.parametrize("isa", cpu_calls.isa_levels())
@pytest.mark.parametrize("case", ["a part rotates", "normalized last", "gates", "many heads"])
@pytest.mark.parametrize("pair", PAIRS)
def test_each_instruction_set_matches_float64(case, pair, isa):
    assert_accurate(make(case, pair), results_of_kernels(case, pair)[isa])


@functools.cache
def results_with_fp8(case):
    """Return a call, and the results of all instruction sets for it and for its 16 bits."""
    call = with_fp8_cache(make(case, PAIRS[1]), reciprocal=True)
    return call, call_kernels(call), call_kernels(in_16_bits(call))


@pytest.mark.parametrize("isa", cpu_calls.isa_levels())
@pytest.mark.parametrize("case", ["a part rotates", "gates", "neither"])
def test_each_instruction_set_rounds_to_fp8_alike(case, isa):
    call, found, wide = results_with_fp8(case)
    assert_same_bytes(found[isa], expected_of(lambda _: wide[isa], call))


def test_cpus_have_their_kernel():
    problem = Problem(
        "prepare_heads", None, Target("cpu"), sizes={"head width": 128, "rotated width": 64}
    )
    assert explain(problem).backend == "heads_cpu"
    for facts in ({"dtype": "float32"}, {"sizes": {"head width": 320, "rotated width": 64}}):
        assert explain(Problem(**{**vars(problem), **facts})).backend == "reference"


def test_gpus_run_the_kernel_and_others_do_not():
    problem = Problem("prepare_heads", None, GPU, sizes={"head width": 128, "rotated width": 64})
    assert explain(problem).backend == "heads_cuda"
    for facts, why in (
        ({"dtype": "float32"}, "needs bfloat16 or float16"),
        (
            {"sizes": {"head width": 320, "rotated width": 64}},
            "needs head width from 0 to 256 in multiples of 4; got 320",
        ),
        (
            {"sizes": {"head width": 128, "rotated width": 6}},
            "needs rotated width from 0 to 256 in multiples of 4; got 6",
        ),
        ({"target": Target("cpu")}, "needs cuda"),
    ):
        found = explain(Problem(**{**vars(problem), **facts}))
        assert found.backend == ("heads_cpu" if "target" in facts else "reference")
        assert why in found.reasons["heads_cuda"]


@pytest.mark.parametrize("case", ["decoding", "neither", "gates"])
@pytest.mark.parametrize("fp8", [False, True])
def test_the_op_is_one_call_on_a_gpu(case, fp8):
    call = make(case, PAIRS[0])
    call = with_fp8_cache(call, reciprocal=False) if fp8 else call
    traced = jax.jit(lambda qkv: prepare(call, qkv, target=GPU)).trace(call.qkv)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    target = f"nvfp4_prepare_heads_{'fp8_' if fp8 else ''}cuda"
    assert re.findall(r"custom_call @(\w+)", text) == [target]
    assert not re.search(r"stablehlo\.(cosine|rsqrt|scatter)", text)


def test_the_op_is_differentiated_around_its_call_on_a_gpu():
    call = make("decoding", PAIRS[0])

    def loss(qkv):
        results = prepare(call, qkv, target=GPU)
        return sum(jnp.sum(result.astype(jnp.float32) ** 2) for result in results)

    text = jax.jit(jax.grad(loss)).trace(call.qkv).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@nvfp4_prepare_heads_cuda") == 1
    assert "stablehlo.cosine" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": np.zeros((1, 2, 30), np.float32)}, "qkv: expected a width that holds 2 key heads"),
        ({"qkv": np.zeros((1, 2, 8), np.float32)}, "qkv: expected a width .* got 8"),
        (
            {"qkv": np.zeros((1, 2, 36), np.float32), "gated": True},
            "qkv: expected a width that holds .* query heads with their gates of width 4; got 36",
        ),
        ({"qkv": np.zeros((1, 32), np.float32)}, "qkv: expected"),
        ({"positions": np.zeros((1, 3), np.int32)}, r"positions: expected integers \(1, 2\)"),
        ({"positions": np.zeros((1, 2), np.float32)}, "positions: expected integers"),
        ({"keys": np.zeros((2, 2, 8, 4), np.float32)}, "keys: expected"),
        ({"values": np.zeros((1, 2, 8, 4), np.float16)}, "values: expected float32"),
        ({"q_weight": np.zeros(4, np.float32)}, "k_weight: expected .* got None"),
        ({"q_weight": np.zeros(5), "k_weight": np.zeros(4)}, "q_weight: expected"),
        ({"rope": Rope((1.0, 0.5, 0.1))}, "rope: expected at most 2 frequencies"),
        ({"keys": FP8_CACHE}, "keys: expected float32 .* float8_e4m3fn has k_scale and v_scale"),
        (BOTH_SCALES, "keys: expected float8_e4m3fn .* got float32"),
        ({**FP8_BOTH, "k_scale": np.ones(2, np.float32)}, "v_scale: expected .* got None"),
        ({**FP8_BOTH, **BOTH_SCALES, "k_scale": np.ones(3, np.float32)}, r"k_scale: .* \(3,\)"),
        ({**FP8_BOTH, **BOTH_SCALES, "v_scale": np.ones(2)}, "v_scale: .* got float64"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    cache = np.zeros((1, 2, 8, 4), np.float32)
    given = {
        "qkv": np.zeros((1, 2, 32), np.float32),
        "positions": np.zeros((1, 2), np.int32),
        "keys": cache,
        "values": cache,
        **changes,
    }
    operands = [given.pop(name) for name in ("qkv", "positions", "keys", "values")]
    with pytest.raises(ValueError, match=message):
        ops.prepare_heads(*operands, **given)
