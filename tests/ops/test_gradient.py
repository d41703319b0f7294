"""Test that gradients are those of the dequantized model, whichever kernel ran forward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.ops.expert_gradients import (
    NAMES,
    assert_accurate,
    assert_as_the_model,
    cotangent,
    exact,
    gradients,
    layer,
    normal,
    of_xla,
    ours,
)
from support.ops.expert_layer import E, H, I, K

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.numerics.activations import activate, find_activation
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import DenseExperts
from jax_nvfp4_moe.ops import gradient
from jax_nvfp4_moe.ops.dense import dense_fp8
from jax_nvfp4_moe.ops.dense_moe import dense_moe
from jax_nvfp4_moe.ops.experts.meaning import round_activations
from jax_nvfp4_moe.ops.records import RECORDS
from jax_nvfp4_moe.scheme import FP8ActivationScaling, Scheme
from jax_nvfp4_moe.testing import (
    assert_as_accurate_as,
    moe_mlp_float64,
    moe_mlp_xla,
    random_moe_params,
    random_routing,
)

# Where a device has kernels, the backward pass multiplies all rows at once. Otherwise it visits one
# expert at a time, as it does with the reference.
backends = pytest.mark.parametrize("backend", [None, "reference"])


# One activation of each kind: gated, interleaved with limits and parameters, not gated, and with
# another function.
@backends
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2", "gelu_tanh"])
def test_gradients_are_those_of_the_dequantized_model(activation, backend):
    call = find_activation(activation)
    x, params, ids, weights = layer(activation=activation)
    actual = ours(x, params, ids, weights, activation=activation, backend=backend)
    assert_as_the_model(actual, x, params, ids, weights, call)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_in_16_bits(dtype):
    call = find_activation("silu")
    x, params, ids, weights = layer(dtype=dtype)
    actual = ours(x, params, ids, weights)
    assert actual["x"].dtype == dtype
    assert actual["expert_weights"].dtype == jnp.float32
    assert_as_the_model(actual, x, params, ids, weights, call)


def test_the_exact_gradient_agrees_with_differences_and_the_bound_catches():
    """Differences of a second model confirm the float64 model, and swapped experts are caught."""
    call = find_activation("silu")
    x, params, ids, weights = layer()
    truth = exact(x, params, ids, weights, call)
    way, start = np.random.default_rng(0).normal(size=x.shape), np.asarray(x, np.float64)
    ahead, behind = (
        np.sum(
            moe_mlp_float64(start + s * way, params, ids, weights, call) * np.asarray(cotangent(x))
        )
        for s in (1e-5, -1e-5)
    )
    # Central differences have an error of 1e-10 from truncation and 1e-16 / 1e-5 from rounding.
    assert (ahead - behind) / 2e-5 == pytest.approx(np.sum(truth["x"] * way), rel=1e-7)
    yardstick = of_xla(x, params, ids, weights, call)
    wrong = ours(x, params, (ids + 1) % E, weights)
    for name in NAMES:
        with pytest.raises(AssertionError, match=r"over 2\.0 x"):
            assert_as_accurate_as(wrong[name], yardstick[name], truth[name])


LAYOUTS_OF_KERNELS = (
    ("cpu_16x16", True),
    ("mma_64x64", True),
    ("mma_64x64", False),
    ("fp4_64x64", True),
    ("fp4_128x64", True),
)


@pytest.mark.parametrize(("layout", "gated"), LAYOUTS_OF_KERNELS)
def test_weights_in_the_layout_of_a_kernel(layout, gated):
    """The same values in another byte order, with padding, have the same gradient to the bit."""
    activation = "silu" if gated else "relu2"
    x, params, ids, weights = layer(activation=activation)
    options = {"backend": "reference", "activation": activation}
    want = ours(x, params, ids, weights, **options)
    got = ours(x, params.to_layout(layout), ids, weights, **options)
    for name in NAMES:
        np.testing.assert_array_equal(got[name], want[name])


def test_gate_and_up_with_scales_of_their_own_and_divisors():
    """compressed-tensors stores global scales as divisors, so that values are divided."""
    call = find_activation("silu")
    x, params, ids, weights = layer()
    assert params.gate_up.global_scale.shape == (E, 2)
    divided = dataclasses.replace(params.down, global_divisor=1 / params.down.global_scale)
    params = dataclasses.replace(params, down=divided)
    actual = ours(x, params, ids, weights, backend="reference")
    assert_as_the_model(actual, x, params, ids, weights, call)


@pytest.mark.parametrize("scheme", ["w4a4", "w4a4_unit_scale", "w4a4_token_scale"])
def test_rounded_activations_count_as_the_identity(scheme):
    """The GEMMs see rounded rows. The derivative of rounding is 1 (straight-through)."""
    call = find_activation("silu")
    x, params, ids, weights = layer()

    def rounded(rows, expert, product):
        scale = (params.gate_up_input_scale, params.down_input_scale)[product][expert]
        return round_activations(rows.astype(jnp.float32), scale, Scheme(scheme)).astype(rows.dtype)

    truth = exact(x, params, ids, weights, call, rounded=rounded)
    plain = exact(x, params, ids, weights, call)
    yardstick = of_xla(x, params, ids, weights, call)
    # The yardstick does not round, so its error is taken from the model without rounding.
    allowed = {name: truth[name] + yardstick[name] - plain[name] for name in NAMES}
    assert_accurate(ours(x, params, ids, weights, scheme=scheme), allowed, truth)
    assert np.abs(truth["x"] - plain["x"]).max() > 1e-3 * np.abs(plain["x"]).max()


@backends
def test_weights_on_the_input(backend):
    """Each token has one expert, as in Llama 4. The yardstick weights the tokens itself."""
    call = find_activation("silu")
    x, params, _, _ = layer()
    ids = np.array([[1]] * 8 + [[3]], np.int32)
    weights = np.linspace(0.1, 0.9, 9, dtype=np.float32)[:, None]

    def run(x, params, weights):
        return moe_mlp_xla(x * weights, params, ids, jnp.ones((9, 1)), call, jnp.float32)

    yardstick = jax.jit(functools.partial(gradients, run))(x, params, weights)
    truth = exact(x, params, ids, weights, call, on_input=True)
    how = {"weight_on_input": True, "backend": backend}
    assert_accurate(ours(x, params, ids, weights, **how), yardstick, truth)


@backends
@pytest.mark.parametrize("tokens", [0, 300])
def test_token_counts(tokens, backend):
    """The 300 slots of one expert are processed in three pieces."""
    call = find_activation("silu")
    x, params, ids, weights = layer(tokens)
    if tokens == 300:
        ids = np.tile(np.array([2, -1, -1], np.int32), (tokens, 1))
    actual = ours(x, params, ids, weights, backend=backend)
    assert {name: actual[name].shape for name in NAMES} == {
        "x": (tokens, H),
        "expert_weights": (tokens, K),
        "gate_up_bias": (E, 2 * I),
        "down_bias": (E, H),
    }
    if tokens == 0:
        assert not np.asarray(actual["down_bias"]).any()
        return
    assert_as_the_model(actual, x, params, ids, weights, call)


def test_single_tokens():
    """Many are compared together, because the yardstick's error of a single one may be small."""
    call = find_activation("silu")
    x, params, ids, weights = layer(16)
    x, ids, weights = map(np.asarray, (x, ids, weights))

    def each(run, *further):
        rows = [slice(token, token + 1) for token in range(16)]
        found = [run(x[row], params, ids[row], weights[row], *further) for row in rows]
        return {name: np.stack([one[name] for one in found]) for name in NAMES}

    actual, each_xla, truth = each(ours), each(of_xla, call), each(exact, call)
    assert_accurate(actual, each_xla, truth)
    assert actual["x"].shape == (16, 1, H)
    for name in NAMES:
        wrong = actual | {name: np.roll(actual[name], 1, axis=-1)}
        with pytest.raises(AssertionError, match="yardstick"):
            assert_accurate(wrong, each_xla, truth)


