"""Run the suite of gated operations on their CUDA kernels, and check its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.kernels.gating_suite import GatingSuite, make_gate_up

from jax_nvfp4_moe import ops

pytestmark = pytest.mark.gpu


class TestGating(GatingSuite):
    @pytest.fixture
    def run_activate(self):
        return lambda gate_up, name: jax.jit(
            lambda each: ops.activate(each, name, backend="gating_cuda")
        )(gate_up)

    @pytest.fixture
    def run_add(self):
        return jax.jit(lambda *each: ops.add_gated(*each, backend="gating_cuda"))

    @pytest.fixture
    def run_linear(self):
        return jax.jit(lambda *each: ops.add_linear_gated(*each, backend="gating_cuda"))

    @pytest.fixture
    def run_gates(self):
        return jax.jit(lambda *each: ops.gate_heads(*each, backend="gating_cuda"))


def test_many_rows():
    gate_up = jnp.asarray(np.resize(make_gate_up("odd", "bfloat16"), (1 << 17, 154)))
    run = jax.jit(lambda each: ops.activate(each, backend="gating_cuda"))
    np.testing.assert_array_equal(run(gate_up)[-5:], run(gate_up[-5:]))


@pytest.mark.parametrize(
    ("shape", "activation", "message"),
    [
        ((2, 33), "silu", r"gate_up \[rows, 2 i\]"),
        ((2, 32), "relu2", "a gated activation"),
        ((2, 32), "sin", "activation: expected"),
    ],
)
def test_wrong_operand_is_named(shape, activation, message):
    cuda_calls.register()
    output = jax.ShapeDtypeStruct((2, 16), jnp.bfloat16)
    numbers = {name: np.float32(1) for name in ("alpha", "beta", "limit")}
    call = jax.ffi.ffi_call("nvfp4_activate_cuda", output)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(jnp.ones(shape, jnp.bfloat16), activation=activation, **numbers))


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"x": (32,)}, r"x \[rows, h\]"),
        ({"gate_input": (2, 15)}, r"gate_input \[rows, k\]"),
        ({"gate_input": (3, 16)}, r"gate_input \[rows, k\]"),
        ({"gate_weight": (1, 16)}, r"gate_weight \[k\]"),
        ({"z": (2, 31)}, r"z \[rows, h\]"),
        ({"y": (2, 31)}, r"y \[rows, h\]"),
    ],
)
def test_wrong_operand_of_a_linear_gate_is_named(operands, message):
    cuda_calls.register()
    shapes = {"x": (2, 32), "gate_input": (2, 16), "gate_weight": (16,), "z": (2, 32)}
    shapes |= {"y": (2, 32)} | operands
    output = jax.ShapeDtypeStruct(shapes.pop("y"), jnp.bfloat16)
    call = jax.ffi.ffi_call("nvfp4_add_linear_gated_cuda", output)
    given = (jnp.ones(shape, jnp.bfloat16) for shape in shapes.values())
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{message}: expected"):
        jax.block_until_ready(call(*given))


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ({"x": (2, 96)}, r"x \[rows, n, d\]"),
        ({"gates": (2, 95)}, r"w \(gates\).*at least 96"),
        ({"gates": (3, 96)}, r"gates \[rows, w\]"),
        ({"y": (2, 3, 8)}, r"y \[rows, n, d\]"),
    ],
)
def test_wrong_operand_of_gated_heads_is_named(operands, message):
    cuda_calls.register()
    shapes = {"x": (2, 3, 16), "gates": (2, 96), "y": (2, 3, 16)} | operands
    output = jax.ShapeDtypeStruct(shapes["y"], jnp.bfloat16)
    call = jax.ffi.ffi_call("nvfp4_gate_heads_cuda", output)
    given = (jnp.ones(shapes[name], jnp.bfloat16) for name in ("x", "gates"))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(*given))
