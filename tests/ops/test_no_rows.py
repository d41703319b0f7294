"""Test that every op takes no rows and no tokens, and returns results of that shape."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.ops.empty_calls import CALLS, FULL, resolve

from jax_nvfp4_moe import Target, ops

CASES = [
    pytest.param(name, dtype, id=f"{name}-{dtype}")
    for name, call in CALLS.items()
    for dtype in call.dtypes[:2]  # float16 takes the kernels of bfloat16
]
HOPPER = Target("cuda", (9, 0))


def empty_sizes(call):
    """Return the sizes of calls without rows, without tokens, and without both."""
    changes = ({"b": 0}, {"t": 0}, {"b": 0, "t": 0})
    return [FULL | changed for changed in changes if changed.keys() <= call.axes]


def shapes(call, dtype, sizes):
    """Return the operands of a call as shapes."""
    return jax.eval_shape(lambda: call.make(dtype, sizes))


def check_shapes(call, results, sizes, expected):
    """Check the shapes of results against the case, and the dtypes against a full call."""
    assert [x.shape for x in results] == [resolve(shape, sizes) for shape in call.results]
    assert [x.dtype for x in results] == [x.dtype for x in expected]


def test_every_op_has_a_case():
    assert set(ops.__all__) - {"prepare"} <= {name.split(" ")[0] for name in CALLS}


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_results(name, dtype):
    call = CALLS[name]
    full = jax.eval_shape(call.results_of, *shapes(call, dtype, FULL))
    check_shapes(call, full, FULL, full)
    backends = [{}, {"backend": "reference"}] if "backend" in call.options else [{}]
    given = [call.make(dtype, sizes) for sizes in empty_sizes(call)]
    run = jax.jit(lambda given: [[call.results_of(*x, **how) for x in given] for how in backends])
    for found in run(given):
        for sizes, operands, results in zip(empty_sizes(call), given, found, strict=True):
            check_shapes(call, results, sizes, full)
            for result, operand in call.kept.items():
                pair = (np.asarray(x, np.float32) for x in (results[result], operands[operand]))
                np.testing.assert_array_equal(*pair)


def check_gradients(call):
    dtype = call.dtypes[0]

    def loss(*operands):
        return sum(x.astype(jnp.float32).sum() for x in call.results_of(*operands)[:1])

    floats = [
        i
        for i, x in enumerate(shapes(call, dtype, FULL))
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1
    ]
    gradient = jax.grad(loss, floats)
    first, *others = empty_sizes(call)
    for sizes in others[:1]:
        given = shapes(call, dtype, sizes)
        found = jax.eval_shape(gradient, *given)
        assert [x.shape for x in found] == [given[i].shape for i in floats]
    given = call.make(dtype, first)
    found = jax.jit(gradient)(*given)
    assert [x.shape for x in found] == [given[i].shape for i in floats]
    assert not any(np.asarray(x, np.float32).any() for x in found)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_and_a_mapped_axis_without_rows(name):
    """Gradients are zeros, and an axis of no calls gives results with that axis."""
    call = CALLS[name]
    dtype = call.dtypes[0]
    full = jax.eval_shape(call.results_of, *shapes(call, dtype, FULL))

    if name.startswith("quantize_nvfp4"):
        with pytest.raises(ValueError, match="quantize_nvfp4 has no derivative"):
            check_gradients(call)
    else:
        check_gradients(call)
    none = [jax.ShapeDtypeStruct((0, *x.shape), x.dtype) for x in shapes(call, dtype, FULL)]
    mapped = jax.eval_shape(jax.vmap(call.results_of), *none)
    assert [(x.shape, x.dtype) for x in mapped] == [((0, *x.shape), x.dtype) for x in full]


def kernels(call, sizes):
    """Return the kernels that a call for a Hopper GPU runs."""
    how = {"target": HOPPER} if "target" in call.options else {}
    run = jax.jit(lambda *given: call.results_of(*given, **how))
    lowered = run.trace(*shapes(call, "bfloat16", sizes)).lower(lowering_platforms=("cuda",))
    return re.findall(r"custom_call @(nvfp4\w+)", lowered.as_text())


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if "target" in call.options])
def test_no_rows_launch_no_kernel(name):
    call = CALLS[name]
    # The convolution has a kernel for many tokens only.
    assert kernels(call, FULL) or kernels(call, FULL | {"t": 64})
    for sizes in empty_sizes(call):
        assert not kernels(call, sizes)