@backends
def test_ids_out_of_range_get_no_gradient(backend):
    x, params, ids, weights = layer()
    bad = np.array([-1, E, 2**31 - 1, -(2**31)], np.int32)
    token, some = np.arange(9), np.array(ids)
    some[token, token % K] = bad[token % 4]
    call = find_activation("silu")
    actual = ours(x, params, some, weights, backend=backend)
    assert_accurate(
        actual, of_xla(x, params, some, weights, call), exact(x, params, some, weights, call)
    )
    assert not np.asarray(actual["expert_weights"])[token, token % K].any()
    none = ours(x, params, np.full_like(ids, -1), weights, backend=backend)
    assert not any(np.asarray(none[name]).any() for name in NAMES)


@backends
def test_a_token_with_nan_keeps_it_to_itself(backend):
    """Only tokens 2 and 4 go to expert 1, and they share a piece with slots of other tokens."""
    x, params, ids, weights = layer()
    ids, bad = np.where(ids == 1, 0, ids), np.array(x)
    ids[[2, 4]] = 1
    bad[2, 5], bad[4, 7] = np.nan, np.inf
    clean, dirty = (
        jax.tree.map(np.asarray, ours(r, params, ids, weights, backend=backend)) for r in (x, bad)
    )
    tokens, experts = [0, 1, 3, 5, 6, 7, 8], [0, 2, 3, 4]
    for name in NAMES:
        keep = experts if name.endswith("bias") else tokens
        np.testing.assert_array_equal(dirty[name][keep], clean[name][keep])
    assert not np.isfinite(dirty["x"][[2, 4]]).any()


