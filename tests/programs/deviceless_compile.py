"""Compile an expert layer for absent GPUs and print one line of JSON about the program.

    python deviceless_compile.py TARGET.txtpb PROGRAM MOE_TARGET_SUFFIX

JAX's CUDA plugin wheels can compile for a device that is only described. The process must see no
GPU backend, so `test_deviceless.py` runs this program in its own process with JAX_PLATFORMS=cpu.
PROGRAM is one of:

    kernel        one device, the packed weights are passed to the FFI target
    dequantized   one device, plain XLA on weights that it dequantizes first
    shard_map     four devices, experts split by shard_map around the FFI target, then psum
    unwrapped     four devices, experts split, the FFI target called without shard_map
"""

import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from support.extensions import cuda_calls
from support.kernels.float64_layer import Layer, Options

from jax_nvfp4_moe.numerics import nvfp4 as formats

TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 256, 4, 64, 1024, 512
DEVICES = {"kernel": 1, "dequantized": 1, "shard_map": 4, "unwrapped": 4}


def operands(mesh):
    """Return shapes of x, the layer, expert_ids and expert_weights. Only experts are split."""
    t, k, e, h, i = TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE
    u8, f8, f32 = jnp.uint8, jnp.float8_e4m3fn, jnp.float32

    def whole(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def split(shape, dtype):
        sharding = NamedSharding(mesh, PartitionSpec("expert"))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    # The layouts of the kernels add no padding at these sizes. The layer has biases, because XLA of
    # jaxlib 0.11.2 crashes if shard_map splits operands without elements.
    layer = Layer(
        split((e, 2 * i, h // 2), u8),
        split((e, 2 * i, h // 16), f8),
        split((e, 2), f32),
        split((e,), f32),
        split((e, 2 * i), f32),
        split((e, h, i // 2), u8),
        split((e, h, i // 16), f8),
        split((e, 1), f32),
        split((e,), f32),
        split((e, h), f32),
    )
    return whole((t, h), jnp.bfloat16), layer, whole((t, k), jnp.int32), whole((t, k), f32)


def kernel(suffix):
    """Return the layer as one FFI call."""
    options = Options(activation_scale="static" if "w4a4" in suffix else "none")
    return lambda *operands: cuda_calls.moe_prepared(*operands, options, INTERMEDIATE, suffix)


def dequantized(x, layer, ids, weights):
    """Run the layer in plain XLA: dequantize all experts to bfloat16, and run all on each token."""

    def dense(packed, block_scale):
        return formats.dequantize(packed, block_scale.astype(jnp.float32), jnp.bfloat16)

    u = jnp.einsum("th,enh->etn", x, dense(layer.gate_up_packed, layer.gate_up_block_scale))
    gate, up = jnp.split(u, 2, axis=-1)
    d = jnp.einsum(
        "eti,ehi->eth",
        jax.nn.silu(gate) * up,
        dense(layer.down_packed, layer.down_block_scale),
    )
    mask = jax.nn.one_hot(ids, EXPERTS, dtype=jnp.float32)
    share = jnp.einsum("tk,tke->et", weights, mask).astype(x.dtype)
    return jnp.einsum("et,eth->th", share, d)


def sharded(suffix, mesh):
    """Return the layer under shard_map: each device runs its own experts on all tokens."""

    def local(x, layer, ids, weights):
        first = jax.lax.axis_index("expert") * layer.down_packed.shape[0]
        y = kernel(suffix)(x, layer, ids - first, weights)  # other devices' ids are out of range
        return jax.lax.psum(y, "expert")

    specs = (PartitionSpec(), PartitionSpec("expert"), PartitionSpec(), PartitionSpec())
    return jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
    )


def report(target_config: str, program: str, suffix: str) -> dict:
    """Compile for the described devices. Return sizes, and what the program calls."""
    devices = DEVICES[program]
    topology = topologies.get_topology_desc(
        "described", "cuda", target_config=target_config, topology=f"1x1x{devices}"
    )
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.Mesh(topology.devices, ("expert",), axis_types=types)
    placed = operands(mesh)
    programs = {
        "kernel": kernel(suffix),
        "dequantized": dequantized,
        "shard_map": sharded(suffix, mesh),
        "unwrapped": kernel(suffix),
    }
    whole = NamedSharding(mesh, PartitionSpec())
    compiled = jax.jit(programs[program], out_shardings=whole).lower(*placed).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    x, layer, ids, weights = placed
    return {
        "device": topology.devices[0].device_kind,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "custom_calls": sorted(set(re.findall(r'custom_call_target="([^"]+)"', text))),
        "all_gathers": len(re.findall(r"= \S+ all-gather", text)),
        "packed_bytes": sum(s.size * s.dtype.itemsize for s in layer) // devices
        + sum(s.size * s.dtype.itemsize for s in (x, ids, weights)),
        "dequantized_bytes": 2 * EXPERTS * HIDDEN * INTERMEDIATE,  # of down, the smaller weight
    }


if __name__ == "__main__":
    cuda_calls.register()
    target = pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")
    print(json.dumps(report(target, *sys.argv[2:])))
