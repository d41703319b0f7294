"""Test linears and experts in FP8: products, when inputs are rounded, and what needs a scale."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jax_nvfp4_moe import Target
from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE
from jax_nvfp4_moe.nn.explanation import find_plans
from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear
from jax_nvfp4_moe.nn.linear.fp8_linear import FP8Linear
from jax_nvfp4_moe.nn.linear.merged_linear import MergedLinear
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import DenseExperts
from jax_nvfp4_moe.ops.dense import dense_fp8
from jax_nvfp4_moe.ops.dense_moe import dense_moe
from jax_nvfp4_moe.scheme import FP8ActivationScaling, Scheme, rounds_to_fp8

F8 = ml_dtypes.float8_e4m3fn
CPU = Target("cpu")
BOUND = 1e-6  # float32 sums in another order


def draw(seed, *shape, scale=1.0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


def matrix(seed, *shape):
    """Return a weight with one scale per row, its values, and its scales."""
    values = draw(seed, *shape, scale=30).astype(F8)
    scale = np.abs(draw(seed + 1, *shape[:-1], scale=0.01)) + np.float32(1e-3)
    return FP8Tensor(jnp.asarray(values), jnp.asarray(scale)), values, scale


def rounded(x, scale):
    return np.clip(x / scale, -448, 448).astype(F8).astype(np.float32) * scale


def relative(actual, expected):
    return np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("how", list(FP8ActivationScaling))
def test_products(how):
    weight, values, scale = matrix(2, 24, 64)
    x, own = draw(4, 3, 5, 64), np.float32(0.01)
    inputs = {
        FP8ActivationScaling.STATIC: rounded(x, own),
        FP8ActivationScaling.TOKEN: rounded(x, np.abs(x).max(-1, keepdims=True) / np.float32(448)),
        FP8ActivationScaling.TENSOR: rounded(x, np.abs(x).max() / np.float32(448)),
        FP8ActivationScaling.WEIGHTS: x,
    }
    dequantized = values.astype(np.float64) * scale[:, None]
    expected = inputs[how].astype(np.float64) @ dequantized.T
    y = dense_fp8(jnp.asarray(x), weight, activations=how, input_scale=own)
    assert relative(y, expected) < BOUND
    other = x if how is not FP8ActivationScaling.WEIGHTS else inputs[FP8ActivationScaling.TOKEN]
    assert relative(y, other.astype(np.float64) @ dequantized.T) > 1000 * BOUND
    np.testing.assert_array_equal(weight.dequantize(), dequantized.astype(np.float32))


def test_products_of_two_roundings_are_exact_in_bfloat16():
    weight, *_ = matrix(2, 24, 64)
    x = jnp.asarray(draw(4, 5, 64)).astype(jnp.bfloat16)
    y = dense_fp8(x, weight, activations=FP8ActivationScaling.STATIC, input_scale=jnp.float32(0.01))
    wide = dense_fp8(
        x.astype(jnp.float32),
        weight,
        activations=FP8ActivationScaling.STATIC,
        input_scale=jnp.float32(0.01),
    )
    assert relative(y, np.asarray(wide, np.float64)) < BOUND


@pytest.mark.parametrize(
    ("requested_scheme", "target", "rounds"),
    [
        (None, CPU, False),
        (None, Target("cuda", (9, 0)), False),
        (None, Target("cuda", (10, 0)), True),
        ("checkpoint", CPU, True),
        ("w4a4", CPU, True),
        ("w4a16", Target("cuda", (10, 0)), False),
        ("w4a4_token_scale", Target("cuda", (10, 0)), False),
    ],
)
def test_when_activations_are_rounded(requested_scheme, target, rounds):
    assert rounds_to_fp8(requested_scheme, target) is rounds
    weight, *_ = matrix(2, 24, 64)
    module = FP8Linear(
        weight,
        None,
        jnp.float32(0.1),
        checkpoint_scheme=FP8ActivationScaling.STATIC,
        scheme=requested_scheme,
        target=target,
    )
    assert module.activations is (
        FP8ActivationScaling.STATIC if rounds else FP8ActivationScaling.WEIGHTS
    )


def test_a_linear_with_a_bias_and_without_a_scale():
    weight, values, scale = matrix(2, 24, 64)
    bias, x = jnp.asarray(draw(6, 24)), draw(7, 2, 64)
    module = FP8Linear(
        weight, bias, checkpoint_scheme=FP8ActivationScaling.STATIC, target=CPU, dtype=jnp.float32
    )
    expected = x @ (values.astype(np.float32) * scale[:, None]).T + np.asarray(bias)
    assert relative(module(jnp.asarray(x)), expected) < BOUND
    with pytest.raises(ValueError, match=r"input_scale: .* a float32 scalar; got None"):
        FP8Linear(
            weight, checkpoint_scheme=FP8ActivationScaling.STATIC, scheme="checkpoint", target=CPU
        )
    # Optimizers and LoRA see only the bias.
    assert [path for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))] == [("bias",)]


def test_side_by_side_with_other_linears():
    weight, values, scale = matrix(2, 24, 64)
    dense = draw(8, 8, 64)
    parts = {
        "q": FP8Linear(weight, target=CPU, dtype=jnp.float32),
        "k": DenseLinear(jnp.asarray(dense), dtype=jnp.float32),
    }
    x = draw(9, 2, 64)
    expected = x @ np.concatenate([values.astype(np.float32) * scale[:, None], dense]).T
    assert relative(MergedLinear(**parts)(jnp.asarray(x)), expected) < BOUND


def experts_of(e, h, i, how):
    """Return experts in FP8, with input scales if `how` is STATIC, and their weights in float64."""
    gate_up, up_values, up_scale = matrix(10, e, 2 * i, h)
    down, down_values, down_scale = matrix(12, e, h, i)
    params = DenseExperts(
        gate_up,
        down,
        gate_up_input_scale=jnp.full(e, 0.01, jnp.float32)
        if how is FP8ActivationScaling.STATIC
        else None,
        down_input_scale=jnp.full(e, 0.02, jnp.float32)
        if how is FP8ActivationScaling.STATIC
        else None,
    )
    return (
        params,
        up_values.astype(np.float64) * up_scale[..., None],
        (down_values.astype(np.float64) * down_scale[..., None]),
    )


@pytest.mark.parametrize(
    "how",
    [FP8ActivationScaling.WEIGHTS, FP8ActivationScaling.STATIC, FP8ActivationScaling.TOKEN, None],
)
def test_experts_that_are_not_nvfp4(how):
    e, h, i, t, k = 12, 320, 112, 9, 3
    params, first, second = experts_of(e, h, i, how)
    if how is None:
        params = DenseExperts(jnp.asarray(first, jnp.float32), jnp.asarray(second, jnp.float32))
    x, rng = draw(20, t, h), np.random.default_rng(21)
    ids = np.stack([rng.permutation(e)[:k] for _ in range(t)]).astype(np.int32)
    ids[2, 1] = -1
    weights = rng.random((t, k), np.float32)

    def inputs(value, scale):
        value = value.astype(np.float32)
        if how is FP8ActivationScaling.STATIC:
            return rounded(value, np.float32(scale)).astype(np.float64)
        if how is FP8ActivationScaling.TOKEN:
            return rounded(value, np.abs(value).max() / np.float32(448)).astype(np.float64)
        return value.astype(np.float64)

    expected = np.zeros((t, h))
    for row in range(t):
        for expert, weight in zip(ids[row], weights[row], strict=True):
            if expert < 0:
                continue
            gate, up = np.split(first[expert] @ inputs(x[row], 0.01), 2)
            inner = gate / (1 + np.exp(-gate)) * up
            expected[row] += weight * (second[expert] @ inputs(inner, 0.02))
    activations = how or FP8ActivationScaling.WEIGHTS
    y = dense_moe(
        jnp.asarray(x), params, jnp.asarray(ids), jnp.asarray(weights), activations=activations
    )
    # A value between two E4M3 numbers may fall to either side: one in thousands moves by 1/16.
    bound = 1e-5 if activations is FP8ActivationScaling.WEIGHTS else 1e-3
    assert relative(y, expected) < bound
    assert relative(np.roll(np.asarray(y), 1, axis=0), expected) > 0.1
    module = NVFP4MoE(
        e, h, i, top_k=k, params=params, checkpoint_scheme=how, scheme="checkpoint", target=CPU,
        dtype=jnp.float32, rngs=nnx.Rngs(0),
    )  # fmt: skip
    again = module.experts(jnp.asarray(x), jnp.asarray(ids), jnp.asarray(weights))
    assert relative(again, expected) < bound
    assert list(find_plans(module)) == []


def test_experts_need_a_declaration_that_fits():
    params, *_ = experts_of(2, 32, 16, None)
    for checkpoint_scheme in (Scheme.W4A16, Scheme.W4A4):
        with pytest.raises(ValueError, match=f"with DenseExperts; got {checkpoint_scheme}"):
            NVFP4MoE(
                2,
                32,
                16,
                top_k=1,
                params=params,
                checkpoint_scheme=checkpoint_scheme,
                target=CPU,
                rngs=nnx.Rngs(0),
            )
