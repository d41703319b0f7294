"""Run the suite of `add_rms_norm` on its CUDA kernels, and check its errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.kernels.axes import axis
from support.kernels.norm_suite import CASES, EPS, MIXED_PAIRS, PAIRS, NormSuite, make
from support.ops.gradients import gradients

from jax_nvfp4_moe import ops

pytestmark = pytest.mark.gpu


def on_cuda(*operands, eps):
    """Run the kernel, whatever the order of preference of the records is."""
    call = jax.jit(lambda *each: ops.add_rms_norm(*each, eps=eps, backend="norm_cuda"))
    arrays = (None if operand is None else jnp.asarray(operand) for operand in operands)
    return tuple(map(np.asarray, call(*arrays)))


class TestNorm(NormSuite):
    case = axis(*CASES)
    pair = axis(*PAIRS, *MIXED_PAIRS)

    @pytest.fixture
    def run(self):
        return on_cuda


def test_derivative_is_that_of_the_reference():
    operands = [jnp.asarray(operand) for operand in make("odd", "float32-float32")]

    backends = "norm_cuda", "reference"
    runs = (functools.partial(ops.add_rms_norm, eps=EPS, backend=name) for name in backends)
    ours, plain = (gradients(run, *operands) for run in runs)
    for got, expected in zip(ours, plain, strict=True):
        assert float(jnp.abs(expected).max()) > 0
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("rows", [65535, 65536 + 1])
def test_many_rows(rows):
    x, added, weight = (jnp.asarray(operand) for operand in make("odd", PAIRS[0]))
    index = jnp.arange(rows) % x.shape[0]
    expected, got = (
        on_cuda(x[at], added[at], weight, eps=EPS) for at in (jnp.arange(x.shape[0]), index)
    )
    for one, many in zip(expected, got, strict=True):
        assert one[np.asarray(index)].tobytes() == many.tobytes()


@pytest.mark.parametrize("name", ["x", "added", "weight"])
@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_wrong_operand_is_named(name, what):
    cuda_calls.register()
    operands = dict(zip(("x", "added", "weight"), make("odd", PAIRS[0]), strict=True))
    wrong = operands[name]
    operands[name] = wrong[..., :-16] if what == "shape" else wrong.view(np.int16)
    x = make("odd", PAIRS[0])[0]
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call("nvfp4_add_rms_norm_cuda", (like, like))
    # The length is read from x, so that a wrong x shows as another wrong operand.
    named = "added" if (name, what) == ("x", "shape") else name
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{named}.*expected .*got"):
        jax.block_until_ready(call(*map(jnp.asarray, operands.values()), eps=np.float32(EPS)))
