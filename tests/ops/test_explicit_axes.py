"""Test ops on a mesh with Explicit axes, where the type of an array says how it is sharded."""

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.devices.host_devices import make_mesh
from support.ops.op_gradients import CASES, OTHERS, Case, assert_close

from jax_nvfp4_moe import ops

pytestmark = pytest.mark.eight_devices

PUBLIC = sorted(set(ops.__all__) - OTHERS)
FORMS = ["linear with a bias", "dense", "dense_moe", "add_rms_norm without a sum"]


def mesh():
    return make_mesh((2,), AxisType.Explicit, names=("data",))


def shardings(case):
    """Return the sharding of each operand: rows over two devices, weights on both."""
    return [NamedSharding(mesh(), P("data") if one else P()) for one in case.rows]


def spec(x):
    return jax.typeof(x).sharding.spec


def padded(sharding, x):
    """Return a specification with an entry for each dimension, as types have it."""
    return P(*sharding.spec, *(None,) * (x.ndim - len(sharding.spec)))


@pytest.mark.parametrize("name", [*PUBLIC, *FORMS])
def test_types(name):
    """Results have sharded rows, and gradients the types of the operands."""
    case = Case(name)
    given = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own)
        for x, own in zip(case.operands, shardings(case), strict=True)
    ]
    found = {}

    def run(*operands):
        found["results"] = [spec(y) for y in case.call.results_of(*operands)]
        found["bars"] = [spec(bar) for bar in case.gradient(*operands)]

    with jax.set_mesh(mesh()):
        jax.eval_shape(run, *given)
    assert all(one[0] == "data" for one in found["results"])
    assert found["bars"] == [padded(shardings(case)[i], given[i]) for i in case.floats]


NAMES = ("moe_mlp", "linear with a bias", "route", "attention")


@pytest.mark.parametrize(
    ("name", "with_jit"), [*((name, True) for name in NAMES), ("moe_mlp", False)]
)
def test_values(name, with_jit):
    case = Case(name)
    expected = jax.jit(case.gradient)(*case.operands)
    with jax.set_mesh(mesh()):
        given = jax.device_put(case.operands, shardings(case))
        actual = (jax.jit(case.gradient) if with_jit else case.gradient)(*given)
    assert_close(jax.device_get(actual), expected)


def test_arrays_without_a_current_mesh():
    """Without `jax.set_mesh`, the arrays say which mesh it is."""
    case = Case("add_rms_norm")
    given = jax.device_put(case.operands, shardings(case))
    x, normalized = ops.add_rms_norm(*given, eps=1e-6)
    assert spec(x) == spec(normalized) == P("data", None, None)
    expected = ops.add_rms_norm(*case.operands, eps=1e-6)
    assert_close(jax.device_get((x, normalized)), jax.device_get(expected))


def test_a_mesh_with_manual_and_explicit_axes():
    """The user divides the rows of a mesh by hand, and JAX a second axis of it."""
    devices = make_mesh((2, 2), AxisType.Explicit, names=("data", "model"))
    case = Case("moe_mlp")
    expected = jax.jit(case.gradient)(*case.operands)

    def local(*operands):
        return tuple(case.gradient(*operands))

    specs = tuple(P("data") if one else P() for one in case.rows)
    returned = tuple(specs[i] for i in case.floats)
    with jax.set_mesh(devices):
        run = jax.shard_map(local, in_specs=specs, out_specs=returned, axis_names={"data"})
        places = [NamedSharding(devices, own) for own in specs]  # JAX 0.12 asks for them
        actual = jax.jit(run)(*map(jax.device_put, case.operands, places))
    assert_close(jax.device_get(actual), expected)


def test_every_public_op_is_here():
    assert {*PUBLIC, *FORMS} <= set(CASES)
