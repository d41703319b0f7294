"""Compile the loop of `generate` for two absent GPUs, and print JSON about one decoding step.

    python deviceless_peers.py TARGET.txtpb BATCH DUMP_FOLDER EXPERTxTENSOR [plain] [sampled]

The GPUs add up small arrays through each other's memory, except with ``plain``. Decoding is greedy,
except with ``sampled``. The model is that
of `deviceless_decode.py`, with NVFP4 linears. The JSON has the number of kernels and calls of a
layer, the collectives of XLA in the program and in its loop, and whether the loop is one CUDA
graph.
"""

import collections
import dataclasses
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from deviceless_decode import LAYERS, LENGTH, ROOM, Shapes, count_kernels, in_one_graph
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType
from support.extensions import cuda_calls

from jax_nvfp4_moe import Scheme, Target
from jax_nvfp4_moe.checkpoint.writing.synthetic import SyntheticSizes
from jax_nvfp4_moe.inference import generation
from jax_nvfp4_moe.models import qwen3_moe
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.ops.all_reduce import PeerGroups
from jax_nvfp4_moe.parallel import find_expert_mesh
from jax_nvfp4_moe.parallel.partition_specs import note_shardings
from jax_nvfp4_moe.parallel.peers import SUMS
from jax_nvfp4_moe.parallel.whole_steps import cache_specs, model_specs

COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(")


class ShardedShapes(Shapes):
    """Stand in for the table of a checkpoint that is read over a mesh."""

    def checkpoint_scheme(self, prefix):
        return Scheme.W4A16


def make_model(layers, mesh):
    sizes = SyntheticSizes(
        layers=layers,
        num_experts=128,
        top_k=8,
        hidden=2048,
        intermediate=768,
        vocab=151936,
        heads=32,
        kv_heads=4,
        head_dim=128,
    )
    config = qwen3_moe.read_config(sizes.config())
    make = Builder(
        ShardedShapes("nvfp4"), qwen3_moe.KEYS, Settings(Target("cuda", (9, 0)), expert_mesh=mesh)
    )
    model = nnx.eval_shape(lambda: qwen3_moe.build_model(config, make))
    note_shardings(model, mesh)
    return model


def compile_loop(model, mesh, batch, temperature):
    """Return the HLO text of decoding."""
    given = temperature, None, 1.0, ()
    key = None if temperature == 0 else jax.random.key(0)
    sampling = jax.eval_shape(lambda: generation.make_sampling(*given, key))
    cache = jax.eval_shape(lambda: model.init_cache(batch, LENGTH))
    state = jax.eval_shape(lambda cache: generation.State.begin(cache, batch, ROOM), cache)

    def place(leaf, spec):
        sharding = mesh.named_sharding(spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    leaves, tree = jax.tree.flatten(model)
    placed = tree.unflatten(map(place, leaves, model_specs(model, mesh)))
    others = jax.tree.map(
        lambda leaf: place(leaf, mesh.spec()),
        (sampling, state, jax.ShapeDtypeStruct((), jnp.int32)),
    )
    kept = jax.tree.map(place, cache, cache_specs(model, cache, mesh))
    others = others[0], dataclasses.replace(others[1], cache=kept), others[2]
    return generation.decode.lower(placed, *others).compile().as_text()


def without_entry(text):
    """Return a program without its main computation, which holds what is outside of loops."""
    before, _, after = text.partition("\nENTRY ")
    assert after
    return before + after.partition("\n}")[2]


if __name__ == "__main__":
    cuda_calls.register()
    config, dump = (pathlib.Path(sys.argv[i]) for i in (1, 3))
    shape = tuple(map(int, sys.argv[4].split("x")))
    topology = topologies.get_topology_desc(
        "described", "cuda", target_config=config.read_text(encoding="utf-8"), topology="1x1x2"
    )
    devices = jax.sharding.Mesh(
        np.reshape(topology.devices, shape),
        ("expert", "tensor"),
        axis_types=(AxisType.Auto,) * 2,
    )
    mesh = find_expert_mesh(devices)
    if "plain" not in sys.argv[5:]:
        peers = tuple((roles, PeerGroups(f"{'+'.join(roles)} 0,1", 2)) for roles in SUMS)
        mesh = dataclasses.replace(mesh, peers=peers)
    how = mesh, int(sys.argv[2]), 1.0 if "sampled" in sys.argv[5:] else 0.0
    few, many = (compile_loop(make_model(n, mesh), *how) for n in LAYERS)
    kernels = (count_kernels(many) - count_kernels(few)) / (LAYERS[1] - LAYERS[0])
    found = {
        "kernels_a_layer": kernels,
        "collectives_in_loops": dict(collections.Counter(COLLECTIVE.findall(without_entry(many)))),
        "collectives": dict(collections.Counter(COLLECTIVE.findall(many))),
        "in_one_graph": in_one_graph(dump),
    }
    print(json.dumps(found))