def test_ours_is_the_kernel_and_nothing_more_without_a_gradient():
    """The inference program has one call, and is the one that the lowering gives alone."""
    x, params, ids, weights = layer()
    target = nvfp4.Target("cuda", (9, 0))
    params = nvfp4.prepare(params, target=target, scheme="w4a16")
    options = {"scheme": "w4a16", "target": target}

    def lower(run):
        traced = jax.jit(run).trace(x, params, ids, weights)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    def forward(x, params, ids, weights):
        return nvfp4.ops.moe_mlp(x, params, ids, weights, **options)

    def backward(x, params, ids, weights):
        return jax.grad(lambda x: forward(x, params, ids, weights).sum())(x)

    def plain(x, params, ids, weights):
        (record,) = (b for b in RECORDS if b.name == "moe_w4a16_sm90")
        how = {"scheme": Scheme.W4A16, "call": find_activation("silu"), "weight_on_input": False}
        return record.lower["moe_mlp"](x, params, ids, weights, **how)

    assert lower(forward).replace("jit_forward", "jit_plain") == lower(plain)
    assert lower(forward).count("custom_call @nvfp4_moe") == 1
    assert lower(backward).count("custom_call @nvfp4_moe") <= 1


def test_memory_of_the_backward_pass_stays_under_one_layer():
    """One expert's weights are in float32 at a time, never those of all experts."""
    e, h, i = 64, 256, 256
    run = functools.partial(nvfp4.ops.moe_mlp, scheme="w4a16", backend="reference")
    total = jax.jit(jax.grad(lambda *operands: run(*operands).sum()))
    for layout in ("canonical", "mma_64x64"):

        def make(layout=layout):
            keys = jax.random.split(jax.random.key(0))
            params = random_moe_params(keys[0], num_experts=e, hidden=h, intermediate=i)
            return jnp.zeros((4, h)), params.to_layout(layout), *random_routing(keys[1], 4, e, 2)

        compiled = total.lower(*jax.eval_shape(make)).compile()
        # The bound is a quarter of the layer in float32. Its packed bytes are an eighth.
        assert compiled.memory_analysis().temp_size_in_bytes < 3 * e * h * i * 4 / 4


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "rows"),
    [(1, 8, 128, 2), (4, 2, 64, 2), (16, 8, 64, 4), (256, 8, 64, 64), (4096, 8, 8, 128)],
)
def test_an_expert_computes_about_as_many_rows_as_it_has(tokens, top_k, experts, rows):
    """A chunk is computed as a whole, also if one of its rows is used."""
    assert gradient._chunk_rows(tokens, top_k, experts) == rows


