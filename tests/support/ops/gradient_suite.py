"""The gradients that run on a kernel for transposed weights, on a device or emulated.

Whoever inherits a suite has the fixture `target`: the `Target` to lower for, where kernels run.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.axes import axis
from support.ops.expert_gradients import (
    NAMES,
    assert_accurate,
    assert_as_the_model,
    exact,
    gradients,
    layer,
    normal,
    of_xla,
    ours,
)
from support.ops.expert_layer import E, H, K

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.ops.experts.meaning import round_activations
from jax_nvfp4_moe.ops.running import find_plan
from jax_nvfp4_moe.scheme import Scheme
from jax_nvfp4_moe.testing import assert_as_accurate_as, moe_mlp_xla

# Name -> sizes of groups, number of rows, and rows n and columns k of the weights. There are empty
# groups, rows of no group, sizes that are no whole tiles, and tiles of 16, 64 and 128 rows.
PRODUCTS = {
    "few_rows": ((2, 0, 3), 6, 96, 80),
    "one_group": ((40,), 40, 208, 336),
    "rows_of_no_group": ((9, 0, 10), 30, 64, 64),
    "tiles_of_64": ((90, 30), 120, 272, 144),
    "tiles_of_128": ((200, 5, 140), 345, 336, 208),
    "split_k": ((70,), 70, 2064, 144),
    "no_rows": ((0, 0), 0, 64, 64),
}


def product_gradient(x, weight, sizes, bar, **options):
    """Return the gradient to the rows of a grouped GEMM, for the cotangent `bar`."""

    def total(x):
        y = nvfp4.ops.grouped_gemm(x, weight, sizes, scheme="w4a16", **options)
        return jnp.sum(y.astype(jnp.float32) * bar.astype(jnp.float32))

    return jax.jit(jax.grad(total))(x)


class ProductGradientSuite:
    """Gradients of `grouped_gemm` and of `linear`."""

    case = axis(*PRODUCTS)
    dtype = axis("bfloat16", "float16")

    def operands(self, case, dtype, parts=1):
        sizes, m, n, k = PRODUCTS[case]
        rows = jnp.asarray(normal(1, m, k), dtype)
        bar = jnp.asarray(normal(2, m, n), dtype)
        weight = nvfp4.quantize(jnp.asarray(normal(3, len(sizes), n, k)))
        if parts > 1:
            factors = np.linspace(0.5, 1.5, parts, dtype=np.float32)
            scale = weight.global_scale[:, None] * factors[None]
            weight = dataclasses.replace(weight, global_scale=scale)
        return rows, weight, np.asarray(sizes, np.int32), bar

    def check(self, got, weight, sizes, bar):
        matrices, bars = np.asarray(weight.dequantize(), np.float64), np.asarray(bar, np.float64)
        own = np.repeat(np.arange(len(sizes)), sizes)
        truth, plain = np.zeros(got.shape), np.zeros(got.shape, np.float32)
        for group in range(len(sizes)):
            rows = np.flatnonzero(own == group)
            truth[rows] = bars[rows] @ matrices[group]
            plain[rows] = jnp.matmul(bar[rows], weight.dequantize(bar.dtype)[group])
        assert_as_accurate_as(got, plain, truth)
        return truth, plain

    def test_rows_get_the_gradient_of_the_dequantized_product(self, target, case, dtype):
        rows, weight, sizes, bar = self.operands(case, dtype)
        ready = nvfp4.prepare(weight, target=target, dtype=dtype)
        got = product_gradient(rows, ready, sizes, bar, target=target)
        assert got.dtype == rows.dtype
        if len(rows) == 0:
            assert got.shape == rows.shape
            return
        truth, plain = self.check(got, weight, sizes, bar)
        with pytest.raises(AssertionError, match="yardstick"):
            assert_as_accurate_as(np.roll(np.asarray(got), 1, axis=1), plain, truth)

    @pytest.mark.parametrize("parts", [2, 96])
    def test_parts_with_global_scales_of_their_own(self, target, parts):
        rows, weight, sizes, bar = self.operands("few_rows", "bfloat16", parts)
        ready = nvfp4.prepare(weight, target=target)
        self.check(product_gradient(rows, ready, sizes, bar, target=target), weight, sizes, bar)

    def test_a_linear_layer_whose_outputs_are_no_multiple_of_16(self, target):
        x = jnp.asarray(normal(1, 3, 5, 80), jnp.bfloat16)
        bar = jnp.asarray(normal(2, 3, 5, 77), jnp.bfloat16)
        weight = nvfp4.quantize(jnp.asarray(normal(3, 77, 80)))
        bias = jnp.asarray(normal(4, 77))
        ready = nvfp4.prepare(weight, target=target)

        def total(x, bias):
            y = nvfp4.ops.linear(x, ready, bias=bias, scheme="w4a16", target=target)
            return jnp.sum(y.astype(jnp.float32) * bar.astype(jnp.float32))

        got, bias_bar = jax.jit(jax.grad(total, (0, 1)))(x, bias)
        rows = bar.reshape(-1, 77)
        truth = np.asarray(rows, np.float64) @ np.asarray(weight.dequantize(), np.float64)
        plain = jnp.matmul(rows, weight.dequantize(jnp.bfloat16))
        assert_as_accurate_as(np.asarray(got).reshape(-1, 80), plain, truth)
        bars = np.asarray(rows, np.float64)
        # Each of 15 additions rounds by half of 2^-23 of a partial sum at most.
        bound = len(bars) * 2**-24 * np.abs(bars).sum(0).max()
        np.testing.assert_allclose(bias_bar, bars.sum(0), atol=bound)

    def test_the_same_bits_each_time(self, target):
        rows, weight, sizes, bar = self.operands("tiles_of_128", "bfloat16")
        ready = nvfp4.prepare(weight, target=target)
        one, other = (product_gradient(rows, ready, sizes, bar, target=target) for _ in range(2))
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


class LayerGradientSuite:
    """Gradients of `moe_mlp`.

    Attributes:
      kernel: name of the record that multiplies by transposed weights.
    """

    kernel = "transposed_gemm_sm90"
    activation = axis("silu", "swigluoai", "relu2", "gelu_tanh")
    dtype = axis("bfloat16", "float16")

    def operands(self, target, tokens=9, **options):
        x, params, ids, weights = layer(tokens, **options)
        return x, params, nvfp4.prepare(params, target=target, dtype=x.dtype), ids, weights

    def test_the_kernel_is_chosen(self, target, dtype):
        plan = find_plan("transposed_gemm", target=target, dtype=dtype, num_experts=E)
        assert plan.backend.name == self.kernel

    def test_gradients_are_those_of_the_dequantized_model(self, target, activation, dtype):
        options = {"activation": activation, "dtype": jnp.dtype(dtype)}
        x, params, ready, ids, weights = self.operands(target, **options)
        got = ours(x, ready, ids, weights, activation=activation, target=target)
        assert got["x"].dtype == x.dtype
        assert got["expert_weights"].dtype == jnp.float32
        call = find_activation(activation)
        assert_as_the_model(got, x, params, ids, weights, call)
        wrong = ours(x, ready, (ids + 1) % E, weights, activation=activation, target=target)
        given = x, params, ids, weights, call
        yardstick, truth = of_xla(*given), exact(*given)
        for name in NAMES:
            with pytest.raises(AssertionError, match="yardstick"):
                assert_as_accurate_as(wrong[name], yardstick[name], truth[name])

    @pytest.mark.parametrize("tokens", [0, 300])
    def test_token_counts(self, target, tokens):
        call = find_activation("silu")
        x, params, ready, ids, weights = self.operands(target, tokens, dtype=jnp.bfloat16)
        got = ours(x, ready, ids, weights, target=target)
        assert got["x"].shape == (tokens, H)
        assert got["expert_weights"].shape == (tokens, K)
        if tokens:
            assert_as_the_model(got, x, params, ids, weights, call)

    def test_more_slots_than_a_chunk(self, target, monkeypatch):
        """Tokens are cut into chunks; the last one is padded with tokens of no expert."""
        call = find_activation("silu")
        x, params, ready, ids, weights = self.operands(target, 40, dtype=jnp.bfloat16)
        slots = dict.fromkeys(("cpu", "cuda"), 51)
        monkeypatch.setattr("jax_nvfp4_moe.ops.experts.backward._CHUNK_SLOTS", slots)
        jax.clear_caches()
        got = ours(x, ready, ids, weights, target=target)
        jax.clear_caches()
        assert_as_the_model(got, x, params, ids, weights, call)

    @pytest.mark.parametrize("scheme", ["w4a4", "w4a4_unit_scale", "w4a4_token_scale"])
    def test_rounded_activations_count_as_the_identity(self, target, scheme):
        call = find_activation("silu")
        x, params, ids, weights = layer(dtype=jnp.bfloat16)
        how = {"scheme": scheme, "target": target}

        def rounded(rows, expert, product):
            scale = (params.gate_up_input_scale, params.down_input_scale)[product][expert]
            rows32 = rows.astype(jnp.float32)
            return round_activations(rows32, scale, Scheme(scheme)).astype(rows.dtype)

        truth = exact(x, params, ids, weights, call, rounded=rounded)
        plain = exact(x, params, ids, weights, call)
        got = ours(x, nvfp4.prepare(params, **how), ids, weights, **how)
        # The forward product that runs again has 16 bits, and numbers near the middle between two
        # FP4 codes may get the other one. So only most of what rounding does must be there.
        for name in ("x", "expert_weights"):
            found = np.float64(got[name])
            assert np.linalg.norm(found - truth[name]) < np.linalg.norm(found - plain[name]) / 2

    def test_weights_on_the_input(self, target):
        call = find_activation("silu")
        x, params, ready, _, _ = self.operands(target, dtype=jnp.bfloat16)
        ids = np.array([[1]] * 8 + [[3]], np.int32)
        weights = np.linspace(0.1, 0.9, 9, dtype=np.float32)[:, None]
        how = {"weight_on_input": True, "target": target}
        truth = exact(x, params, ids, weights, call, on_input=True)

        def run(x, params, weights):  # plain XLA takes no weight on the input
            scaled = (x.astype(jnp.float32) * weights).astype(x.dtype)
            return moe_mlp_xla(scaled, params, ids, jnp.ones((9, 1)), call, x.dtype)

        yardstick = jax.jit(functools.partial(gradients, run))(x, params, weights)
        assert_accurate(ours(x, ready, ids, weights, **how), yardstick, truth)

    def test_ids_out_of_range_get_no_gradient(self, target):
        call = find_activation("silu")
        x, params, ready, ids, weights = self.operands(target, dtype=jnp.bfloat16)
        bad = np.array([-1, E, 2**31 - 1, -(2**31)], np.int32)
        token, some = np.arange(9), np.array(ids)
        some[token, token % K] = bad[token % 4]
        got = ours(x, ready, some, weights, target=target)
        assert_as_the_model(got, x, params, some, weights, call)
        assert not np.asarray(got["expert_weights"])[token, token % K].any()
        none = ours(x, ready, np.full_like(ids, -1), weights, target=target)
        assert not any(np.asarray(none[name]).any() for name in NAMES)

    def test_a_token_with_nan_keeps_it_to_itself(self, target):
        x, _, ready, ids, weights = self.operands(target, dtype=jnp.bfloat16)
        ids, bad = np.where(ids == 1, 0, ids), np.array(x)
        ids[[2, 4]] = 1
        bad[2, 5], bad[4, 7] = np.nan, np.inf
        clean, dirty = (
            jax.tree.map(np.asarray, ours(jnp.asarray(r), ready, ids, weights, target=target))
            for r in (x, bad)
        )
        tokens, experts = [0, 1, 3, 5, 6, 7, 8], [0, 2, 3, 4]
        for name in NAMES:
            keep = experts if name.endswith("bias") else tokens
            np.testing.assert_array_equal(dirty[name][keep], clean[name][keep])
        assert not np.isfinite(dirty["x"][[2, 4]].astype(np.float32)).any()
