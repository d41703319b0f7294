"""Metadata of variables that says how their arrays are sharded, for the tools of Flax.

`nnx.get_partition_spec`, `nnx.get_named_sharding` and `nnx.get_abstract_model` read it. A variable
with one array has the metadata ``out_sharding`` of Flax, with its mesh. A variable with a tree of
arrays has a `PartitionSpec` for each of them.
"""

from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from jax_nvfp4_moe.parallel.expert_mesh import ExpertMesh
from jax_nvfp4_moe.parallel.shard_spec import axis_spec
from jax_nvfp4_moe.parallel.sharded_variable import find_layout, sharded_axes

_SPECS = "partition_specs"  # the name under which a variable stores a specification of each array


def partition_specs(variable: nnx.Variable) -> Any:
    """Return the value of a variable with each array replaced by its `PartitionSpec`.

    Without metadata, every array is replicated.
    """
    tree = jax.tree.structure(variable.get_value())
    specs = variable.get_metadata(_SPECS, None)
    return tree.unflatten([PartitionSpec()] * tree.num_leaves if specs is None else specs)


def note_specs(variable: nnx.Variable, specs: Any) -> None:
    """Store in a variable how its arrays are sharded.

    Args:
      variable: the variable, such as that of the experts of a layer.
      specs: its value with each array replaced by its `PartitionSpec`.
    """
    variable.set_metadata(_SPECS, tuple(jax.tree.leaves(specs)))


def note_shardings(module: nnx.Module, expert_mesh: ExpertMesh) -> None:
    """Store in each variable that has a `ShardLayout` how its arrays are sharded along `tensor`.

    Variables that know the specifications of their arrays, such as those of experts, keep them.

    Args:
      module: a module on a mesh.
      expert_mesh: the mesh.
    """
    for _, variable in nnx.iter_graph(module):
        if not isinstance(variable, nnx.Variable) or find_layout(variable) is None:
            continue
        if variable.get_metadata(_SPECS, None) is not None:
            continue
        specs = [axis_spec(expert_mesh, axis) for axis in sharded_axes(variable)]
        if isinstance(variable.get_value(), jax.Array | jax.ShapeDtypeStruct):
            variable.set_metadata(out_sharding=tuple(specs[0]), mesh=expert_mesh.mesh)
        else:
            note_specs(variable, specs)
