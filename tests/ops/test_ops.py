"""Test the public ops on the reference: meaning, edge cases, errors. Kernels have other files."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.ops.expert_layer import E, H, I, K, expert_layer

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.numerics.activations import ACTIVATIONS, find_activation
from jax_nvfp4_moe.numerics.nvfp4 import fake_quantize
from jax_nvfp4_moe.ops.preparation import prepare_donated
from jax_nvfp4_moe.testing import (
    assert_as_accurate_as,
    moe_mlp_float64,
    moe_mlp_xla,
    random_moe_params,
    random_routing,
)

layer = functools.cache(expert_layer)
xla = jax.jit(moe_mlp_xla, static_argnums=(4, 5))


def run(x, params, ids, weights, **options):
    options = {"scheme": "w4a16", "backend": "reference", "activation": "silu", **options}
    return _run(x, params, ids, weights, tuple(options.items()))


@functools.partial(jax.jit, static_argnums=4)
def _run(x, params, ids, weights, options):
    return nvfp4.ops.moe_mlp(x, params, ids, weights, **dict(options))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@functools.partial(jax.jit, static_argnames="scheme")
def linear(x, weight, **options):
    return nvfp4.ops.linear(x, weight, backend="reference", **options)


grouped_gemm = jax.jit(functools.partial(nvfp4.ops.grouped_gemm, backend="reference"))
round_rows = jax.jit(fake_quantize)


@jax.jit
def product(x, y):
    """Return the yardstick: a plain float32 GEMM."""
    return jnp.matmul(x, y, precision="highest")


# One activation of each kind: gated, interleaved with limits and parameters, not gated, and with
# another function. All activations compute in float32, whatever the dtype is.
KINDS = ("silu", "swigluoai", "relu2", "gelu_tanh")


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        *((activation, "float32") for activation in ACTIVATIONS),
        *((activation, dtype) for dtype in ("bfloat16", "float16") for activation in KINDS),
    ],
)
def test_moe_mlp_is_its_equation(activation, dtype):
    """The equation holds on the reference, and on the backend that this machine chooses."""
    call = find_activation(activation)
    x, params, ids, weights = layer(activation=activation, dtype=jnp.dtype(dtype))
    truth = moe_mlp_float64(x, params, ids, weights, call)

    @jax.jit
    def compute(*operands):
        how = {"activation": activation, "scheme": "w4a16"}
        found = [nvfp4.ops.moe_mlp(*operands, **how, backend=b) for b in ("reference", None)]
        return found, moe_mlp_xla(*operands, call, jnp.dtype(dtype))

    found, yardstick = compute(x, params, ids, weights)
    for y in found:
        assert_as_accurate_as(y, yardstick, truth)


@pytest.mark.parametrize("backend", ["reference", None])
def test_alternating_rows_have_one_global_scale(backend):
    """Two scales belong to two halves of the rows, so kernels and `dequantize` would disagree."""
    x, params, ids, weights = layer()
    assert params.gate_up.global_scale.shape == (E, 2)
    with pytest.raises(ValueError, match=r"activation: 'swigluoai' .* \(5, 2\).*_uninterleave'"):
        run(x, params, ids, weights, activation="swigluoai", backend=backend)
    run(x, params, ids, weights, activation="swigluoai_uninterleave", backend=backend)


def test_the_bound_catches_swapped_experts():
    call = find_activation("silu")
    x, params, ids, weights = layer(dtype=jnp.bfloat16)
    truth = moe_mlp_float64(x, params, ids, weights, call)
    yardstick = xla(x, params, ids, weights, call)
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_as_accurate_as(run(x, params, (ids + 1) % E, weights), yardstick, truth)
    down = dataclasses.replace(params.down, global_scale=params.down.global_scale * 1.02)
    wrong = dataclasses.replace(params, down=down)
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_as_accurate_as(run(x, wrong, ids, weights), yardstick, truth)


def rounding(params, scheme):
    """Return the rounding of activations for `scheme`, in numpy."""

    def rounded(rows, expert, product):
        rows = rows.astype(np.float32)
        scale = (params.gate_up_input_scale, params.down_input_scale)[product][expert]
        if scheme == "w4a4_unit_scale":
            scale = np.float32(1)
        if scheme == "w4a4_token_scale":
            scale = np.abs(rows).max(-1) / np.float32(2688)
        scales = np.broadcast_to(scale, rows.shape[:1])
        out = [round_rows(r[None], s) for r, s in zip(rows, scales, strict=True)]
        return np.concatenate(out).astype(np.float64)

    return rounded


@pytest.mark.parametrize("scheme", ["w4a4", "w4a4_unit_scale", "w4a4_token_scale"])
def test_w4a4_rounds_the_inputs_of_both_products(scheme):
    """In float32, no value of this case falls on the other side of a rounding, so both agree."""
    call = find_activation("silu")
    x, params, ids, weights = layer()
    actual = run(x, params, ids, weights, scheme=scheme)
    truth = moe_mlp_float64(x, params, ids, weights, call, rounded=rounding(params, scheme))
    plain = moe_mlp_float64(x, params, ids, weights, call)
    yardstick = truth + 2.0**-22 * np.abs(plain).max()
    assert_as_accurate_as(actual, yardstick, truth)
    assert np.abs(truth - plain).max() > 0.01 * np.abs(plain).max()


def test_weight_on_input():
    call = find_activation("silu")
    x, params, _, _ = layer()
    ids = np.ones((9, 1), np.int32)
    weights = np.linspace(0.1, 0.9, 9, dtype=np.float32)[:, None]
    actual = run(x, params, ids, weights, weight_on_input=True)
    scaled = np.asarray(x) * weights
    truth = moe_mlp_float64(scaled, params, ids, np.ones((9, 1)), call)
    yardstick = xla(scaled, params, ids, np.ones((9, 1), np.float32), call, jnp.float32)
    assert_as_accurate_as(actual, yardstick, truth)


def test_ids_out_of_range_contribute_nothing():
    x, params, ids, weights = layer()
    bad = np.array([-1, E, 2**31 - 1, -(2**31)], np.int32)
    token, some, without = np.arange(9), np.array(ids), np.array(weights)
    some[token, token % K] = bad[token % 4]
    without[token, token % K] = 0.0
    np.testing.assert_array_equal(run(x, params, some, weights), run(x, params, ids, without))
    assert not np.asarray(run(x, params, np.full_like(ids, -1), weights)).any()


@pytest.mark.parametrize("tokens", [0, 1, 300])
def test_token_counts(tokens):
    call = find_activation("silu")
    x, params, ids, weights = layer(tokens, dtype=jnp.bfloat16)
    ids = ids if tokens < 300 else np.full_like(ids, 2)  # one expert takes all
    actual = run(x, params, ids, weights)
    assert actual.shape == (tokens, H)
    yardstick = xla(x, params, ids, weights, call)
    assert_as_accurate_as(actual, yardstick, moe_mlp_float64(x, params, ids, weights, call))


def no_experts():
    """Return the parameters of a layer without experts."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[:0]), layer()[1])


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("experts", [0, E])
@pytest.mark.parametrize("top_k", [0, K])
def test_no_choices_and_no_experts_give_zeros(experts, top_k, backend):
    """Output and gradients are zero, because the output depends on nothing."""
    x, params, ids, weights = layer(dtype=jnp.bfloat16)
    if experts and top_k:
        assert np.asarray(run(x, params, ids, weights, backend=backend)).any()
        return
    params = params if experts else no_experts()
    ids, weights = np.asarray(ids)[:, :top_k], np.asarray(weights)[:, :top_k]

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def total(x, weights):
        y = run(x, params, ids, weights, backend=backend)
        return y.astype(jnp.float32).sum(), y

    (_, y), bars = total(x, weights)
    assert y.shape == x.shape
    for array in (y, *bars):
        assert not np.asarray(array).any()