def test_calls_without_jit_compile_the_backward_pass_once():
    """Each call makes new functions. They must be equal to those of the call before."""
    x, params, ids, weights = layer()
    dense = DenseExperts(jnp.asarray(normal(0, E, 2 * I, H)), jnp.asarray(normal(1, E, H, I)))

    def total(x):
        y = nvfp4.ops.moe_mlp(x, params, ids, weights, scheme="w4a16")
        return jnp.sum(y) + jnp.sum(dense_moe(x, dense, ids, weights))

    first = jax.grad(total)(x)
    programs = gradient.visit_experts._cache_size()
    np.testing.assert_array_equal(jax.grad(total)(x), first)
    assert gradient.visit_experts._cache_size() == programs


def test_exported_for_any_number_of_tokens():
    """The backward pass must know how many tokens there are only where it cuts them into chunks."""
    x, params, ids, weights = layer()
    weight = jax.tree.map(lambda leaf: leaf[0], params.down)

    def total(x, ids, weights, bar):
        y = nvfp4.ops.moe_mlp(x, params, ids, weights, scheme="w4a16")
        inner = jnp.sin(x)[:, : params.intermediate]
        return jnp.sum((y + nvfp4.ops.linear(inner, weight, scheme="w4a16")) * bar)

    run = jax.jit(jax.grad(total, (0, 2)))
    given = x, jnp.asarray(ids), jnp.asarray(weights), jnp.asarray(cotangent(x))
    (t,) = jax.export.symbolic_shape("t")
    shapes = [jax.ShapeDtypeStruct((t, *one.shape[1:]), one.dtype) for one in given]
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in KERNELS]
    exported = jax.export.export(run, disabled_checks=allowed)(*shapes)
    for tokens in (1, 9):
        some = [one[:tokens] for one in given]
        call, operands = find_activation("silu"), (some[0], params, *some[1:3])
        yardstick, truth = (dict(find(*operands, call, bar=some[3])) for find in (of_xla, exact))
        for found, dtype in ((yardstick, np.float32), (truth, np.float64)):
            inner = np.asarray(some[3], dtype) @ np.asarray(weight.dequantize(), dtype)
            beside = np.zeros(some[0].shape, dtype)
            slope = np.cos(np.asarray(some[0], dtype))
            beside[:, : params.intermediate] = inner * slope[:, : params.intermediate]
            found["x"] = found["x"] + beside
        for name, got in zip(("x", "expert_weights"), exported.call(*some), strict=True):
            assert_as_accurate_as(got, yardstick[name], truth[name])
            with pytest.raises(AssertionError, match="yardstick"):
                assert_as_accurate_as(got * (1 + 2**-10), yardstick[name], truth[name])


KERNELS = tuple(name for record in RECORDS for name in record.ffi_targets if name.endswith("_cpu"))


def test_rematerialized_and_mapped():
    x, params, ids, weights = layer()

    def total(x, weights):
        return jnp.sum(nvfp4.ops.moe_mlp(x, params, ids, weights, scheme="w4a16") * cotangent(x))

    want = jax.jit(jax.grad(total))(x, weights)
    np.testing.assert_array_equal(jax.jit(jax.grad(jax.checkpoint(total)))(x, weights), want)
    mapped = jax.jit(jax.vmap(jax.grad(total)))(np.stack([x, x]), np.stack([weights, weights]))
    given = x, params, ids, weights, find_activation("silu")
    for one in np.asarray(mapped):
        assert_as_accurate_as(one, of_xla(*given)["x"], exact(*given)["x"])


@functools.cache
def matrices():
    return nvfp4.quantize(normal(0, 3, 32, H)), normal(1, 12, H), normal(2, 32)


@jax.jit
def product(x, y):
    """Return the yardstick: a plain float32 GEMM."""
    return jnp.matmul(x, y, precision="highest")


@functools.partial(jax.jit, static_argnames="backend")
def grouped_gradient(x, weight, sizes, bar, backend):
    run = functools.partial(nvfp4.ops.grouped_gemm, backend=backend)
    return jax.grad(lambda x: jnp.sum(run(x, weight, sizes) * bar))(x)


