"""Test the CPU quantizer byte for byte, and the arithmetic by which the CUDA one finds codes."""

import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cpu_calls
from support.files.given import ROOT, TESTS
from support.kernels import quantizer_suite as cases
from support.kernels.axes import axis
from support.kernels.quantizer_suite import EveryScaleSuite, QuantizerSuite

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.numerics import nvfp4 as formats

CPU = jax.devices("cpu")[0]
dtypes = pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES.keys())


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu():
    """Use the CPU, so that a machine with a GPU tests these kernels too."""
    with jax.default_device(CPU):
        yield


@pytest.fixture(scope="module")
def outputs():
    """Return a dictionary of what kernels gave, for the tests of other instruction sets."""
    return {}


def test_short_division_and_rounding_are_exact(tmp_path):
    """Try every significand of the divisor at every threshold.

    The control leaves out the correction, and must differ.
    """
    program = tmp_path / "exact_quantizer"
    flags = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off"]
    source = TESTS / "cpp" / "exact_quantizer.cc"
    include = f"-I{ROOT / 'ffi'}"
    subprocess.run(["g++", *flags, include, source, "-o", program], check=True)
    printed = subprocess.run([program, "1000000"], capture_output=True, text=True, check=True)
    lines = (line.split() for line in printed.stdout.splitlines())
    counts = {name: (int(tried), int(differ)) for name, tried, differ in lines}
    assert counts.pop("control")[1] > 1e8
    assert counts["thresholds"] == (9 * 16 << 23, 0)
    assert counts["random_codes"] == counts["random_scales"] == (1000000, 0)
    assert not any(differ for _, differ in counts.values())


class TestQuantizer(QuantizerSuite, EveryScaleSuite):
    isa = axis(*cpu_calls.isa_levels())

    @pytest.fixture
    def run(self, isa, outputs, request):
        """All instruction sets and layouts run in one program, whose outputs their tests share.

        The key of the outputs holds the array by identity, because these tests share arrays.
        """

        def quantize(x, g, layout):
            layouts = cases.LAYOUTS if "layout" in request.fixturenames else (layout,)
            key = id(x), str(g), layouts
            if key not in outputs:
                outputs[key] = x, cpu_calls.quantize_of_each(x, g, layouts)
            return outputs[key][1][layout][isa]

        return quantize


quantize_in_xla = jax.jit(formats.quantize)


def assert_same(got, want):
    packed, block_scale, global_scale = map(np.asarray, want)
    np.testing.assert_array_equal(got.packed, packed)
    np.testing.assert_array_equal(np.asarray(got.block_scale).view("u1"), block_scale.view("u1"))
    np.testing.assert_array_equal(got.global_scale, global_scale)


@dtypes
@pytest.mark.parametrize("given", [True, False])
def test_op_is_formats_quantize(dtype, given):
    x = jnp.asarray(cases.random(dtype, 37, 5))
    g = np.float32(0.0173) if given else None
    got = nvfp4.ops.quantize_nvfp4(x, global_scale=g, backend="quantize_cpu")
    assert_same(got, quantize_in_xla(x, g))


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_op_is_formats_quantize_where_there_is_no_scale(value):
    x = cases.random(cases.F32, 3, 6)
    x[1, 7] = value
    x = jnp.asarray(x)
    got = nvfp4.ops.quantize_nvfp4(x, backend="quantize_cpu")
    assert_same(got, quantize_in_xla(x, None))


@pytest.mark.parametrize("backend", ["quantize_cpu", "quantize_cuda"])
def test_largest_magnitude_is_found_inside_the_call(backend):
    platform = backend.removeprefix("quantize_")
    capability = (9, 0) if platform == "cuda" else None
    target = nvfp4.Target(platform=platform, compute_capability=capability)

    def op(x):
        return nvfp4.ops.quantize_nvfp4(x, target=target, backend=backend).packed

    text = str(jax.make_jaxpr(op)(jnp.ones((4, 64), jnp.bfloat16)))
    assert f"nvfp4_{backend}" in text
    assert "reduce" not in text
    assert "div" not in text
