"""`FlatModel`: a model in the form in which `jax.jit` takes it fastest.

`jax.jit` flattens its arguments in every call. For a Flax model that is Python code for each module
and each variable: 4 ms for the 915 arrays of Qwen3-30B-A3B, where a decoding step on an H200 takes
2 ms. A `FlatModel` is flattened once.
"""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FlatModel:
    """The arrays of a model, and what else it consists of.

    Attributes:
      arrays: the arrays of the model, in the order of `jax.tree.flatten`.
      structure: the `PyTreeDef` of the model. Static.
    """

    arrays: tuple[jax.Array, ...]
    structure: Any = dataclasses.field(metadata={"static": True})


def flatten_model(model: Any) -> FlatModel:
    """Return the model as a `FlatModel`. Later changes of the model do not change the result."""
    if isinstance(model, FlatModel):
        return model
    arrays, structure = jax.tree.flatten(model)
    return FlatModel(tuple(arrays), structure)


def restore_model(model: Any) -> Any:
    """Return the model of a `FlatModel`, or `model` itself if it is something else."""
    if not isinstance(model, FlatModel):
        return model
    return jax.tree.unflatten(model.structure, model.arrays)
