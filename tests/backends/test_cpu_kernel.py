"""Test the CPU kernels: the suites of all kernels, and tests for these kernels alone.

All tests call the FFI targets directly, once for each instruction set that this CPU has.
"""

import concurrent.futures
import dataclasses
import functools
import subprocess

import jax
import numpy as np
import pytest
from support.extensions import cpu_calls
from support.files.given import PROGRAMS
from support.kernels.axes import axis
from support.kernels.float64_layer import E4M3, Options
from support.kernels.kernel_cases import (
    ACTIVATIONS,
    BF16,
    DTYPES,
    F16,
    F32,
    LAYERS,
    MODES,
    constant,
    make_layer,
    make_product,
    uniform,
)
from support.kernels.kernel_suite import (
    LayerSuite,
    ProductSuite,
    RoundingSuite,
    UnroundedSuite,
    assert_accurate,
)

from jax_nvfp4_moe.backends.launch_facts import workspace_bytes_of_rows

pytestmark = pytest.mark.every_case  # they take little time each
ISAS = cpu_calls.isa_levels()
CPU = jax.devices("cpu")[0]

modes = pytest.mark.parametrize("mode", MODES)
isas = pytest.mark.parametrize("isa", ISAS)


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu():
    """Use the CPU, so that a machine with a GPU tests these kernels too."""
    with jax.default_device(CPU):
        yield


@pytest.fixture(scope="module")
def outputs():
    """Return a dictionary of what kernels gave, for the tests of other instruction sets."""
    return {}


def layer_output(outputs, call, options, isa):
    """Return the output of a call. All of `options` and instruction sets run in one program.

    The key of the outputs holds the arrays by identity, because tests of other instruction sets and
    options share them.
    """
    arrays = (call.x, *call.layer, call.ids, call.weights)
    key = (*map(id, arrays), options)
    if key not in outputs:
        operands = (call.x, cpu_calls.prepare(call.layer), call.ids, call.weights)
        outputs[key] = arrays, cpu_calls.moe_of_each(*operands, options)
    return outputs[key][1][call.options][isa]


def product_output(outputs, call, modes, isa):
    """Return the output of a call. All of `modes` and instruction sets run in one program."""
    key = (*map(id, call.operands), modes)
    if key not in outputs:
        each = cpu_calls.grouped_gemm_of_each(*call.operands, modes=modes)
        outputs[key] = call.operands, each
    return outputs[key][1][call.mode][isa]


def run_layer(call, isa="auto", workspace=None):
    """Run a `kernel_cases.LayerCall`."""
    operands = jax.device_put((call.x, cpu_calls.prepare(call.layer), call.ids, call.weights), CPU)
    return cpu_calls.moe(*operands, call.options, isa=isa, workspace=workspace)


@functools.cache
def tiny_call(dtype):
    """Return a layer in whose arithmetic XLA's flush-to-zero mode would find only zeros."""
    call = make_layer("two_rows_each", DTYPES[dtype], Options(activation="relu2"))
    tiny = {"bf16": 2.0**-60, "f16": 2.0**-14, "f32": 2.0**-60}[dtype]
    x = (call.x.astype(np.float64) * tiny).astype(call.x.dtype)
    scale = call.layer.gate_up_global_scale / np.float32(tiny)
    return dataclasses.replace(call, x=x).with_layer(gate_up_global_scale=scale)


# Few and many rows, and the sizes of a layer.
LARGE_SUMS = {rows: (rows, 1, 1, 32, 14336, constant(rows, 1, 0)) for rows in (1, 2, 40)}


class TestLayer(LayerSuite, RoundingSuite, UnroundedSuite):
    isa = axis(*ISAS)
    case = axis(*LAYERS)
    case_numbers = axis("bf16-none", "f32-none")
    activation_numbers = axis("bf16-none", "f32-none")

    @pytest.fixture
    def run(self, isa, outputs, request):
        """Compute what other tests need of the same operands: other scales, or other activations.

        The axis of a test says which of them those tests use.
        """
        axes = request.fixturenames

        def output(call):
            options = (call.options,)
            if "numbers" in axes:
                options = tuple(
                    dataclasses.replace(call.options, activation_scale=mode) for mode in MODES
                )
            elif "activation_numbers" in axes:
                each = (dataclasses.replace(call.options, activation=a) for a in ACTIVATIONS)
                options = tuple(o for o in each if o.gated == call.options.gated)
            return layer_output(outputs, call, options, isa)

        return output

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_subnormal_half_and_tiny_activations_count(self, run, dtype):
        """XLA's flush-to-zero mode must not turn these values into zeros."""
        assert_accurate(run, tiny_call(dtype))

    @pytest.mark.parametrize("rows", LARGE_SUMS)
    def test_large_sums_do_not_depend_on_the_form_of_rows(self, run, rows):
        """Sum 14336 values, which fill more than one panel of every kind, for few and many rows."""
        assert_accurate(run, self.call(LARGE_SUMS[rows], "bf16-none"))


