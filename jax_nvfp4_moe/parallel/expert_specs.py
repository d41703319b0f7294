"""The sharding of an expert layer's arrays on a mesh, and functions that run on each shard."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams
from jax_nvfp4_moe.ops.low_rank import AdaptedExperts
from jax_nvfp4_moe.parallel.expert_mesh import EXPERT, TENSOR, ExpertMesh
from jax_nvfp4_moe.parallel.shard_spec import ShardLayout, array_layouts


def expert_specs(params: MoEParams | DenseExperts | AdaptedExperts, expert_mesh: ExpertMesh) -> Any:
    """Return `params` with each array replaced by its `PartitionSpec`.

    Experts are sharded along `expert`. The rows of `gate_up` and the columns of `down` are sharded
    along `tensor`. `gate_up_input_scale` is replicated, because dispatch quantizes rows for experts
    of other shards.

    Args:
      params: `MoEParams`, `DenseExperts` or `AdaptedExperts`. Of the two matrices of an adapter,
        the one that has sharded rows or columns is sharded like them.
      expert_mesh: the mesh of the devices.
    """
    if isinstance(params, AdaptedExperts):
        whole = expert_mesh.spec(EXPERT)
        rows, columns = (expert_mesh.spec(EXPERT, *axes) for axes in ((TENSOR,), (None, TENSOR)))
        gate_up, down = params.gate_up, params.down
        return AdaptedExperts(
            expert_specs(params.experts, expert_mesh),
            gate_up and dataclasses.replace(gate_up, a=whole, b=rows),
            down and dataclasses.replace(down, a=columns, b=whole),
        )
    rows = ShardLayout("rows", ((1, expert_mesh.tensor),), expert_mesh.tensor)

    def spec(layout):
        if layout.axis is None:
            return expert_mesh.spec(EXPERT)
        return expert_mesh.spec(EXPERT, *(None,) * (layout.axis - 1), TENSOR)

    specs = jax.tree.map(spec, array_layouts(params, rows))
    if params.gate_up_input_scale is None:
        return specs
    return dataclasses.replace(specs, gate_up_input_scale=expert_mesh.spec())


def on_shards(run: Callable, expert_mesh: ExpertMesh | None) -> Callable:
    """Return a function that applies `run` to the experts of each shard.

    Args:
      run: maps experts to experts with the same arrays as its first argument, possibly in another
        layout.
      expert_mesh: the mesh of the experts; None for one device, which returns `run` itself.
    """
    if expert_mesh is None:
        return run

    def call(*args):
        specs = tuple(expert_specs(params, expert_mesh) for params in args)
        trees = []

        def body(*args):
            leaves, tree = jax.tree.flatten(run(*args))
            trees.append(tree)
            return leaves

        # A layout changes static fields of the tree, but not which arrays it has or how they are
        # sharded.
        leaves = expert_mesh.shard_map(body, specs, jax.tree.leaves(specs[0]))(*args)
        return trees[-1].unflatten(leaves)

    return call
