"""Test the CPU kernel that multiplies by transposed weights, and the gradients that run on it.

The first tests call the FFI target directly, once for each instruction set that this CPU has. The
suites call the ops, which take the best instruction set.
"""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cpu_calls
from support.kernels.axes import axis
from support.kernels.float64_layer import E4M3
from support.ops.gradient_suite import PRODUCTS, LayerGradientSuite, ProductGradientSuite

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.backends.launch_facts import workspace_bytes_of_rows
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.testing import assert_as_accurate_as

ISAS = cpu_calls.isa_levels()
DTYPES = "bfloat16", "float16", "float32"
CPU = jax.devices("cpu")[0]
isas = pytest.mark.parametrize("isa", ISAS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)

# As PRODUCTS. Tiles of a kernel have each possible number of rows, and one more. Weights have odd
# numbers of groups of 16 rows, more groups than a panel, and rows that are padded.
CASES = PRODUCTS | {
    "each_height": (tuple(range(14)), sum(range(14)), 48, 32),
    "blocks_of_rows": ((260, 0, 300), 560, 80, 16),
    "panels": ((1, 2, 3, 7), 13, 1040, 32),
    "panels_of_odd_groups": ((4, 1), 5, 2064, 16),
    "one_group_of_16": ((1, 5), 6, 16, 80),
    "padded_rows": ((5, 1), 6, 77, 48),
}


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu():
    """Use the CPU, so that a machine with a GPU tests these kernels too."""
    with jax.default_device(CPU):
        yield


@functools.cache
def operands(case, dtype):
    """Return rows, weight and sizes of groups."""
    sizes, m, n, k = CASES[case]
    rng = np.random.default_rng(m * n)
    weight = nvfp4.quantize(rng.standard_normal((len(sizes), n, k), np.float32))
    x = rng.standard_normal((m, n), np.float32)
    return jnp.asarray(x, dtype), weight, np.asarray(sizes, np.int32)


@functools.cache
def outputs(case, dtype, rows_of_workspace=None):
    """Return instruction set -> output."""
    x, weight, sizes = operands(case, dtype)
    size = rows_of_workspace and workspace_bytes_of_rows(
        "nvfp4_transposed_gemm_cpu", rows_of_workspace, len(sizes), weight.shape[-1], x.shape[1]
    )
    return cpu_calls.transposed_gemm_of_each(x, weight, sizes, size)


@functools.cache
def references(case, dtype):
    """Return the product in float64, and that of plain XLA in the dtype."""
    x, weight, sizes = operands(case, dtype)
    own = np.repeat(np.arange(len(sizes)), sizes)
    own = np.concatenate([own, np.full(len(x) - len(own), -1)])
    wide, matrices = np.asarray(x, np.float64), np.asarray(weight.dequantize(), np.float64)
    truth = np.zeros((len(x), weight.shape[-1]))
    for group in range(len(sizes)):
        truth[own == group] = wide[own == group] @ matrices[group]
    return truth, np.asarray(_multiply(x, weight, own))


@jax.jit
def _multiply(x, weight, own):
    one_hot = jax.nn.one_hot(own, weight.shape[0], dtype=x.dtype)
    spread = one_hot[:, :, None] * x[:, None]
    matrices = weight.dequantize(x.dtype).reshape(-1, weight.shape[-1])
    return jnp.matmul(spread.reshape(len(x), -1), matrices, precision="highest")


def check(case, dtype, found):
    """Check rows of groups against float64, and that the other rows are zeros."""
    truth, plain = references(case, dtype)
    assert found.dtype == plain.dtype
    assert_as_accurate_as(found, plain, truth)
    assert not found[sum(CASES[case][0]) :].any()
    with pytest.raises(AssertionError, match="yardstick"):
        assert_as_accurate_as(np.roll(found, 1, axis=1), plain, truth)


@isas
@dtypes
@pytest.mark.parametrize("case", [name for name, given in CASES.items() if given[1]])
def test_each_instruction_set(isa, dtype, case):
    check(case, dtype, outputs(case, dtype)[isa])


@isas
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_small_workspace_takes_several_rounds(isa, dtype):
    found = outputs("rows_of_no_group", dtype, 7)[isa]
    check("rows_of_no_group", dtype, found)


@isas
@dtypes
def test_the_same_bits_from_many_threads(isa, dtype):
    first = outputs("tiles_of_128", dtype)[isa].tobytes()

    def run(_):
        return cpu_calls.transposed_gemm_of_each(*operands("tiles_of_128", dtype))[isa].tobytes()

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert {*threads.map(run, range(6))} == {first}


@isas
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
@dtypes
def test_block_scales_of_all_kinds_are_exact(isa, rows, dtype):
    """Row r of x selects row r of the weight, whose codes are 1, so that outputs are the scales."""
    scales = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)
    blocks = np.resize(scales, (1, 16, 32))
    weight = NVFP4Tensor(
        jnp.full((1, 16, 256), 0x22, jnp.uint8),
        jnp.asarray(blocks.view(E4M3)),
        jnp.ones(1, jnp.float32),
    )
    x = jnp.eye(rows, 16, dtype=dtype)
    found = cpu_calls.transposed_gemm_of_each(x, weight, np.array([rows], np.int32))[isa]
    expected = np.repeat(blocks[0, :rows].view(E4M3).astype(np.float32), 16, axis=1)
    np.testing.assert_array_equal(found.astype(np.float32), expected)


@isas
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_numbers_that_are_not_finite_stay_in_their_row(isa, rows):
    x, weight, _ = operands("panels", "bfloat16")
    sizes = np.array([rows, 0, 0, 0], np.int32)
    bad = x.at[rows - 1, 3].set(jnp.nan).at[rows:].set(jnp.inf)
    clean = cpu_calls.transposed_gemm_of_each(x, weight, sizes)[isa]
    dirty = cpu_calls.transposed_gemm_of_each(bad, weight, sizes)[isa]
    assert np.isnan(dirty[rows - 1].astype(np.float32)).all()
    np.testing.assert_array_equal(np.delete(dirty, rows - 1, 0), np.delete(clean, rows - 1, 0))


def test_tiny_workspace_is_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"workspace \[bytes\]: expected at least"):
        cpu_calls.transposed_gemm_of_each(*operands("few_rows", "bfloat16"), workspace=100)


@pytest.fixture
def target():
    return nvfp4.Target("cpu")


class TestProductGradient(ProductGradientSuite):
    dtype = axis(*DTYPES)


class TestLayerGradient(LayerGradientSuite):
    """The other dtypes of layers are in tests/ops/test_gradient.py."""

    kernel = "transposed_gemm_cpu"
    dtype = axis("bfloat16")
