"""Test NVFP4MoE: what it computes, what it decides, and its use in other models."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_nvfp4_moe import (
    NVFP4Linear,
    NVFP4MoE,
    Scheme,
    Target,
    explain,
    quantize,
    quantize_experts,
)
from jax_nvfp4_moe.nn.experts.moe import LatentProjections
from jax_nvfp4_moe.nn.experts.token_router import RouterCorrection
from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear
from jax_nvfp4_moe.nn.variables import NVFP4Param
from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.numerics.routing import Router, route
from jax_nvfp4_moe.ops.records import RECORDS
from jax_nvfp4_moe.testing import (
    assert_as_accurate_as,
    moe_mlp_float64,
    moe_mlp_xla,
    random_moe_params,
)

SIZES = {"num_experts": 8, "hidden": 64, "intermediate": 32}
HOPPER = Target("cuda", (9, 0))
xla = jax.jit(moe_mlp_xla, static_argnums=(4, 5))
call_block = jax.jit(lambda moe, x: moe(x))


@functools.cache
def weights_of_experts():
    return random_moe_params(jax.random.key(0), **SIZES)


def make(**changes):
    return NVFP4MoE(**{**SIZES, "top_k": 2, "rngs": nnx.Rngs(0)} | changes)


def tokens(*shape, dtype=jnp.float32):
    return np.random.default_rng(1).standard_normal((*shape, 64)).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_block_routes_runs_and_adds(dtype):
    """The truth is float64 on the same weights and routing; the yardstick is XLA in the dtype."""
    params = weights_of_experts()
    moe = make(params=params, dtype=dtype)
    x = tokens(5, dtype=dtype)
    ids, weights = moe.route(x)
    y = call_block(moe, x)
    assert y.dtype == dtype
    call = find_activation("silu")
    truth = moe_mlp_float64(x, params, ids, weights, call)
    yardstick = xla(x, params, ids, weights, call, dtype)
    assert_as_accurate_as(y, yardstick, truth)
    rolled = moe.experts(x, (ids + 1) % 8, weights)
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_as_accurate_as(rolled, yardstick, truth)


def test_leading_axes_and_dtypes_of_the_input():
    moe = make()
    x = tokens(2, 3)
    y, flat = moe(x), moe(x.reshape(6, 64))
    assert y.shape == (2, 3, 64)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y.reshape(6, 64), flat)
    ids, weights = moe.route(x)
    assert ids.shape == weights.shape == (2, 3, 2)
    assert (ids.dtype, weights.dtype) == (jnp.int32, jnp.float32)
    np.testing.assert_array_equal(moe.experts(x, ids, weights), y)
    assert moe(x[:0]).shape == (0, 3, 64)


def test_a_bias_of_the_logits_moves_choice_and_weights():
    """A correction (`router_bias`) of the same size would change only the choice."""
    bias = np.where(np.arange(8) == 3, 5.0, 0.0).astype(np.float32)
    router = Router(2, select="logits")
    biased = make(top_k=None, router=router, router_logit_bias=bias)
    weight, x = np.asarray(biased.token_router.weight.get_value(), np.float32), tokens(5)
    ids, weights = biased.route(x)
    logits = jnp.asarray(x @ weight.T + bias)
    want_ids, want_weights = route(router, logits)
    np.testing.assert_array_equal(ids, want_ids)
    # The block rounds the tokens to bfloat16 first.
    np.testing.assert_allclose(weights, want_weights, rtol=2.0**-6)
    assert (np.asarray(ids)[:, 0] == 3).all()
    assert np.asarray(weights)[:, 0].min() > 0.5
    plain = make(top_k=None, router=router).route(x)[1]
    assert np.abs(plain - want_weights).max() > 0.2
    with pytest.raises(ValueError, match="router_logit_bias: expected shape"):
        make(router_logit_bias=jnp.zeros(7))


def test_a_router_with_a_norm_and_factors():
    """The norm changes only what the router reads, and the factors change only the weights."""
    moe, x, scale = make(), tokens(5), np.linspace(0.5, 2.0, 8, dtype=np.float32)
    weight = moe.token_router.weight.get_value()
    other = make(router_weight=weight, router_norm=lambda x: -x, router_scale=scale)
    ids, weights = other.route(x)
    want_ids, want_weights = moe.route(-x)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(weights, np.asarray(want_weights) * scale[want_ids])
    np.testing.assert_array_equal(other(x), moe.experts(x, ids, weights))
    assert (np.asarray(ids) != np.asarray(moe.route(x)[0])).any()
    with pytest.raises(ValueError, match="router_scale: expected shape"):
        make(router_scale=jnp.zeros(7))


def test_token_ids_decide_experts():
    """The router weighs the experts of each token id, and does not choose any."""
    table = np.random.default_rng(0).permuted(np.tile(np.arange(8), (5, 1)), axis=1)[:, :2]
    moe, x = make(token_experts=jnp.asarray(table, jnp.int32)), tokens(5)
    token_ids = np.array([4, 0, 4, 1, 2], np.int32)
    ids, weights = moe.route(x, token_ids)
    np.testing.assert_array_equal(ids, table[token_ids])

    def shares(ids, dtype):
        rounded, weight = x.astype(jnp.bfloat16), moe.token_router.weight.get_value()
        logits = np.asarray(rounded, dtype) @ np.asarray(weight, dtype).T
        chosen = np.exp(np.take_along_axis(logits, np.asarray(ids), axis=1))
        return chosen / chosen.sum(axis=1, keepdims=True)

    yardstick, truth = (shares(ids, dtype) for dtype in (np.float32, np.float64))
    assert_as_accurate_as(weights, yardstick, truth)
    with pytest.raises(AssertionError, match=r"over 2\.0 x"):
        assert_as_accurate_as(np.asarray(weights)[:, ::-1], yardstick, truth)
    np.testing.assert_array_equal(moe(x, token_ids), moe.experts(x, ids, weights))
    chosen, _ = make().route(x, token_ids)  # without a table, the ids have no effect
    assert (np.sort(chosen) != np.sort(ids)).any()
    with pytest.raises(ValueError, match=r"token_ids: expected shape \(5,\), .* got None"):
        moe(x)
    with pytest.raises(ValueError, match="token_experts: expected shape"):
        make(token_experts=jnp.zeros((5, 3), jnp.int32))


def test_experts_that_are_elsewhere_add_nothing():
    moe = make()
    x = tokens(5)
    ids, weights = moe.route(x)
    nothing = moe.experts(x, np.full_like(ids, -1), weights)
    np.testing.assert_array_equal(nothing, np.zeros_like(nothing))


def test_router_logits_are_float32():
    """In bfloat16 these two logits would tie, and the lower expert id would win."""
    weight, x = np.zeros((8, 64), np.float32), np.zeros((5, 64), np.float32)
    weight[3, 0], weight[5, 0], x[:, 0] = 1.0, 1.0 + 2.0**-12, 1.0
    moe = make(top_k=1, router_weight=jnp.asarray(weight))
    assert (np.asarray(moe.route(x)[0]) == 5).all()


def test_a_gpu_multiplies_bfloat16_logits_as_they_are():
    """The program has one bfloat16 dot with float32 sums, one kernel, and no float32 weight."""
    moe = make(target=HOPPER, param_dtype=jnp.bfloat16)
    traced = jax.jit(lambda moe, x: moe.route(x)).trace(moe, tokens(5))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "(tensor<5x64xbf16>, tensor<8x64xbf16>, tensor<0xbf16>) -> tensor<5x8xf32>" in text
    assert "nvfp4_route_cuda" in text
    assert "8x64xf32" not in text


def test_a_correction_moves_the_choice_and_not_the_weights():
    router = Router(1, score="sigmoid", renormalize=False)
    bias = jnp.asarray(np.where(np.arange(8) == 6, np.float32(100), np.float32(0)))
    moe = make(top_k=None, router=router, router_bias=bias)
    ids, weights = moe.route(tokens(5))
    assert (np.asarray(ids) == 6).all()
    assert (np.asarray(weights) < 1).all()
    assert isinstance(moe.token_router.correction_bias, RouterCorrection)


def test_shared_experts_and_their_gate():
    shared = NVFP4Linear(64, 64, rngs=nnx.Rngs(1), dtype=jnp.float32)
    gate = DenseLinear(jnp.asarray(np.full((1, 64), 1 / 64, np.float32)), dtype=jnp.float32)
    alone = make(dtype=jnp.float32)
    x = tokens(5)
    both = make(dtype=jnp.float32, shared_experts=shared)
    np.testing.assert_array_equal(both(x), alone(x) + shared(x))
    gated = make(dtype=jnp.float32, shared_experts=shared, shared_gate=gate)
    # One program, as in the block: XLA may multiply and add in one step.
    expected = jax.jit(lambda y, gate, z: y + jax.nn.sigmoid(gate) * z)
    np.testing.assert_array_equal(gated(x), expected(alone(x), gate(x), shared(x)))


def test_latent_projections_narrow_the_experts_alone():
    enter = NVFP4Linear(64, 32, rngs=nnx.Rngs(1))
    leave = NVFP4Linear(32, 64, rngs=nnx.Rngs(2))
    shared = NVFP4Linear(64, 64, rngs=nnx.Rngs(3))
    moe = make(latent=LatentProjections(32, enter, leave), shared_experts=shared)
    assert moe.experts.params.get_value().hidden == 32
    x = tokens(5, dtype=jnp.bfloat16)
    routed = leave(moe.experts(enter(x), *moe.route(x)))
    np.testing.assert_array_equal(moe(x), routed + shared(x))


@pytest.mark.parametrize("activation", ["relu2", "swigluoai", "gelu_pytorch_tanh"])
def test_activations_with_and_without_a_gate(activation):
    moe = make(activation=activation)
    rows = 32 if activation == "relu2" else 64
    assert moe.experts.params.get_value().gate_up.shape == (8, rows, 64)
    assert bool(jnp.isfinite(moe(tokens(5))).all())


def test_rows_in_halves_are_refused_where_they_should_alternate():
    params = weights_of_experts()
    with pytest.raises(ValueError, match=r"alternate.*gate_up.global_scale of shape \(8, 2\)"):
        make(params=params, activation="swigluoai")
    with pytest.raises(ValueError, match="activation 'swigluoai_uninterleave'"):
        make(
            params=quantize_experts(*jnp.ones((2, 8, 32, 64)), jnp.ones((8, 64, 32))),
            activation="swigluoai",
        )


def test_parameters_of_an_activation():
    """With an alpha of 0, the sigmoid of the gate is 1/2."""
    params = weights_of_experts()
    call = find_activation("swigluoai_uninterleave", 0.0, 2.0, 0.5)
    moe = make(params=params, activation=call, dtype=jnp.float32)
    x = tokens(5)
    ids, weights = moe.route(x)
    truth = moe_mlp_float64(x, params, ids, weights, call)
    yardstick = xla(x, params, ids, weights, call, jnp.float32)
    assert_as_accurate_as(moe(x), yardstick, truth)


def test_the_scheme_is_settled_at_construction():
    params = weights_of_experts()
    given = {"params": params, "checkpoint_scheme": "w4a4"}
    assert make(**given, target=Target("cpu")).experts.scheme is Scheme.W4A16
    assert make(**given, target=Target("cpu"), scheme="checkpoint").experts.scheme is Scheme.W4A4
    assert make(**given, target=Target("cuda", (10, 0))).experts.scheme is Scheme.W4A4
    with pytest.raises(ValueError, match="w4a4 needs input scales"):
        make(scheme="w4a4")


def test_own_experts_without_input_scales_are_told_what_to_do():
    own = quantize_experts(*jnp.ones((2, 8, 32, 64)), jnp.ones((8, 64, 32)))
    told = (
        r"w4a4 needs input scales.*nvfp4\.calibrate\(model, batches, scheme='w4a4'\)"
        r".*gate_up_input_scale.*w4a4_token_scale"
    )
    with pytest.raises(ValueError, match=f"scheme: {told}"):
        make(params=own, scheme="w4a4")
    with pytest.raises(ValueError, match=f"params: {told}"):
        make(params=own, scheme="w4a4", checkpoint_scheme="w4a4")
    scale = jnp.full(8, 1 / 2688, jnp.float32)
    own = dataclasses.replace(own, gate_up_input_scale=scale, down_input_scale=scale)
    assert make(params=own, scheme="w4a4").experts.scheme is Scheme.W4A4
    with pytest.raises(ValueError, match=f"scheme: {told}"):
        make(params=own, scheme="w4a4", checkpoint_scheme="w4a16")


def test_experts_the_other_way_around_are_told_which_axis_is_which():
    """Flax kernels have inputs before outputs."""
    kernels = (*jnp.ones((2, 8, 64, 32)), jnp.ones((8, 32, 64)))
    message = r"params: expected params.down of shape \(8, 64, 32\).*got \(8, 32, 64\)\."
    with pytest.raises(ValueError, match=message + r".*kernel\.swapaxes\(1, 2\)"):
        make(params=quantize_experts(*kernels))
    make(params=quantize_experts(*(kernel.swapaxes(1, 2) for kernel in kernels)))


def test_weights_stand_in_the_layout_of_their_kernel():
    for module in (make(backend="reference"), make()):
        (record,) = (b for b in RECORDS if b.name == explain(module).backend)
        assert module.experts.params.get_value().layout == record.layout


def test_no_optimizer_sees_the_frozen_weights():
    moe = make(router_bias=jnp.zeros(8))
    assert nnx.to_pure_dict(nnx.state(moe, nnx.Param)).keys() == {"token_router"}
    assert isinstance(moe.experts.params, NVFP4Param)
    gradient = nnx.jit(nnx.grad(lambda moe: moe.route(tokens(5))[1].sum()))(moe)
    assert [path for path, _ in nnx.to_flat_state(gradient)] == [("token_router", "weight")]


@pytest.mark.parametrize("jit", [False, True])
def test_in_a_linen_model(jit):
    linen = nnx.bridge.to_linen(NVFP4MoE, *SIZES.values(), top_k=2)
    x = tokens(2, 3)
    variables = linen.init(jax.random.key(0), x)
    apply = jax.jit(linen.apply) if jit else linen.apply
    y = apply(variables, x)
    assert y.shape == x.shape
    assert float(jnp.abs(y).max()) > 0
    linear = nnx.bridge.to_linen(NVFP4Linear, 64, 32, use_bias=True)
    assert linear.apply(linear.init(jax.random.key(0), x), x).shape == (2, 3, 32)


def test_given_weights_in_a_linen_model():
    params = weights_of_experts()
    linen = nnx.bridge.to_linen(NVFP4MoE, *SIZES.values(), top_k=2, params=params)
    x = tokens(5)
    variables = linen.init(jax.random.key(0), x)
    expected = make(params=params, router_weight=variables["params"]["token_router"]["weight"])(x)
    np.testing.assert_array_equal(linen.apply(variables, x), expected)


def test_without_weights_rngs_are_required():
    """A router of zeros would send every token to the same experts."""
    with pytest.raises(ValueError, match=r"rngs: .* params, router_weight; got None"):
        make(rngs=None)
    params = weights_of_experts()
    with pytest.raises(ValueError, match=r"rngs: .* router_weight; got None"):
        make(params=params, rngs=None)
    make(params=params, router_weight=jnp.zeros((8, 64)), rngs=None)
    with pytest.raises(ValueError, match=r"rngs: .* weight; got None"):
        NVFP4Linear(64, 32)
    shapes = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    assert shapes.experts.params.get_value().num_experts == 8


def test_split_and_merge():
    moe = make()
    x = tokens(5)
    graph, state = nnx.split(moe)
    y = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
    np.testing.assert_array_equal(y, call_block(moe, x))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": None}, "router: expected one of top_k and router"),
        ({"router": Router(2)}, "router: expected one of top_k and router"),
        ({"activation": "tanh"}, "activation: expected one of"),
        ({"dtype": jnp.int8}, "dtype: expected bfloat16 or float16 or float32, got int8"),
        ({"hidden": 72}, "multiple of 16"),
        ({"router_weight": jnp.zeros((8, 32))}, r"router_weight: expected shape \(8, 64\)"),
        ({"router_bias": jnp.zeros(7)}, r"router_bias: expected shape \(8,\)"),
        ({"backend": "none"}, "backend: expected one of"),
    ],
)
def test_arguments_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_weights_that_do_not_fit():
    params = jax.tree.map(lambda leaf: np.asarray(leaf)[:4], weights_of_experts())
    message = r"params: expected params.down of shape \(8, 64, 32\).*; got \(4, 64, 32\)"
    with pytest.raises(ValueError, match=message):
        make(params=params)
    with pytest.raises(ValueError, match=r"weight: expected shape \(32, 64\)"):
        NVFP4Linear(64, 32, weight=quantize(jnp.ones((16, 64))))


@pytest.mark.parametrize("dispatch", ["all_to_all", "ragged"])
def test_dispatch_needs_an_axis_of_experts(dispatch):
    mesh = jax.make_mesh((1,), ("tensor",))
    with pytest.raises(ValueError, match=rf"dispatch: '{dispatch}' .* axis 'expert'.*'tensor': 1"):
        make(mesh=mesh, dispatch=dispatch)
    make(mesh=mesh)


def dense_block(xp, dtype, top_k, *given):
    """Compute a block as Flax models do, with kernels ``[inputs, outputs]``, in numpy or XLA."""
    x, gate, up, down, router = (xp.asarray(array, dtype) for array in given)
    logits = x @ router
    ids = xp.argsort(-logits, axis=-1)[:, :top_k]
    weights = xp.exp(xp.take_along_axis(logits, ids, axis=-1))
    weights = weights / weights.sum(-1, keepdims=True)
    gates = xp.einsum("th,ehi->eti", x, gate)
    inner = gates / (1 + xp.exp(-gates)) * xp.einsum("th,ehi->eti", x, up)
    every = xp.einsum("eti,eih->teh", inner, down)
    return (xp.take_along_axis(every, ids[..., None], axis=1) * weights[..., None]).sum(1)


def rounded(kernel):
    """Round a kernel ``[..., inputs, outputs]`` to NVFP4."""
    return np.asarray(quantize(kernel.swapaxes(-1, -2)).dequantize()).swapaxes(-1, -2)


@pytest.mark.parametrize("intermediate", [32, 64], ids=["oblong", "square"])
def test_a_block_from_the_kernels_of_flax(intermediate):
    """The test compares values: a missing transpose of a square kernel keeps the right shape."""
    normal = functools.partial(np.random.default_rng(0).standard_normal, dtype=np.float32)
    gate, up = (normal((64, 64, intermediate)) / 8 for _ in range(2))
    down, router = normal((64, intermediate, 64)) / 8, normal((64, 64))
    kernels = gate, up, down, router
    x = tokens(5)
    given = x, *map(rounded, kernels[:3]), router
    yardstick = jax.jit(functools.partial(dense_block, jnp, jnp.float32, 2))(*given)
    truth = dense_block(np, np.float64, 2, *given)
    moe = NVFP4MoE.from_dense(*kernels, top_k=2, dtype=jnp.float32)
    assert_as_accurate_as(moe(x), yardstick, truth)
    for turned in range(4 if intermediate == 64 else 0):
        wrong = [w.swapaxes(-1, -2) if n == turned else w for n, w in enumerate(kernels)]
        other = NVFP4MoE.from_dense(*wrong, top_k=2, dtype=jnp.float32)(x)
        with pytest.raises(AssertionError, match=r"over 2\.0 x"):
            assert_as_accurate_as(other, yardstick, truth)


def test_a_block_without_a_gate_from_the_kernels_of_flax():
    up, down, router = (np.ones(shape, np.float32) for shape in ((4, 64, 32), (4, 32, 64), (64, 4)))
    moe = NVFP4MoE.from_dense(None, up / 8, down, router, top_k=1, activation="relu2")
    y = moe(np.ones((1, 64), jnp.bfloat16))
    np.testing.assert_array_equal(y, np.full((1, 64), 8.0**2 * 32, y.dtype))


@pytest.mark.parametrize(
    ("turned", "message"),
    [
        (0, r"gate: expected shape \(4, 64, 32\) to go with up .*, inputs before outputs as in Fl"),
        (1, r"gate: expected shape \(4, 32, 64\)"),
        (2, r"down: expected shape \(4, 32, 64\) .* got \(4, 64, 32\)"),
        (3, r"router_kernel: expected shape \(64, 4\) .* got \(4, 64\)"),
    ],
)
def test_kernels_the_other_way_around_are_refused(turned, message):
    shapes = [(4, 64, 32), (4, 64, 32), (4, 32, 64), (64, 4)]
    kernels = [np.ones(shape, np.float32) for shape in shapes]
    kernels[turned] = kernels[turned].swapaxes(-1, -2)
    with pytest.raises(ValueError, match=message):
        NVFP4MoE.from_dense(*kernels, top_k=2)
