"""Test modules that are made from dense kernels: algorithms, fused kernels, biases and scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.nn.experts.routed_experts import ExpertOptions
from jax_nvfp4_moe.numerics.rounding import quantize_weight

E, H, I = 4, 64, 32  # noqa: E741
F32 = {"dtype": jnp.float32}
RNG = np.random.default_rng(0)
GATE, UP = (RNG.standard_normal((E, H, I)).astype(np.float32) / 8 for _ in range(2))
DOWN = RNG.standard_normal((E, I, H)).astype(np.float32) / 6
ROUTER = RNG.standard_normal((H, E)).astype(np.float32)
X = RNG.standard_normal((5, H)).astype(np.float32)
IDS, WEIGHTS = np.array([[0, 3]] * 5), np.full((5, 2), 0.5, np.float32)


def outputs_first(*kernels):
    return [None if kernel is None else kernel.swapaxes(1, 2) for kernel in kernels]


def assert_same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def error(params):
    """Return the squared error of the weights of all experts."""
    gate_up, down = (np.asarray(w.dequantize(), np.float64) for w in (params.gate_up, params.down))
    gate, up, own = outputs_first(GATE, UP, DOWN)
    return np.square(gate_up - np.concatenate([gate, up], 1)).sum() + np.square(down - own).sum()


def test_search_has_less_error_and_the_bits_of_the_algorithm():
    kernels = outputs_first(GATE, UP, DOWN)
    found = {a: nvfp4.quantize_experts(*kernels, algorithm=a) for a in ("max", "search")}
    assert error(found["search"]) < 0.97 * error(found["max"])
    packed, block_scale, scale = quantize_weight(kernels[2], algorithm="search")
    ours = found["search"].down
    for own, wanted in zip(
        (ours.packed, ours.block_scale, ours.global_scale),
        (packed, block_scale, scale),
        strict=True,
    ):
        np.testing.assert_array_equal(own, wanted)
    assert_same(found["max"], nvfp4.quantize_experts(*kernels))
    how = {"algorithm": "search", "backend": "reference"}
    moe = nvfp4.NVFP4MoE.from_dense(GATE, UP, DOWN, ROUTER, top_k=2, **how)
    assert_same(moe.experts.params.get_value(), found["search"])
    experts = nvfp4.NVFP4Experts.from_dense(GATE, UP, DOWN, **how)
    assert_same(experts.params.get_value(), found["search"])
    linear = nvfp4.NVFP4Linear.from_dense(ROUTER, **how)
    np.testing.assert_array_equal(
        linear.weight.get_value().packed, quantize_weight(ROUTER.T, algorithm="search")[0]
    )


@pytest.mark.parametrize("algorithm", ["weighted_search", "best"])
def test_algorithms_that_need_data_or_do_not_exist(algorithm):
    message = "algorithm: expected one of max, four_or_six, search; got"
    with pytest.raises(ValueError, match=message):
        nvfp4.quantize_experts(*outputs_first(GATE, UP, DOWN), algorithm=algorithm)
    with pytest.raises(ValueError, match=message):
        nvfp4.NVFP4Linear.from_dense(ROUTER, algorithm=algorithm)


def test_gate_and_up_in_one_kernel():
    fused = np.concatenate([GATE, UP], axis=-1)
    apart = nvfp4.quantize_experts(*outputs_first(GATE, UP, DOWN))
    assert_same(nvfp4.quantize_experts(*outputs_first(fused, None, DOWN)), apart)
    given = (fused, None, DOWN), (GATE, UP, DOWN)
    blocks = [nvfp4.NVFP4MoE.from_dense(*k, ROUTER, top_k=2, **F32) for k in given]
    np.testing.assert_array_equal(*(block(X) for block in blocks))
    swapped = nvfp4.NVFP4MoE.from_dense(fused[..., ::-1], None, DOWN, ROUTER, top_k=2, **F32)
    assert np.abs(swapped(X) - blocks[0](X)).max() > 0.01


def test_gate_and_up_that_alternate():
    """Kernels of FP4 numbers lose nothing, so both orders of rows give the same result."""
    grid = np.array([0.5, 1, 1.5, 2, 3, 4, 6, -1, -6], np.float32)
    rng = np.random.default_rng(1)
    gate, up = (rng.choice(grid, (E, H, I)).astype(np.float32) / 64 for _ in range(2))
    for kernel in (gate, up):
        kernel[:, ::16] = 6 / 64  # each block of 16 inputs has the largest number
    fused = np.stack([gate, up], axis=-1).reshape(E, H, 2 * I)
    options = {"gate_up_bias": np.zeros((E, 2 * I), np.float32), **F32}
    alternating = nvfp4.NVFP4Experts.from_dense(
        fused, None, DOWN, activation="swigluoai", **options
    )
    assert alternating.params.get_value().gate_up.global_scale.shape == (E,)
    halves = nvfp4.NVFP4Experts.from_dense(
        gate, up, DOWN, activation="swigluoai_uninterleave", **options
    )
    ours, theirs = (experts(X, IDS, WEIGHTS) for experts in (alternating, halves))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_biases_and_input_scales():
    gate_up_bias = RNG.standard_normal((E, 2 * I)).astype(np.float32)
    down_bias = RNG.standard_normal((E, H)).astype(np.float32)
    options = {"gate_up_bias": gate_up_bias, "down_bias": down_bias, **F32}
    plain = nvfp4.NVFP4Experts.from_dense(GATE, UP, DOWN, **F32)
    biased = nvfp4.NVFP4Experts.from_dense(GATE, UP, DOWN, **options)
    nothing = np.zeros((5, H), np.float32)
    gate, up = np.split(gate_up_bias[[0, 3]], 2, axis=-1)
    down = np.asarray(plain.params.get_value().down.dequantize())[[0, 3]]
    inner = gate / (1 + np.exp(-gate)) * up
    truth = 0.5 * (np.einsum("ei,ehi->eh", inner, down) + down_bias[[0, 3]]).sum(0)
    np.testing.assert_allclose(biased(nothing, IDS, WEIGHTS)[0], truth, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(plain(nothing, IDS, WEIGHTS), nothing)
    scales = {"gate_up_input_scale": 4 / 2688, "down_input_scale": np.full(E, 1 / 2688)}
    moe = nvfp4.NVFP4MoE.from_dense(
        GATE, UP, DOWN, ROUTER, top_k=2, scheme="w4a4", **scales, **options
    )
    assert moe.scheme == "w4a4"
    params = moe.experts.params.get_value()
    np.testing.assert_array_equal(params.gate_up_input_scale, np.full(E, np.float32(4 / 2688)))
    linear = nvfp4.NVFP4Linear.from_dense(ROUTER, input_scale=1 / 2688, scheme="w4a4")
    assert linear.scheme == "w4a4"
    for wrong, message in (
        ({"gate_up_bias": down_bias[:, :I]}, r"gate_up_bias: expected shape \(4, 64\)"),
        ({"down_bias": gate_up_bias[:, :3]}, r"down_bias: expected shape \(4, 64\)"),
    ):
        with pytest.raises(ValueError, match=message):
            nvfp4.NVFP4MoE.from_dense(GATE, UP, DOWN, ROUTER, top_k=2, **wrong)


def test_without_a_router_kernel():
    moe = nvfp4.NVFP4MoE.from_dense(GATE, UP, DOWN, None, top_k=2, **F32)
    whole = nvfp4.NVFP4MoE.from_dense(GATE, UP, DOWN, ROUTER, top_k=2, **F32)
    assert moe.token_router is None
    chosen = whole.route(X)
    np.testing.assert_array_equal(moe.experts(X, *chosen), whole(X))
    with pytest.raises(ValueError, match=r"token_router: .* Call moe\.experts\(x, expert_ids"):
        moe(X)
    own = nvfp4.NVFP4MoE.from_dense(GATE, UP, DOWN, None, token_router=whole.token_router, **F32)
    np.testing.assert_array_equal(own(X), whole(X))


def test_a_router_kernel_is_stored_in_param_dtype():
    rounded = ROUTER.astype(jnp.bfloat16)
    for options, dtype in (({}, jnp.float32), ({"param_dtype": jnp.bfloat16}, jnp.bfloat16)):
        moe = nvfp4.NVFP4MoE.from_dense(GATE, UP, DOWN, rounded, top_k=2, **options)
        assert moe.token_router.weight.dtype == dtype
        np.testing.assert_array_equal(moe.token_router.weight[...], rounded.T.astype(dtype))
    linear = nvfp4.NVFP4Linear(64, 32, use_bias=True, rngs=nnx.Rngs(0))
    assert linear.bias.dtype == jnp.float32
    linear = nvfp4.NVFP4Linear(64, 32, use_bias=True, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    assert linear.bias.dtype == jnp.float16


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ((None, None, DOWN), "up: expected .* got None for both"),
        ((GATE[..., :31], None, DOWN), "gate: expected gate and up, an even number .* got 31"),
        ((GATE, None, DOWN), r"down: expected shape \(4, 16, 64\) to go with gate \(4, 64, 32\)"),
        ((GATE, UP, DOWN[:2]), r"down: expected shape \(4, 32, 64\) to go with up"),
        ((GATE[0], UP[0], DOWN[0]), r"up: expected three axes, .* got shape \(64, 32\)"),
    ],
)
def test_kernels_that_do_not_fit(kernels, message):
    with pytest.raises(ValueError, match=message):
        nvfp4.NVFP4MoE.from_dense(*kernels, ROUTER, top_k=2)


def test_matrices_that_do_not_fit():
    gate, up, down = outputs_first(GATE, UP, DOWN)
    for given, more, message in (
        ((None, None, down), {}, "up: expected .* got None for both"),
        ((gate, None, down), {}, r"gate: expected shape \[e, 2i, h\] = \(4, 64, 64\)"),
        ((gate, up, down), {"interleaved": True}, "interleaved: expected False"),
        ((gate, up, down[0]), {}, r"down: expected three axes, .* got shape \(64, 32\)"),
    ):
        with pytest.raises(ValueError, match=message):
            nvfp4.quantize_experts(*given, **more)


def test_experts_alone_take_fields_or_options():
    params = nvfp4.quantize_experts(*outputs_first(None, UP, DOWN))
    fields = nvfp4.NVFP4Experts(params, activation="relu2", **F32)
    options = nvfp4.NVFP4Experts(params, ExpertOptions(activation="relu2", **F32))
    assert fields.options == options.options
    np.testing.assert_array_equal(*(e(X, IDS, WEIGHTS) for e in (fields, options)))
    with pytest.raises(ValueError, match="options: expected None together with dtype"):
        nvfp4.NVFP4Experts(params, ExpertOptions(), **F32)
    with pytest.raises(TypeError, match="hidden"):
        nvfp4.NVFP4Experts(params, hidden=3)
