"""Test NVFP4Tensor and MoEParams: shapes, bytes, exact values, errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.numerics.tensor import check_moe_params
from jax_nvfp4_moe.testing import random_moe_params

# Each method is one compiled program. Otherwise each operation in it would be a program.
dequantize = jax.jit(nvfp4.NVFP4Tensor.dequantize, static_argnums=1)
to_layout = jax.jit(nvfp4.NVFP4Tensor.to_layout, static_argnums=1)


@functools.partial(jax.jit, static_argnums=1)
def in_layouts(tensor, names):
    """Convert to one layout and from there to another.

    Returns both tensors, the scales of the first two, and the values of all three.
    """
    there = tensor.to_layout(names[0])
    other = there.to_layout(names[1])
    scales = [one.scale() for one in (tensor, there)]
    return there, other, scales, [one.dequantize() for one in (tensor, there, other)]


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.fixture(scope="module")
def tensor():
    return nvfp4.quantize(normal(3, 24, 64))


def test_shape_bytes_and_codes(tensor):
    assert tensor.shape == (3, 24, 64)
    assert tensor.nbytes == 3 * 24 * 32 + 3 * 24 * 4 + 3 * 4
    assert tensor.codes.dtype == jnp.float4_e2m1fn
    assert tensor.codes.shape == tensor.shape
    values = np.asarray(tensor.codes.astype(jnp.float32)).reshape(3, 24, 4, 16)
    scale = np.asarray(tensor.block_scale).astype(np.float32)
    scale = scale * np.asarray(tensor.global_scale)[:, None, None]
    np.testing.assert_array_equal(
        (values * scale[..., None]).reshape(3, 24, 64), tensor.dequantize()
    )


def test_each_matrix_has_the_global_scale_of_its_amax(tensor):
    x = normal(3, 24, 64)
    np.testing.assert_array_equal(tensor.global_scale, np.abs(x).max((1, 2)) / np.float32(2688))


def test_halves_have_their_own_global_scale(tensor):
    two = dataclasses.replace(tensor, global_scale=np.float32([[1.0, 2.0]] * 3))
    one = dataclasses.replace(tensor, global_scale=np.ones(3, np.float32))
    values, want = np.asarray(dequantize(two)), np.asarray(dequantize(one))
    np.testing.assert_array_equal(values[:, :12], want[:, :12])
    np.testing.assert_array_equal(values[:, 12:], 2 * want[:, 12:])


def test_rows_have_their_own_global_scale(tensor):
    """The values are those of the matrices that were stored as one."""
    scales = np.arange(1, 3 * 24 + 1, dtype=np.float32).reshape(3, 24)
    rows = nvfp4.NVFP4Tensor.from_packed(tensor.packed, tensor.block_scale, scales)
    one = dataclasses.replace(tensor, global_scale=np.ones(3, np.float32))
    want = np.asarray(dequantize(one)) * scales[..., None]
    for layout in ("canonical", "cpu_16x16", "mma_64x64"):
        np.testing.assert_array_equal(dequantize(to_layout(rows, layout)), want)
    with pytest.raises(ValueError, match=r"or \(3, 24\), one per row; got \(3, 23\)"):
        nvfp4.NVFP4Tensor.from_packed(tensor.packed, tensor.block_scale, scales[:, 1:])


def test_a_divisor_divides(tensor):
    """compressed-tensors stores 1 / global_scale. Its values are quotients, not products."""
    divisor = np.float32([3.0, 7.1, 12345.6])
    divided = dataclasses.replace(
        tensor, global_scale=jnp.asarray(1 / divisor), global_divisor=jnp.asarray(divisor)
    )
    s8 = np.asarray(tensor.block_scale).astype(np.float32)
    codes = np.asarray(tensor.codes).astype(np.float32).reshape(3, 24, 4, 16)
    want = (codes * (s8 / divisor[:, None, None])[..., None]).reshape(3, 24, 64)
    np.testing.assert_array_equal(dequantize(divided), want)
    product = dataclasses.replace(divided, global_divisor=None)
    assert (np.asarray(dequantize(product)) != want).any()


def test_bfloat16_values_are_rounded_once(tensor):
    want = np.asarray(tensor.dequantize()).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(tensor.dequantize(jnp.bfloat16)), want)


@pytest.mark.parametrize("n", [16, 24])
def test_another_layout_keeps_shape_and_values(n):
    tensor = nvfp4.quantize(normal(2, n, 32))
    there = to_layout(tensor, "cpu_16x16")
    assert there.shape == tensor.shape
    np.testing.assert_array_equal(dequantize(there), dequantize(tensor))
    back = to_layout(there, "canonical")
    np.testing.assert_array_equal(back.packed, tensor.packed)
    assert (back.layout, back.rows, back.columns) == ("canonical", None, None)


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (48, 64), (128, 80), (20, 16)])
def test_padded_columns_keep_shape_and_values(n, k, halves):
    tensor = nvfp4.quantize(normal(2, n, k))
    if halves == 2:
        apart = np.float32([[1.0, 2.0], [3.0, 5.0]])
        tensor = dataclasses.replace(tensor, global_scale=apart)
    there, other, scales, values = in_layouts(
        tensor, ("mma_64x64_gated" if halves == 2 else "mma_64x64", "cpu_16x16")
    )
    assert there.shape == tensor.shape
    assert there.rows == (None if n % 64 == 0 else n)
    assert there.columns == (None if k % 64 == 0 else k)
    assert (other.shape, other.columns) == (tensor.shape, None)
    np.testing.assert_array_equal(scales[1], scales[0])
    np.testing.assert_array_equal(values[1], values[0])
    np.testing.assert_array_equal(values[2], values[0])


@pytest.mark.parametrize(
    ("layout", "scale_bytes"),
    [("cpu_16x16", [0x80 | 0x38, 0]), ("mma_64x64", [0x38, 0])],
)
def test_values_under_negative_and_zero_block_scales_are_kept(layout, scale_bytes):
    raw = np.zeros((16, 2), np.uint8)
    raw[0] = [0x80 | 0x38, 0]  # -1 and 0
    scales = raw.view(ml_dtypes.float8_e4m3fn)
    tensor = nvfp4.NVFP4Tensor.from_packed(np.full((16, 16), 0x22, np.uint8), scales, 2.0)
    there = to_layout(to_layout(tensor, layout), "canonical")
    assert np.asarray(there.block_scale).view(np.uint8)[0].tolist() == scale_bytes
    assert np.asarray(dequantize(there))[0, [0, 16]].tolist() == [-2.0, 0.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packed": jnp.zeros((4, 16), jnp.int8)}, "packed: expected dtype uint8, got int8"),
        ({"packed": jnp.zeros((4, 12), jnp.uint8)}, "multiple of 16"),
        (
            {"block_scale": jnp.zeros((4, 1), jnp.float8_e4m3fn)},
            r"block_scale: expected shape \(4, 2\)",
        ),
        (
            {"block_scale": jnp.zeros((4, 2), jnp.float32)},
            "block_scale: expected dtype float8_e4m3fn",
        ),
        (
            {"global_scale": jnp.zeros(3, jnp.float32)},
            r"global_scale: expected shape \(\).*got \(3,\)",
        ),
    ],
)
def test_from_packed_names_what_is_wrong(change, message):
    good = {
        "packed": jnp.zeros((4, 16), jnp.uint8),
        "block_scale": jnp.zeros((4, 2), jnp.float8_e4m3fn),
        "global_scale": jnp.float32(1),
    }
    nvfp4.NVFP4Tensor.from_packed(**good)
    with pytest.raises(ValueError, match=message):
        nvfp4.NVFP4Tensor.from_packed(**{**good, **change})


def test_pytrees_pass_through_jit_scan_and_take(tensor):
    same = jax.jit(lambda t: t)(tensor)
    assert same.layout == tensor.layout
    stacked = jax.lax.scan(lambda _, t: (None, t.dequantize()), None, tensor)[1]
    np.testing.assert_array_equal(stacked, dequantize(tensor))
    second = jax.tree.map(lambda leaf: np.asarray(leaf)[1], tensor)
    np.testing.assert_array_equal(dequantize(second), dequantize(tensor)[1])


@pytest.fixture(scope="module")
def params():
    return random_moe_params(jax.random.key(0), num_experts=2, hidden=32, intermediate=16)


def test_params_know_their_sizes(params):
    assert (params.num_experts, params.hidden, params.intermediate, params.gated) == (
        2,
        32,
        16,
        True,
    )
    assert params.gate_up.global_scale.shape == (2, 2)
    assert params.has_input_scales
    plain = random_moe_params(
        jax.random.key(0), num_experts=2, hidden=32, intermediate=16, gated=False
    )
    assert plain.gate_up.shape == (2, 16, 32)
    assert not plain.gated


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {"gate_up": p.down}, "gate_up: expected"),
        (lambda p: {"down": p.down.to_layout("cpu_16x16")}, "gate_up: expected layout 'cpu_16x16'"),
        (
            lambda p: {n: getattr(p, n).to_layout("mma_64x64") for n in ("gate_up", "down")},
            "gate_up: expected layout 'mma_64x64_gated'.*got 'mma_64x64'",
        ),
        (lambda p: {"down_bias": jnp.zeros((2, 16))}, r"down_bias: expected shape \(2, 32\)"),
        (lambda p: {"gate_up_input_scale": jnp.ones(3)}, r"gate_up_input_scale: .*\(2,\).*\(3,\)"),
    ],
)
def test_params_that_disagree_are_named(params, change, message):
    check_moe_params(params)
    with pytest.raises(ValueError, match=message):
        check_moe_params(dataclasses.replace(params, **change(params)))


@pytest.mark.parametrize(
    ("gate", "up", "down", "message"),
    [
        ((2, 16, 32), (2, 32, 16), (2, 32, 16), r"up: expected shape \[e, i, h\] = \(2, 16, 32\)"),
        ((2, 32, 16), (2, 16, 32), (2, 32, 16), r"gate: .* got \(2, 32, 16\)\. .*swapaxes\(1, 2\)"),
        ((2, 16, 24), (2, 16, 24), (2, 24, 16), "up: .*multiple of 16"),
        (None, (2, 24, 32), (2, 32, 24), "down: .*multiple of 16"),
    ],
)
def test_dense_experts_that_disagree_are_named(gate, up, down, message):
    """The error names the argument that was given."""
    given = [None if shape is None else jnp.ones(shape) for shape in (gate, up, down)]
    with pytest.raises(ValueError, match=message):
        nvfp4.quantize_experts(*given)