@pytest.mark.parametrize("backend", ["reference", None])
def test_a_grouped_gemm_without_groups_gives_zeros(backend):
    weight = no_experts().gate_up

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def total(x):
        sizes = np.zeros(0, np.int32)
        y = nvfp4.ops.grouped_gemm(x, weight, sizes, scheme="w4a16", backend=backend)
        return y.sum(), y

    (_, y), bar = total(np.ones((5, H), np.float32))
    assert not np.asarray(y).any()
    assert not np.asarray(bar).any()


def test_a_token_with_nan_or_inf_keeps_it_to_itself():
    x, params, ids, weights = layer()
    bad = np.array(x)
    bad[2, 5], bad[4, 7] = np.nan, np.inf
    for scheme in ("w4a16", "w4a4"):
        y = np.asarray(run(bad, params, ids, weights, scheme=scheme))
        clean = np.asarray(run(x, params, ids, weights, scheme=scheme))
        keep = [t for t in range(9) if t not in (2, 4)]
        np.testing.assert_array_equal(y[keep], clean[keep])
        assert not np.isfinite(y[[2, 4]]).any()


def test_biases_are_added():
    call = find_activation("silu")
    x, params, ids, weights = layer()
    biases = {"gate_up_bias": normal(E, 2 * I), "down_bias": normal(E, H)}
    params = dataclasses.replace(params, **biases)
    truth = moe_mlp_float64(x, params, ids, weights, call)
    yardstick = xla(x, params, ids, weights, call, jnp.float32)
    assert_as_accurate_as(run(x, params, ids, weights), yardstick, truth)