@backends
@pytest.mark.parametrize("sizes", [[3, 0, 4], [0, 0, 0], [12, 0, 0], [5, 7, 300], [-2, 4, 4]])
def test_grouped_gemm(sizes, backend):
    """Compare with float64. Rows without a group get zeros."""
    weight, x, _ = matrices()
    bar, values = normal(5, 12, 32), np.asarray(weight.dequantize())
    truth, yardstick, start = np.zeros((12, H)), np.zeros((12, H), np.float32), 0
    for group, size in enumerate(np.maximum(sizes, 0)):
        rows = slice(start, min(12, start + size))
        truth[rows] = bar[rows].astype(np.float64) @ values[group].astype(np.float64)
        yardstick[rows] = np.asarray(product(bar, values[group]))[rows]
        start += size
    actual = grouped_gradient(x, weight, np.array(sizes, np.int32), bar, backend)
    assert_as_accurate_as(actual, yardstick, truth)
    assert not np.asarray(actual)[start:].any()


@backends
@pytest.mark.parametrize(
    ("rows", "scheme"), [((), "w4a16"), ((0,), "w4a16"), ((2, 3), "w4a4"), ((130,), "w4a16")]
)
def test_linear(rows, scheme, backend):
    """Leading axes and a bias are allowed. Under w4a4, the gradient passes straight through."""
    weight, _, bias = matrices()
    weight = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[0]), weight)
    x, bar = normal(5, *rows, H), normal(6, *rows, 32)
    scale = np.float32(4 / 2688) if scheme == "w4a4" else None

    def total(x, bias):
        how = {"input_scale": scale, "scheme": scheme, "backend": backend}
        return jnp.sum(nvfp4.ops.linear(x, weight, bias=bias, **how) * bar)

    x_bar, bias_bar = jax.jit(jax.grad(total, (0, 1)))(x, bias)
    values = np.asarray(jax.jit(type(weight).dequantize)(weight))
    truth = bar.astype(np.float64) @ values.astype(np.float64)
    assert_as_accurate_as(x_bar, product(bar, values), truth)
    flat = bar.reshape(-1, 32)
    assert_as_accurate_as(bias_bar, flat.sum(0), flat.astype(np.float64).sum(0))


def test_quantized_weights_are_frozen():
    """If a user differentiates by everything with a float dtype, quantized weights get zeros."""
    x, params, ids, weights = layer()

    def total(params):
        return jnp.sum(nvfp4.ops.moe_mlp(x, params, ids, weights, scheme="w4a16"))

    bars = jax.jit(jax.grad(total, allow_int=True))(params)
    assert bars.down.packed.dtype == jax.dtypes.float0
    for leaf in (bars.down.global_scale, bars.gate_up.global_scale, bars.down_input_scale):
        assert not np.asarray(leaf).any()
    assert np.asarray(bars.down_bias).any()


