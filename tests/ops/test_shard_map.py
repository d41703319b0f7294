"""Test that ops have the same gradients inside `jax.shard_map`, whose default check is on.

The check tracks along which mesh axes a value varies. An operand that all devices share gets the
sum of their gradients. One call without `shard_map` is therefore the truth for two devices that
have half of its rows each.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.devices.host_devices import make_mesh
from support.ops.empty_calls import EXPERTS
from support.ops.op_gradients import CASES, OTHERS, Case, assert_close, find_rows

from jax_nvfp4_moe import ops

pytestmark = pytest.mark.eight_devices

# Ops that do not take the reference by themselves on a CPU.
KERNELS = {"attention", "linear", "moe_mlp"}


def mesh():
    return make_mesh((2,), names=("data",))


def sharded(case, gradient, varies):
    """Return `gradient` on two devices; `varies` says which operands vary between them."""
    specs = tuple(P("data") if one else P() for one in varies)
    returned = tuple(specs[i] for i in case.floats)
    return jax.shard_map(gradient, mesh=mesh(), in_specs=specs, out_specs=returned)


def test_every_differentiable_op_has_a_case():
    assert set(ops.__all__) - OTHERS <= {name.split(" ")[0] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_rows_of_each_device_and_shared_weights(name):
    case = Case(name)
    both = case.gradient, sharded(case, case.gradient, case.rows)
    expected, actual = jax.jit(lambda *given: [run(*given) for run in both])(*case.operands)
    assert_close(actual, expected)


@pytest.mark.parametrize(
    "name", [name for name in CASES if name.split(" ")[0] in KERNELS or not all(find_rows(name))]
)
def test_types_of_gradients(name):
    """Each gradient has the type of its operand if weights vary, and with the reference."""
    case = Case(name)
    found = [({}, [not one for one in case.rows])] if not all(case.rows) else []
    if name.split(" ")[0] in KERNELS:
        found.append(({"backend": "reference"}, case.rows))
    for how, varies in found:
        parts = [
            jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype) if one else x
            for x, one in zip(case.operands, varies, strict=True)
        ]
        gradient = sharded(case, functools.partial(case.gradient, **how), varies)
        bars = jax.eval_shape(gradient, *parts)
        assert [x.shape for x in bars] == [parts[i].shape for i in case.floats]


def experts(x, params, ids, weights, sizes, **how):
    """Return what an expert layer makes of `x`."""
    del sizes
    return ops.moe_mlp(x, params, ids, weights, **how)


def groups(x, params, ids, weights, sizes, **how):
    """Return weighted rows of groups; the first group has the rows of `sizes`."""
    return ops.grouped_gemm(x, params.down, sizes, **how) * weights[:, :1]


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("run", [experts, groups])
@pytest.mark.parametrize("varying", [("x",), ("params",), ("x", "params", "ids", "weights")])
def test_packed_weights_of_each_device(run, varying, backend):
    """Devices may have experts of their own, as a user's expert parallelism gives them."""
    rng = np.random.default_rng(0)
    names = "x", "params", "ids", "weights", "sizes"
    one = {
        "x": rng.standard_normal((6, 64), np.float32),
        "params": EXPERTS,
        "ids": np.array([[0, 1], [2, 3], [1, 1], [0, 2], [3, 0], [-1, 2]], np.int32),
        "weights": rng.standard_normal((6, 2), np.float32),
        "sizes": np.array([3, 0, 2, 1], np.int32),
    }
    other = one | {"params": jax.tree.map(lambda leaf: leaf[::-1], EXPERTS)}
    other["x"], other["weights"] = -2 * one["x"], one["weights"][::-1].copy()
    other["ids"] = one["ids"][::-1].copy()
    devices = [one, {name: (other if name in varying else one)[name] for name in names}]

    def gradient(*given):
        def loss(x, weights):
            now = dict(zip(names, given, strict=True)) | {"x": x, "weights": weights}
            return jnp.sum(jnp.sin(run(**now, scheme="w4a16", backend=backend)))

        return jax.grad(loss, (0, 1))(given[0], given[3])

    plain = jax.jit(gradient)
    each = [plain(*device.values()) for device in devices]
    expected = [
        np.concatenate(bars) if name in varying else np.add(*bars)
        for name, bars in zip(("x", "weights"), zip(*each, strict=True), strict=True)
    ]
    given = [
        jax.tree.map(lambda *x: jnp.concatenate(x), *(device[name] for device in devices))
        if name in varying
        else one[name]
        for name in names
    ]
    specs = {name: P("data") if name in varying else P() for name in names}
    options = {"in_specs": tuple(specs.values()), "out_specs": (specs["x"], specs["weights"])}
    run_sharded = jax.jit(jax.shard_map(gradient, mesh=mesh(), **options))
    assert_close(run_sharded(*given), expected)


def test_kernels_return_results_that_vary():
    """JAX types the results of a foreign call as equal on all devices, which is wrong."""
    x = jnp.ones((4, 64))

    def quantize_rows(x):
        return ops.quantize_nvfp4(x).packed

    with pytest.raises(ValueError, match=r"out_specs|varying"):
        jax.jit(jax.shard_map(quantize_rows, mesh=mesh(), in_specs=P("data"), out_specs=P()))(x)
