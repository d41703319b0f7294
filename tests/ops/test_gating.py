"""Test gated operations: the reference against float64, gradients, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.float64_layer import activate
from support.kernels.gating_suite import (
    ACTIVATIONS,
    DTYPES,
    GATES,
    LINEAR_SIZES,
    gate_in,
    linear_sum_in_float64,
    make_gate_up,
    make_gates,
    make_linear_sum,
    make_sum,
    options_of,
    sum_in_float64,
)

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe import ops
from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear
from jax_nvfp4_moe.ops import gating
from jax_nvfp4_moe.testing import assert_as_accurate_as

CUDA = nvfp4.Target("cuda", (9, 0))
activate_rows = jax.jit(ops.activate, static_argnums=1)
add_gated, add_linear_gated = jax.jit(ops.add_gated), jax.jit(ops.add_linear_gated)
gate_heads = jax.jit(ops.gate_heads)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_rounded_once(name):
    """In float32 the result is near that in float64, and in 16 bits it is that one, rounded."""
    gate_up = make_gate_up("odd", "bfloat16")
    exact = np.asarray(activate_rows(gate_up.astype(np.float32), name))
    truth = activate(np.asarray(gate_up, np.float64), options_of(name))
    plain = activate(np.asarray(gate_up, np.float32), options_of(name))
    assert_as_accurate_as(exact, plain, truth)
    rounded = np.asarray(activate_rows(gate_up, name))
    np.testing.assert_array_equal(rounded, exact.astype(rounded.dtype))


def test_sum_behind_a_gate():
    x, gate, z = make_sum("odd", "float32")
    plain = x + z / (1 + np.exp(-gate))
    truth = sum_in_float64(x, gate, z)
    assert_as_accurate_as(np.asarray(add_gated(x, gate, z)), plain, truth)
    with pytest.raises(AssertionError, match="yardstick"):
        assert_as_accurate_as(np.asarray(add_gated(x, -gate, z)), plain, truth)
    np.testing.assert_array_equal(ops.add_gated(x, None, z), x + z)


@pytest.mark.parametrize("size", LINEAR_SIZES)
def test_sum_behind_a_linear_gate(size):
    operands = make_linear_sum(size, "float32")
    x, gate_input, gate_weight, z = operands
    gate = np.cumsum(gate_input * gate_weight, axis=1)[:, -1:]  # one sum in the order of the inputs
    plain = x + z / (1 + np.exp(-gate))
    truth = linear_sum_in_float64(*operands)
    assert_as_accurate_as(np.asarray(add_linear_gated(*operands)), plain, truth)
    if x.size:
        wrong = np.asarray(add_linear_gated(x, gate_input, -gate_weight, z))
        with pytest.raises(AssertionError, match="yardstick"):
            assert_as_accurate_as(wrong, plain, truth)


@pytest.mark.usefixtures("on_cpu")  # a GPU rounds in another order
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", LINEAR_SIZES)
def test_a_linear_gate_has_the_bits_of_a_layer_without_a_kernel(size, dtype):
    x, gate_input, gate_weight, z = make_linear_sum(size, dtype)
    layer = DenseLinear(jnp.asarray(gate_weight[None]), dtype=x.dtype)
    expected = add_gated(x, jax.jit(layer)(gate_input), z)
    np.testing.assert_array_equal(add_linear_gated(x, gate_input, gate_weight, z), expected)


@pytest.mark.parametrize("size", GATES)
def test_heads_behind_gates(size):
    """In float32 the result is near that in float64, and in 16 bits it is that one, rounded."""
    x, gates = make_gates(size, "bfloat16")
    exact = np.asarray(gate_heads(np.float32(x), np.float32(gates)))
    assert_as_accurate_as(exact, gate_in(x, gates, np.float32), gate_in(x, gates, np.float64))
    rounded = np.asarray(gate_heads(x, gates))
    np.testing.assert_array_equal(rounded, exact.astype(rounded.dtype))


def test_bound_catches_gates_that_are_queries():
    x, gates = make_gates("odd", "float32")
    y = np.asarray(gate_heads(x, np.roll(gates, 7, axis=1)))
    with pytest.raises(AssertionError, match="yardstick"):
        assert_as_accurate_as(y, gate_in(x, gates, np.float32), gate_in(x, gates, np.float64))


@pytest.mark.parametrize(("rows", "kernel"), [(64, True), (65, False)])
def test_few_rows_take_a_kernel_on_a_gpu(rows, kernel):
    x = jnp.zeros((rows, 32), jnp.bfloat16)
    text = jax.jit(
        lambda x: ops.add_gated(ops.activate(x, target=CUDA), None, x[:, :16], target=CUDA)
    )
    found = text.lower(x).as_text()
    assert ("nvfp4_activate_cuda" in found) == ("nvfp4_add_gated_cuda" in found) == kernel
    linear = jax.jit(lambda x: ops.add_linear_gated(x, x, x[0], x, target=CUDA))
    assert ("nvfp4_add_linear_gated_cuda" in linear.lower(x).as_text()) == kernel
    heads = jnp.zeros((rows, 2, 4), jnp.bfloat16)  # a row is a token with all of its heads
    gate = jax.jit(lambda heads, x: ops.gate_heads(heads, x, target=CUDA))
    assert ("nvfp4_gate_heads_cuda" in gate.lower(heads, x).as_text()) == kernel


def test_gradients_of_kernels_are_those_of_the_reference():
    """Only the reference runs here, so that the programs are compared in their text."""
    gate_up, operands = make_gate_up("odd", "float32"), make_sum("odd", "float32")
    gated, linear = make_gates("odd", "float32"), make_linear_sum("odd inputs", "float32")

    def loss(gate_up, operands, gated, linear, **how):
        results = (
            ops.activate(gate_up, **how),
            ops.add_gated(*operands, **how),
            ops.gate_heads(*gated, **how),
            ops.add_linear_gated(*linear, **how),
        )
        return sum((result**2).sum() for result in results)

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(gate_up, operands, gated, linear)
    assert all(np.asarray(grad).any() for grad in jax.tree.leaves(grads))
    lowered = jax.jit(jax.grad(lambda *each: loss(*each, target=CUDA), argnums=(0, 1, 2, 3)))
    text = lowered.lower(gate_up, operands, gated, linear).as_text()
    assert "nvfp4_activate_cuda" in text
    assert "nvfp4_gate_heads_cuda" in text
    assert "nvfp4_add_linear_gated_cuda" in text


@pytest.mark.parametrize("function", [ops.add_linear_gated, gating.add_linear_gated_meaning])
def test_gradients_of_a_linear_gate(function):
    """The op runs as a layer and a sum here. A kernel has the derivative of the reference."""
    arrays = make_linear_sum("odd inputs", "float32")

    def formula(x, gate_input, gate_weight, z):
        return x + jax.nn.sigmoid(gate_input @ gate_weight)[:, None] * z

    def gradients(of, dtype="float32"):
        operands = (array.astype(dtype) for array in arrays)
        total = jax.grad(lambda *each: (of(*each) ** 2).sum(), argnums=(0, 1, 2, 3))
        return jax.jit(total)(*operands)

    with jax.enable_x64(True):
        truths = [np.asarray(grad) for grad in gradients(formula, "float64")]
    off = gradients(lambda x, gate_input, gate_weight, z: formula(x, -gate_input, gate_weight, z))
    for grad, plain, truth, wrong in zip(
        gradients(function), gradients(formula), truths, off, strict=True
    ):
        assert_as_accurate_as(grad, plain, truth)
        with pytest.raises(AssertionError):
            assert_as_accurate_as(wrong, plain, truth)


def test_a_linear_gate_joins_a_chain():
    x, gate_input, gate_weight, z = map(jnp.asarray, make_linear_sum("many rows", "bfloat16"))

    def mix(gate_up):
        inner = ops.activate(gate_up, target=CUDA)
        return ops.add_linear_gated(inner, gate_input, gate_weight, z, target=CUDA)

    text = jax.jit(ops.chain_calls(mix)).lower(jnp.concatenate([x, x], axis=-1)).as_text()
    assert text.count("stablehlo.custom_call @nvfp4_call_chain_cuda") == 1
    assert text.count("stablehlo.custom_call") == 1
    assert "nvfp4_add_linear_gated_cuda" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.activate(x[:, :3]), r"gate_up: expected \[\.\.\., 2i\]"),
        (lambda x: ops.activate(x.astype(jnp.int32)), "gate_up: expected bfloat16"),
        (lambda x: ops.activate(x, "relu2"), "activation: expected a gated activation"),
        (lambda x: ops.add_gated(x, None, x[:1]), "z: expected float32"),
        (lambda x: ops.add_gated(x, x, x), "gate: expected float32"),
        (lambda x: ops.add_gated(x, None, x.astype(jnp.bfloat16)), "z: expected float32"),
        (lambda x: ops.add_linear_gated(x[0, 0], x, x[0], x), r"x: expected \[\.\.\., h\]"),
        (lambda x: ops.add_linear_gated(x, x, x[0], x[:1]), "z: expected float32"),
        (lambda x: ops.add_linear_gated(x, x[:1], x[0], x), r"gate_input: expected float32 \(2, 4"),
        (lambda x: ops.add_linear_gated(x, x[0, 0], x[0], x), "gate_input: expected float32"),
        (lambda x: ops.add_linear_gated(x, x, x[:1], x), r"gate_weight: expected float32 \(4,\)"),
        (
            lambda x: ops.add_linear_gated(x, x, x[0].astype(jnp.bfloat16), x),
            "gate_weight: expected float32",
        ),
        (lambda x: ops.add_linear_gated(*[x.astype(jnp.int32)] * 4), "x: expected bfloat16"),
        (lambda x: ops.gate_heads(x[0], x), r"x: expected \[\.\.\., n, d\]"),
        (lambda x: ops.gate_heads(x[None], x), r"gates: expected float32 \(1, 2\)"),
        (lambda x: ops.gate_heads(x[None], jnp.ones((1, 15))), "a last axis of at least 16"),
        (lambda x: ops.gate_heads(x[None], jnp.ones((1, 2), jnp.int32)), "gates: expected float32"),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.ones((2, 4)))


def test_a_row_of_one_token_may_have_more_axes():
    x, gate, z = make_sum("one", "bfloat16")
    y = ops.add_gated(x[None], gate[None], z[None])
    np.testing.assert_array_equal(y[0], ops.add_gated(x, gate, z))
    x, gate_input, gate_weight, z = make_linear_sum("one row", "bfloat16")
    y = ops.add_linear_gated(x[None], gate_input[None], gate_weight, z[None])
    np.testing.assert_array_equal(y[0], ops.add_linear_gated(x, gate_input, gate_weight, z))
