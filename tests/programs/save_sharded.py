"""Save experts sharded over eight host devices, and restore them on eight and on two devices.

Usage: ``python save_sharded.py FOLDER LAYOUT``. test_saving.py runs this program in its own
process, because the number of devices is fixed when JAX starts.
"""

import pathlib
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.nn.saving import restore, save
from jax_nvfp4_moe.parallel import find_expert_mesh, shard_experts
from jax_nvfp4_moe.testing import random_moe_params


def params_in(layout):
    """Return the experts. The test calls this function too, to make the same ones on one device."""
    params = random_moe_params(jax.random.key(0), num_experts=8, hidden=64, intermediate=48)
    return params.to_layout(layout)


def shard(params, devices):
    """Spread the experts over the first `devices`."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("expert",))
    return jax.device_put(params, NamedSharding(mesh, PartitionSpec("expert")))


def main(folder, layout):
    params = shard(params_in(layout), 8)
    save(folder, params)
    other = "cpu_16x16" if layout == "canonical" else "canonical"
    for devices, wanted in ((8, layout), (2, layout), (8, other)):
        like, params = shard(params_in(wanted), devices), params_in(wanted)
        if devices == 2:  # shapes are enough, and take no memory
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
            )
        restored = restore(folder, like)
        for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(params), strict=True):
            assert len(got.addressable_shards) == devices
            assert got.addressable_shards[0].data.shape[0] == 8 // devices
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    check_divided_tree(folder.with_name("divided"), layout)


def check_divided_tree(folder, layout):
    """Restore experts divided along `tensor`. Elsewhere, restoring must fail, not reorder rows."""
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 3), ("expert", "tensor"), kinds, devices=jax.devices()[:6])
    params = shard_experts(params_in("canonical"), find_expert_mesh(mesh))
    save(folder, params)
    for got, want in zip(*map(jax.tree.leaves, (restore(folder, params), params)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    for like in (params_in("canonical"), shard(params_in(layout), 8)):
        with pytest.raises(
            CheckpointError, match=r"saved on 3 shards along 'tensor', but .* are on 1"
        ):
            restore(folder, like)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
