"""Test modules saved on a mesh of four CPU devices, restored on one device or another mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from support.devices.expert_block import block
from support.devices.host_devices import BOUND, call, difference, make_mesh, name_shape, tokens
from support.files.given import CHECKPOINTS
from support.files.resized import write_resized
from support.files.unquantized import first_layer_dequantized
from support.models.mixer_cases import TWO_LAYERS
from support.models.synthetic_model import SIZES

from jax_nvfp4_moe import load_model, restore, save
from jax_nvfp4_moe.checkpoint.writing.synthetic import write_synthetic
from jax_nvfp4_moe.nn.variables import NVFP4Param

pytestmark = pytest.mark.eight_devices


def blank(module):
    """Return the abstract arrays of a module: shapes, dtypes and shardings, without values."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), module
    )


def differing(module, wanted):
    """Return the paths of arrays that differ in bytes, dtype or sharding.

    The static parts must be equal. A module without a difference is therefore the same program with
    the same inputs as `wanted`, and needs no run on the mesh.
    """
    assert jax.tree.structure(module) == jax.tree.structure(wanted)
    found = []
    restored, made = (jax.tree.leaves_with_path(nnx.state(one)) for one in (module, wanted))
    for (path, leaf), (_, other) in zip(restored, made, strict=True):
        same = leaf.sharding == other.sharding and leaf.dtype == other.dtype
        if not same or np.asarray(leaf).tobytes() != np.asarray(other).tobytes():
            found.append(jax.tree_util.keystr(path))
    return found


# Blocks with biases: gate and up in halves, input scales, no gate, alternating rows.
BLOCKS = {
    "silu": {},
    "w4a4": {"scheme": "w4a4"},
    "relu2": {"activation": "relu2"},
    "swigluoai": {"activation": "swigluoai"},
}


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        *(("silu", shape) for shape in (None, (1, 4), (4, 1))),
        *((case, (1, 4)) for case in ("w4a4", "relu2", "swigluoai")),
    ],
    ids=name_shape,
)
def test_a_block_is_restored_on_another_mesh(tmp_path, case, shape):
    """Arrays saved on (2, 2) equal those of a new block on the other mesh, bit for bit."""
    make = block(**BLOCKS[case])
    save(tmp_path / "m", make(mesh=make_mesh((2, 2))))
    wanted = make(mesh=shape and make_mesh(shape))
    restored = restore(tmp_path / "m", blank(wanted))
    assert differing(restored, wanted) == []


def test_a_block_is_restored_on_another_mesh_of_explicit_axes(tmp_path):
    make, x = block(), tokens(8)
    save(tmp_path / "m", make(mesh=make_mesh((2, 2), AxisType.Explicit)))
    wanted = make(mesh=make_mesh((1, 4), AxisType.Explicit))
    restored = restore(tmp_path / "m", wanted)
    assert differing(restored, wanted) == []
    assert difference(call(restored, x), call(make(), x)) <= BOUND


def test_a_block_of_one_device_is_restored_on_a_mesh(tmp_path):
    make, x = block(), tokens(8)
    save(tmp_path / "m", make())
    wanted = make(mesh=make_mesh((2, 2)))
    restored = restore(tmp_path / "m", blank(wanted))
    assert differing(restored, wanted) == []
    assert difference(call(restored, x), call(make(), x)) <= BOUND


def test_rows_in_the_order_of_another_mesh_are_seen(tmp_path):
    """Negative control: without shards in the record, one device misreads weights of four."""
    make, x = block(), tokens(8)
    module = make(mesh=make_mesh((2, 2)))
    module.experts.params = NVFP4Param(module.experts.params.get_value())
    save(tmp_path / "m", module)
    restored = restore(tmp_path / "m", blank(make()))
    assert difference(call(restored, x), call(make(), x)) > 1e-2


def write_one_layer(folder):
    write_synthetic(folder, dataclasses.replace(SIZES, layers=1), algorithm="W4A16_NVFP4")
    return folder


def write_delta_net(folder):
    given, changes = TWO_LAYERS
    write_resized(CHECKPOINTS / given, folder, **changes)
    return folder


def unquantized(name):
    return functools.partial(first_layer_dequantized, f"{name}-modelopt-w4a16")


# A function that writes each model, and where it is restored beside mesh (1, 4): on one device, or
# on a mesh whose size divides its number of experts. Both have one shard along `tensor`.
MODELS = {
    # NVFP4 experts, heads and vocabulary; two key heads that four shards share.
    "synthetic": (write_one_layer, None),
    # Joined linears, matrices of heads, biases; six experts.
    "olmoe": (unquantized("olmoe-bias"), (2, 1)),
    "deepseek_v3": (unquantized("deepseek_v3-direct"), None),
    # Channels of several segments, and NVFP4: experts, and joined linears with scales of rows.
    "delta_net": (write_delta_net, (4, 1)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function from a model's name to its loader and its folder, saved on mesh (2, 2)."""

    @functools.cache
    def prepare(name):
        source, folder = (tmp_path_factory.mktemp(f"{name}-{kind}") for kind in ("given", "saved"))
        load = functools.partial(load_model, MODELS[name][0](source), dtype=jnp.float32)
        save(folder / "m", load(mesh=make_mesh((2, 2))))
        return load, folder / "m"

    return prepare


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name, (_, other) in MODELS.items() for shape in ((1, 4), other)],
    ids=name_shape,
)
def test_a_model_is_restored_on_another_mesh(saved, name, shape):
    """Arrays equal those of a model loaded on that mesh, bit for bit."""
    load, folder = saved(name)
    wanted = load(mesh=shape and make_mesh(shape))
    assert differing(restore(folder, blank(wanted)), wanted) == []
