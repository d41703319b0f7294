"""Test `ops.add_rms_norm` off GPUs: its definition, its errors, its choice and its derivative."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.axes import axis
from support.kernels.norm_suite import CASES, EPS, PAIRS, NormSuite, make

from jax_nvfp4_moe import NoBackendError, Problem, Target, explain, ops
from jax_nvfp4_moe.numerics.norms import normalize

GPU = Target("cuda", (9, 0))


def operands(pair="bfloat16-bfloat16"):
    return tuple(map(jnp.asarray, make("odd", pair)))


class TestReference(NormSuite):
    case = axis(*CASES)
    pair = axis(*PAIRS)

    @pytest.fixture
    def run(self):
        return functools.partial(ops.add_rms_norm, target=Target("cpu"))


@pytest.mark.usefixtures("on_cpu")  # a GPU rounds in another order
@pytest.mark.parametrize("pair", ["bfloat16-bfloat16", "bfloat16-float32", "float32-float32"])
def test_the_op_is_a_sum_and_a_norm(pair):
    """The bits are equal inside one program, in which XLA may keep the sum in float32."""
    x, added, weight = operands(pair)

    @jax.jit
    def define(x, added, weight):
        total = x + added
        return total, normalize(total, weight, EPS)

    without = x, normalize(x, weight, EPS)
    for addend, expected in ((added, define(x, added, weight)), (None, without)):
        got = ops.add_rms_norm(x, addend, weight, eps=EPS)
        for one, two in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, two)


def test_gpus_run_the_kernel_and_others_the_reference():
    problem = Problem("add_rms_norm", None, GPU)
    assert explain(problem).backend == "norm_cuda"
    old = explain(Problem("add_rms_norm", None, Target("cuda", (7, 5))))
    assert old.backend == "reference"
    assert "needs compute capability" in old.reasons["norm_cuda"]
    with pytest.raises(NoBackendError, match="needs cuda, got cpu"):
        ops.add_rms_norm(*operands(), eps=EPS, target=Target("cpu"), backend="norm_cuda")


@pytest.mark.parametrize("addend", [True, False])
def test_the_op_is_one_call_on_a_gpu(addend):
    x, added, weight = operands()
    call = jax.jit(lambda *each: ops.add_rms_norm(*each, eps=EPS, target=GPU))
    text = call.trace(x, added if addend else None, weight).lower(lowering_platforms=("cuda",))
    assert re.findall(r"custom_call @(\w+)", text.as_text()) == ["nvfp4_add_rms_norm_cuda"]
    assert "stablehlo.rsqrt" not in text.as_text()


def test_the_op_is_differentiated_around_its_call_on_a_gpu():
    def loss(*each):
        total, y = ops.add_rms_norm(*each, eps=EPS, target=GPU)
        return jnp.sum(total * y)

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    text = gradient.trace(*operands("float32-float32")).lower(lowering_platforms=("cuda",))
    assert re.findall(r"custom_call @(\w+)", text.as_text()) == ["nvfp4_add_rms_norm_cuda"]
    assert "stablehlo.rsqrt" in text.as_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: np.zeros((2, 32), np.int32)}, r"x: expected .* got int32 \(2, 32\)"),
        ({0: np.zeros((), np.float32)}, "x: expected"),
        ({1: np.zeros((2, 32), np.float16)}, r"added: expected float32 \(2, 32\) .* got float16"),
        ({1: np.zeros((1, 32), np.float32)}, r"added: expected .* got float32 \(1, 32\)"),
        ({2: np.zeros(16, np.float32)}, r"weight: expected shape \(32,\), got \(16,\)"),
        ({2: np.zeros(32, np.int8)}, "weight: expected .* got int8"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    given = {0: np.zeros((2, 32), np.float32), 1: None, 2: np.ones(32, np.float32), **changes}
    with pytest.raises(ValueError, match=message):
        ops.add_rms_norm(*given.values(), eps=EPS)