def test_memory_stays_under_one_layer():
    """The reference dequantizes one expert at a time, never a copy of all of them."""
    e, h, i = 64, 256, 256

    def make():
        keys = jax.random.split(jax.random.key(0))
        params = random_moe_params(keys[0], num_experts=e, hidden=h, intermediate=i)
        return jnp.zeros((4, h)), params, *random_routing(keys[1], 4, e, 2)

    op = jax.jit(lambda *a: nvfp4.ops.moe_mlp(*a, scheme="w4a16", backend="reference"))
    memory = op.lower(*jax.eval_shape(make)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3 * e * h * i * 4 / 4


HOPPER = nvfp4.Target("cuda", (9, 0))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("target", [None, HOPPER])
def test_prepare_changes_bytes_not_values(gated, target):
    _, params, _, _ = layer(activation="silu" if gated else "relu2")
    ready = nvfp4.prepare(params, target=target)
    assert (ready.hidden, ready.intermediate, ready.gated) == (H, I, gated)
    np.testing.assert_array_equal(ready.gate_up.dequantize(), params.gate_up.dequantize())
    np.testing.assert_array_equal(ready.down.dequantize(), params.down.dequantize())


def test_prepare_may_keep_the_arrays_or_take_them():
    params = nvfp4.testing.random_moe_params(
        jax.random.key(0), num_experts=2, hidden=64, intermediate=64
    )
    kept = nvfp4.prepare(params, target=HOPPER)
    assert not params.down.packed.is_deleted()
    taken = prepare_donated(params, target=HOPPER)
    assert params.down.packed.is_deleted()
    for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(taken), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_prepare_takes_the_layout_of_the_backend():
    _, params, _, _ = layer()
    hopper = nvfp4.prepare(params, target=HOPPER)
    assert (hopper.layout, hopper.gate_up.layout) == ("mma_64x64", "mma_64x64_gated")
    assert nvfp4.prepare(params, backend="reference").layout == "canonical"
    _, plain, _, _ = layer(activation="relu2")
    assert nvfp4.prepare(plain, target=HOPPER).gate_up.layout == "mma_64x64"
    again = nvfp4.prepare(hopper, backend="reference")
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_padded_weights_run_as_canonical_ones():
    """The layout pads every size here."""
    x, params, ids, weights = layer()
    ready = nvfp4.prepare(params, target=HOPPER)
    assert ready.down.packed.shape == (E, 64, 32)
    np.testing.assert_array_equal(run(x, ready, ids, weights), run(x, params, ids, weights))
    weight, rows = nvfp4.quantize(normal(24, 80)), normal(3, 80)
    padded = jax.jit(lambda weight: weight.to_layout("mma_64x64"))(weight)
    np.testing.assert_array_equal(linear(rows, padded), linear(rows, weight))


MESSAGES = [
    ({"x": jnp.zeros((9, 32))}, r"x: expected shape \[t, 64\], got \(9, 32\)"),
    (
        {"x": jnp.zeros((9, H), jnp.int8)},
        "x: expected bfloat16, float16 or float32, got int8",
    ),
    ({"ids": jnp.zeros((8, K), jnp.int32)}, r"expert_ids: expected shape \[9, k\]"),
    ({"ids": jnp.zeros((9, K))}, "expert_ids: expected integers, got float32"),
    ({"weights": jnp.zeros((9, K + 1))}, r"expert_weights: expected shape \(9, 3\)"),
    ({"activation": "relu2"}, "activation: expected a gated activation.*got 'relu2'"),
    ({"activation": "mish"}, "activation: expected one of"),
    ({"scheme": "w8a8"}, "scheme: expected None"),
    ({"backend": "cutlass"}, "backend: expected one of"),
]


@pytest.mark.parametrize(("change", "message"), MESSAGES)
def test_bad_arguments_are_named(change, message):
    x, params, ids, weights = layer()
    good = {"x": x, "params": params, "ids": ids, "weights": weights, "scheme": "w4a16"}
    arguments = {**good, **change}
    positional = [arguments.pop(name) for name in ("x", "params", "ids", "weights")]
    with pytest.raises(ValueError, match=message):
        nvfp4.ops.moe_mlp(*positional, **arguments)


@pytest.mark.parametrize("sizes", [[3, 0, 4], [0, 0, 0], [12, 0, 0], [5, 7, 300], [-2, 4, 4]])
def test_grouped_gemm_is_its_equation(sizes):
    weight, x = nvfp4.quantize(normal(3, 32, H)), normal(12, H, seed=1).astype(ml_dtypes.bfloat16)
    y = np.asarray(grouped_gemm(x, weight, np.array(sizes, np.int32)))
    truth, start = np.zeros((12, 32)), 0
    values = np.asarray(weight.dequantize(), np.float64)
    for expert, size in enumerate(np.maximum(sizes, 0)):
        rows = slice(start, min(12, start + size))
        truth[rows] = np.asarray(x, np.float64)[rows] @ values[expert].T
        start += size
    yardstick = truth.astype(np.float32).astype(ml_dtypes.bfloat16)
    assert_as_accurate_as(y, yardstick, truth)
    with pytest.raises(AssertionError):
        assert_as_accurate_as(y + y.dtype.type(0.5), yardstick, truth)


def test_linear_takes_leading_axes_bias_and_input_scale():
    weight, x = nvfp4.quantize(normal(24, H)), normal(2, 3, H)
    values, bias = np.asarray(weight.dequantize()), np.arange(24, dtype=np.float32)
    y = linear(x, weight, bias=bias)
    assert y.shape == (2, 3, 24)
    yardstick = np.asarray(product(x, values.T)) + bias
    assert_as_accurate_as(y, yardstick, x.astype(np.float64) @ values.T + bias)
    scale = np.float32(4 / 2688)
    y = linear(x, weight, input_scale=scale, scheme="w4a4")
    rounded = np.asarray(round_rows(x, scale))
    want = rounded.astype(np.float64) @ values.T
    assert_as_accurate_as(y, product(rounded, values.T), want)


@pytest.mark.parametrize("rows", [1, 2, 127, 128, 129])
def test_a_compiled_linear_of_any_number_of_rows(rows):
    """The reference takes chunks of 128 rows: test less than one, exactly one, and more."""
    weight, x = nvfp4.quantize(normal(24, H)), normal(rows, H)
    values = np.asarray(weight.dequantize())
    want = x.astype(np.float64) @ values.T
    assert_as_accurate_as(linear(x, weight), product(x, values.T), want)


def test_grouped_gemm_and_linear_name_bad_arguments():
    weight = nvfp4.quantize(jnp.ones((3, 32, H)))
    with pytest.raises(ValueError, match=r"group_sizes: expected integers of shape \(3,\)"):
        nvfp4.ops.grouped_gemm(jnp.ones((4, H)), weight, jnp.ones(2, jnp.int32))
    with pytest.raises(ValueError, match=r"x: expected shape \[m, 64\], got \(4, 32\)"):
        nvfp4.ops.grouped_gemm(jnp.ones((4, 32)), weight, jnp.ones(3, jnp.int32))
    with pytest.raises(ValueError, match=r"weight: expected shape \[n, k\], got \(3, 32, 64\)"):
        nvfp4.ops.linear(jnp.ones((4, H)), weight)


def test_quantize_nvfp4_is_formats_quantize():
    x = jnp.asarray(normal(130, 80).astype(ml_dtypes.bfloat16))
    got = nvfp4.ops.quantize_nvfp4(x, backend="reference")
    want = nvfp4.quantize(x)
    np.testing.assert_array_equal(got.packed, want.packed)
    np.testing.assert_array_equal(got.global_scale, want.global_scale)
    tiles = nvfp4.ops.quantize_nvfp4(x, scale_layout="swizzle_128x4", backend="reference")
    assert tiles.block_scale.shape == (256, 8)
    np.testing.assert_array_equal(tiles.to_layout("canonical").dequantize(), want.dequantize())
    with pytest.raises(ValueError, match="scale_layout: expected one of"):
        nvfp4.ops.quantize_nvfp4(x, scale_layout="tiled")
    with pytest.raises(ValueError, match="multiple of 16"):
        nvfp4.ops.quantize_nvfp4(x[:, :40])


def test_ops_vmap():
    x, params, ids, weights = layer()

    def op(x, i, w):
        return nvfp4.ops.moe_mlp(x, params, i, w, scheme="w4a16", backend="reference")

    both = np.stack([x, 2 * np.asarray(x)])
    stacked = jax.jit(jax.vmap(op))(both, np.stack([ids, ids]), np.stack([weights, weights]))
    call = find_activation("silu")
    for y, rows in zip(np.asarray(stacked), both, strict=True):
        yardstick = xla(rows, params, ids, weights, call, jnp.float32)
        assert_as_accurate_as(y, yardstick, moe_mlp_float64(rows, params, ids, weights, call))