class TestProduct(ProductSuite):
    isa = axis(*ISAS)
    case_numbers = axis("bf16-none", "f32-none", "bf16-token")

    @pytest.fixture
    def run(self, isa, outputs, request):
        several = {"numbers", "case_numbers"} & {*request.fixturenames}
        return lambda call: product_output(outputs, call, MODES if several else (call.mode,), isa)


@functools.cache
def outputs_of_small_workspace():
    """Return options -> instruction set -> output in a workspace of three tokens."""
    call = make_layer("out_of_range", BF16, Options())
    one_token = workspace_bytes_of_rows("nvfp4_moe_w4a16_cpu", 1, 4, 6, 64, 32, True, 2)
    operands = (call.x, cpu_calls.prepare(call.layer), call.ids, call.weights)
    options = tuple(Options(activation_scale=mode) for mode in MODES)
    return cpu_calls.moe_of_each(*operands, options, workspace=3 * one_token)


@isas
@modes
def test_small_workspace_takes_several_rounds(isa, mode):
    options = Options(activation_scale=mode)
    call = make_layer("out_of_range", BF16, options)
    assert_accurate(lambda call: outputs_of_small_workspace()[call.options][isa], call)


def test_every_instruction_set_has_its_marker():
    """Each instruction set has a marker, so that a machine without it shows tests as skipped."""
    assert {*cpu_calls.present_isas()} - {*cpu_calls.NEED_CPU} == {"scalar"}


@isas
def test_tiny_workspace_is_refused(isa):
    call = make_layer("out_of_range", BF16, Options())
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"workspace \[bytes\]: expected at least"):
        run_layer(call, isa, workspace=100)


@functools.cache
def bits_of_many_runs(dtype, mode):
    """Return instruction set -> bits of a run alone, and of 24 runs in eight threads."""
    case = (64, 4, 8, 144, 80, uniform(64, 4, 8))
    call = make_layer(case, dtype, Options(activation_scale=mode))
    operands = (call.x, cpu_calls.prepare(call.layer), call.ids, call.weights)

    def run(_=None):
        outputs = cpu_calls.moe_of_each(*operands, (call.options,))[call.options]
        return {isa: y.tobytes() for isa, y in outputs.items()}

    first = run()
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        results = list(threads.map(run, range(24)))
    return {isa: (first[isa], [result[isa] for result in results]) for isa in first}


@isas
@pytest.mark.parametrize(("dtype", "mode"), [(BF16, "none"), (F32, "none"), (F16, "token")])
def test_same_bits_every_time_and_from_many_threads(isa, dtype, mode):
    first, results = bits_of_many_runs(dtype, mode)[isa]
    assert len(results) == 24
    assert set(results) == {first}


@isas
def test_block_scales_of_all_kinds_are_exact(isa):
    """One code per row is 1 and all others are 0, so that the outputs are the scales themselves."""
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


@functools.cache
def products_in_rounds():
    """Return instruction set -> product in a workspace of two rows."""
    call = make_product("groups", F32)
    e, n, half_k = call.operands[1].shape
    target = "nvfp4_grouped_gemm_w4a16_cpu"
    small = 2 * workspace_bytes_of_rows(target, 1, e, n, 2 * half_k, 4)
    each = cpu_calls.grouped_gemm_of_each(*call.operands, modes=("none",), workspace=small)
    return each["none"]


@isas
def test_grouped_gemm_in_rounds(isa):
    call = make_product("groups", F32)
    assert_accurate(lambda _: products_in_rounds()[isa], call)


def test_unknown_isa_names_what_this_cpu_has():
    call = make_layer("one_token", BF16, Options())
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"isa: expected auto or .*scalar, got vax"
    ):
        run_layer(call, "vax")


def test_wrong_shape_names_the_operand():
    call = make_layer("one_token", BF16, Options())
    call = call.with_layer(down_global_scale=np.ones((4, 2), np.float32))
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=r"down_global_scale \[e, 1\]: expected \[4, 1\], got \[4, 2\]",
    ):
        run_layer(call)


@pytest.mark.slow
def test_sanitizers_find_nothing(tmp_path):
    """Build the kernels with ASan and UBSan around a thread pool, and run the edge cases."""
    script = PROGRAMS / "run_sanitizers.sh"
    done = subprocess.run(["bash", script, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
