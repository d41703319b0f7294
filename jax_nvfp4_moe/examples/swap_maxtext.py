"""Run the experts of a MaxText layer on NVFP4 kernels, without a change of MaxText.

MaxText multiplies rows by experts with `jax.lax.ragged_dot`, which this example replaces by
`nvfp4.ragged_dot`. The weights become arrays of Qwix, which MaxText shards like its own kernels.
Run it with MaxText 0.2.5: ``python -m jax_nvfp4_moe.examples.swap_maxtext``.
"""

# MaxText is not in the environment that checks types.
# pyright: reportMissingImports=false

import importlib.resources
from unittest import mock

import jax
import jax.numpy as jnp
import qwix
from flax import nnx

import jax_nvfp4_moe as nvfp4

KERNELS = "wi_0", "wi_1", "wo"


def swap(layer):
    """Return a copy of MaxText's `RoutedMoE` with experts in Qwix' NVFP4."""
    packed = nnx.clone(layer)
    for name in KERNELS:
        kernel = getattr(layer, name)
        tiles = {"channelwise_axes": [0, 2], "tiled_axes": {1: 16}}
        array = qwix.quantize(kernel[...], "nvfp4", **tiles)
        setattr(packed, name, kernel.replace(array))
    return packed


def use_our_kernels():
    """Return a context in which `jax.lax.ragged_dot` is `nvfp4.ragged_dot`.

    It matters while JAX traces a model. Arrays that are not NVFP4 still run on XLA.
    """
    return mock.patch.object(jax.lax, "ragged_dot", nvfp4.ragged_dot)


def make_layer(**options):
    """Return a small `RoutedMoE` of MaxText and its mesh; `options` are those of its base.yml."""
    from maxtext.configs import pyconfig
    from maxtext.layers.initializers import nd_dense_init
    from maxtext.layers.moe import RoutedMoE
    from maxtext.utils import maxtext_utils

    experts, top_k, hidden, intermediate = 4, 2, 64, 96
    given = {
        "run_name": "swap",
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "enable_checkpointing": False,
        "log_config": False,
        "decoder_block": "mixtral",
        "base_emb_dim": hidden,
        "base_mlp_dim": intermediate,
        "base_moe_mlp_dim": intermediate,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "megablox": False,  # these three let MaxText call jax.lax.ragged_dot
        "sparse_matmul": True,
        "use_tokamax_gmm": False,
        "per_device_batch_size": 2,
        "max_target_length": 8,
        "dtype": "float32",
        "weight_dtype": "float32",
    }
    base = importlib.resources.files("maxtext") / "configs" / "base.yml"
    config = pyconfig.initialize(["", str(base)], **(given | options))
    devices = maxtext_utils.create_device_mesh(config)
    mesh = jax.sharding.Mesh(devices, config.mesh_axes)
    layer = RoutedMoE(
        config,
        experts,
        top_k,
        mesh,
        nd_dense_init(1.0, "fan_in", "truncated_normal"),
        ("embed", "mlp"),
        nnx.Rngs(0),
        intermediate_dim=intermediate,
        dtype=jnp.float32,
    )
    return layer, mesh


def main():
    """Compare a layer with its packed copy."""
    layer, mesh = make_layer()
    x = jax.random.normal(jax.random.key(0), (2, 8, 64))
    with jax.set_mesh(mesh), use_our_kernels():
        run = nnx.jit(lambda layer, x: layer(x)[0])
        dense, packed = run(layer, x), run(swap(layer), x)
    print(f"relative error {jnp.linalg.norm(packed - dense) / jnp.linalg.norm(dense):.3f}")


if __name__ == "__main__":
    main()
