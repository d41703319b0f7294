"""Save on one mesh of four host devices and restore on others; `test_saving.py` starts and judges.

python tests/programs/restore_on_meshes.py NAME ...      prints one line of JSON: [name, figures]
"""

import functools
import os
import tempfile

if __name__ == "__main__":
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from eight_devices import block
from eight_devices_models import SIZES
from flax import nnx
from given import CHECKPOINTS
from host_devices import IDS, call, difference, make_mesh, run_checks, tokens
from jax.sharding import AxisType
from resized import write_resized
from unquantized import dequantized

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.checkpoint.synthetic import write_synthetic
from jax_nvfp4_moe.nn.dense import NVFP4Param

SHAPES = (None, (1, 4), (4, 1))
DELTA_NET = {
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "shared_expert_intermediate_size": 64,
    "intermediate_size": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
}


def blank(module):
    """Return the abstract arrays of a module: its shapes and where they lie, and no value."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), module
    )


def compare(make, x, shapes=SHAPES):
    """Save what `make` makes on (2, 2), and restore it on one device (None) or another mesh.

    Returns:
      Mesh -> the difference of the restored module's result from that of one device, and paths of
      arrays that differ from those that `make` puts onto that mesh.
    """
    figures, expected = {}, call(make(), x)
    with tempfile.TemporaryDirectory() as folder:
        nvfp4.save(f"{folder}/saved", make(mesh=make_mesh((2, 2))))
        for shape in shapes:
            wanted = make(mesh=shape and make_mesh(shape))
            restored = nvfp4.restore(f"{folder}/saved", blank(wanted))
            error = difference(call(restored, x), expected)
            figures[str(shape)] = [error, differing(restored, wanted)]
    return figures


def differing(module, wanted):
    """Return the paths of arrays that differ in bytes or in where they lie."""
    found = []
    restored, made = (jax.tree.leaves_with_path(nnx.state(one)) for one in (module, wanted))
    for (path, leaf), (_, other) in zip(restored, made, strict=True):
        same = leaf.sharding == other.sharding and leaf.dtype == other.dtype
        if not same or np.asarray(leaf).tobytes() != np.asarray(other).tobytes():
            found.append(jax.tree_util.keystr(path))
    return found


def blocks():
    """Blocks with biases: halves, alternating rows, no gate, input scales; over Explicit axes."""
    x = tokens(8)
    cases = {
        "w4a4": {"scheme": "w4a4"},
        "relu2": {"activation": "relu2"},
        "swigluoai": {"activation": "swigluoai"},
    }
    figures = {"silu": compare(block(), x)}
    for name, changes in cases.items():
        figures[name] = compare(block(**changes), x, ((1, 4),))
    make = block()
    with tempfile.TemporaryDirectory() as folder:
        nvfp4.save(f"{folder}/saved", make(mesh=make_mesh((2, 2), AxisType.Explicit)))
        wanted = make(mesh=make_mesh((1, 4), AxisType.Explicit))
        restored = nvfp4.restore(f"{folder}/saved", wanted)
        error = difference(call(restored, x), call(make(), x))
        figures["explicit"] = {"(1, 4)": [error, differing(restored, wanted)]}
    return figures


def one_device():
    """A block that one device saved, over a mesh."""
    make, x = block(), tokens(8)
    with tempfile.TemporaryDirectory() as folder:
        nvfp4.save(f"{folder}/saved", make())
        wanted = make(mesh=make_mesh((2, 2)))
        restored = nvfp4.restore(f"{folder}/saved", blank(wanted))
    return [difference(call(restored, x), call(make(), x)), differing(restored, wanted)]


def synthetic():
    """NVFP4 experts, heads and vocabulary; two key heads that four shards share."""
    with tempfile.TemporaryDirectory() as folder:
        write_synthetic(folder, SIZES, algorithm="W4A16_NVFP4")
        load = functools.partial(nvfp4.load_model, folder, dtype=jnp.float32)
        return compare(load, jnp.asarray(IDS % SIZES.vocab))


def unquantized(name):
    """Joined linears, matrices of heads, biases; six experts."""
    with tempfile.TemporaryDirectory() as folder:
        path = dequantized(f"{name}-modelopt-w4a16", folder)
        load = functools.partial(nvfp4.load_model, path, dtype=jnp.float32)
        return compare(load, jnp.asarray(IDS % 64), (None, (1, 4), (2, 1)))


def delta_net():
    """Channels of several segments, and experts of NVFP4."""
    with tempfile.TemporaryDirectory() as folder:
        write_resized(CHECKPOINTS / "qwen3_next-options-modelopt-w4a16", folder, **DELTA_NET)
        load = functools.partial(nvfp4.load_model, folder, dtype=jnp.float32)
        return compare(load, jnp.asarray(IDS % 64))


def control():
    """The difference where the record says nothing of shards: rows of gate and up are mixed."""
    make, x = block(), tokens(8)
    module = make(mesh=make_mesh((2, 2)))
    module.experts.params = NVFP4Param(module.experts.params.get_value())
    with tempfile.TemporaryDirectory() as folder:
        nvfp4.save(f"{folder}/saved", module)
        restored = nvfp4.restore(f"{folder}/saved", blank(make()))
    return difference(call(restored, x), call(make(), x))


CHECKS = {
    "blocks": blocks,
    "one_device": one_device,
    "synthetic": synthetic,
    "olmoe": functools.partial(unquantized, "olmoe-bias"),
    "deepseek_v3": functools.partial(unquantized, "deepseek_v3-direct"),
    "delta_net": delta_net,
    "control": control,
}

if __name__ == "__main__":
    run_checks(CHECKS)
