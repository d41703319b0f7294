"""Let `flax.serialization` read and write the weights of this package.

`flax.serialization` makes nested dictionaries of the classes that are registered with it. The name
of each array is that of its path in a pytree. An array of a kernel's layout therefore has the name
of that layout, and does not restore into another one.
"""

from typing import Any

import jax
import numpy as np
from flax import serialization

from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams, NVFP4Tensor
from jax_nvfp4_moe.parallel.placement import SlotTable


def _children(value) -> dict[str, Any]:
    """Return the children of a pytree node by their names; a child that is None has none."""
    found = jax.tree.leaves_with_path(value, is_leaf=_is_child_of(value))
    return {keys[0].name: child for keys, child in found}


def _is_child_of(value):
    """Return the `is_leaf` with which the leaves of a node are its children that are not None."""
    return lambda one: one is not value and one is not None


def _to_state_dict(value) -> dict[str, Any]:
    """Return the children of a node as state dictionaries."""
    return {name: serialization.to_state_dict(child) for name, child in _children(value).items()}


def _from_state_dict(target, state: Any):
    """Return a node like `target` with the values of `state`.

    Raises:
      ValueError: `state` has other names, or an array of another shape. Layouts are part of the
        names.
    """
    children, path = _children(target), serialization.current_path()
    found = set(state) if isinstance(state, dict) else set()
    if found != set(children):
        raise ValueError(
            f"{path}: expected the arrays {sorted(children)} of {type(target).__name__}, got "
            f"{sorted(found)}. Names that end differently belong to different layouts of the "
            "weights. Restore into weights of the layout that was saved, or use `nvfp4.save` and "
            "`nvfp4.restore`, which convert"
        )
    values = [_restore(child, state[name], name, path) for name, child in children.items()]
    structure = jax.tree.structure(target, is_leaf=_is_child_of(target))
    return jax.tree.unflatten(structure, values)


def _restore(child, state, name, path):
    """Return one child of a node with the values of `state`."""
    if hasattr(child, "dtype") and np.shape(state) != np.shape(child):
        raise ValueError(f"{path}/{name}: expected shape {np.shape(child)}, got {np.shape(state)}")
    return serialization.from_state_dict(child, state, name=name)


for _node in (NVFP4Tensor, MoEParams, DenseExperts, FP8Tensor, SlotTable):
    serialization.register_serialization_state(_node, _to_state_dict, _from_state_dict)