@pytest.mark.parametrize(
    "how",
    [
        "bfloat16",
        FP8ActivationScaling.WEIGHTS,
        FP8ActivationScaling.STATIC,
        FP8ActivationScaling.TOKEN,
    ],
)
def test_experts_and_linears_that_are_not_nvfp4(how):
    """Experts of mixed checkpoints are frozen too, and FP8 rounding counts as the identity."""
    first, second = normal(0, E, 2 * I, H) / 8, normal(1, E, H, I) / 8
    x, params, ids, weights = layer()
    scales = dict.fromkeys(("gate_up_input_scale", "down_input_scale"))
    if how == "bfloat16":
        stored = [w.astype(jnp.bfloat16) for w in (first, second)]
        values, options = [w.astype(jnp.float32) for w in stored], {}
    else:
        eighths = (w.astype(jnp.float8_e4m3fn) for w in (first, second))
        stored = [FP8Tensor(w, np.ones(w.shape[:2], np.float32)) for w in eighths]
        values, options = [w.values.astype(jnp.float32) for w in stored], {"activations": how}
        tenths = np.full(E, 0.1, np.float32)
        scales = dict.fromkeys(scales, tenths)  # values up to 45 do not saturate
    biases = {"gate_up_bias": params.gate_up_bias, "down_bias": params.down_bias}
    experts = jax.tree.map(jnp.asarray, DenseExperts(*stored, **biases, **scales))

    def total(x, weights):
        y = dense_moe(x, experts, ids, weights, **options)
        return jnp.sum(y * cotangent(x))

    def plain(x, weights):
        each = jnp.einsum("th,enh->etn", x, values[0], precision="highest")
        inner = activate(find_activation("silu"), each + biases["gate_up_bias"][:, None])
        y = jnp.einsum("eti,ehi->eth", inner, values[1], precision="highest")
        y += biases["down_bias"][:, None]
        hit = jnp.einsum("tke,tk->te", jax.nn.one_hot(ids, E), weights, precision="highest")
        return jnp.sum(jnp.einsum("te,eth->th", hit, y, precision="highest") * cotangent(x))

    @jax.jit
    def differentiate(*operands):
        return [jax.grad(each, (0, 1))(*operands) for each in (total, plain)]

    got, want = jax.tree.map(np.asarray, differentiate(x, weights))
    # E4M3 moves an activation by up to 1/16, which moves the derivative at that point too.
    bound = 1e-5 if how in ("bfloat16", FP8ActivationScaling.WEIGHTS) else 0.1
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a - b) < bound * np.linalg.norm(b)
        assert np.linalg.norm(a - np.roll(b, 1, 0)) > 0.5 * np.linalg.norm(b)


@pytest.mark.parametrize(
    "how", [FP8ActivationScaling.STATIC, FP8ActivationScaling.TOKEN, FP8ActivationScaling.TENSOR]
)
def test_a_rounded_fp8_linear_passes_gradients_straight_through(how):
    """A cast would also round the cotangent to E4M3. The gradient is the GEMM with the weights."""
    x, bar, values = normal(1, 3, 16), normal(2, 3, 8), normal(0, 8, 16).astype(jnp.float8_e4m3fn)
    weight = FP8Tensor(values, np.full(8, 0.5, np.float32))

    @jax.jit
    def differentiate(x, weight, bar):
        def total(x):
            y = dense_fp8(x, weight, activations=how, input_scale=jnp.float32(0.01))
            return jnp.sum(y * bar)

        return jax.grad(total)(x)

    wide = values.astype(np.float32) * np.float32(0.5)
    truth = bar.astype(np.float64) @ wide.astype(np.float64)
    assert_as_accurate_as(differentiate(x, weight, bar), product(bar, wide), truth)
    rounded = bar.astype(jnp.float8_e4m3fn).astype(np.float32)
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_as_accurate_as(rounded @ wide, product(bar, wide), truth)


@pytest.mark.parametrize(("groups", "rows"), [(1, 7), (3, 0), (5, 9), (4, 700), (300, 20)])
def test_sums_of_groups(groups, rows):
    """Negative sizes count as 0, sizes end at the last row, and NaN stays in its group."""
    rng = np.random.default_rng(rows)
    sizes = rng.integers(-1, 2 * rows // groups + 2, groups).astype(np.int32)
    values = normal(0, rows, 6)
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), rows)
    starts = np.concatenate([[0], ends[:-1]])
    expected = [values[a:b].astype(np.float64).sum(0) for a, b in zip(starts, ends, strict=True)]
    found = np.asarray(gradient.sum_groups(jnp.asarray(values), sizes, groups))
    # Of up to 700 terms, each addition rounds by half of 2^-23 at most.
    np.testing.assert_allclose(
        found, expected, atol=rows * 2**-24 * np.abs(values).sum(0).max(initial=0)
    )
    if (ends > starts).sum() > 1:
        first = np.flatnonzero(ends > starts)[0]
        values[starts[first]] = np.nan
        dirty = np.asarray(gradient.sum_groups(jnp.asarray(values), sizes, groups))
        assert np.isnan(dirty[first]).all()
        np.testing.assert_array_equal(np.delete(dirty, first, 0), np.delete(found, first, 0))
