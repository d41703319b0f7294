"""Variables whose path in a pytree tells how a mesh shards them.

The rows of a sharded variable are in the order of its shards, see `shard_spec.ShardLayout`. The
shapes are those of other numbers of shards, so a checkpointer that stores arrays by their paths
would restore rows in a wrong order. The path of a sharded value therefore names its order. If no
mesh shards a variable, the path is that of any `nnx.Variable`.
"""

from typing import Any

import jax
from flax import nnx

from jax_nvfp4_moe.parallel.shard_spec import ShardLayout, array_layouts

_METADATA = "shard"  # the name under which a variable stores its `ShardLayout`


def _name_of_order(layout: ShardLayout | None) -> str:
    """Return what the name of a value in the order of a `ShardLayout` ends in; nothing for None."""
    if layout is None:
        return ""
    segments = "_".join(f"{width}x{parts}" for width, parts in layout.segments)
    return f"_{layout.axis}_{segments}_on_{layout.shards}_shards"


def _in_words(layout):
    """Say how a value is sharded."""
    return "that no mesh shards" if layout is None else f"that is sharded as {layout}"


def _flatten(variable):
    """Return the value of a variable, and its metadata."""
    return (variable.get_raw_value(),), tuple(sorted(variable.get_metadata().items()))


def _flatten_with_key(variable):
    """Return the value of a variable with its key, and its metadata."""
    (value,), static = _flatten(variable)
    name = "value" + _name_of_order(find_layout(variable))
    return ((jax.tree_util.GetAttrKey(name), value),), static


def _unflatten(cls):
    """Return the function that makes a variable of class `cls` from its metadata and its value."""
    return lambda static, children: cls.from_metadata(children[0], dict(static))


class ShardedVariable:
    """A base class of variables that may have a `ShardLayout`; it stands before `nnx.Variable`."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Register the class as a pytree, in place of `nnx.Variable.__init_subclass__`."""
        jax.tree_util.register_pytree_with_keys(cls, _flatten_with_key, _unflatten(cls), _flatten)

    def update_from_state(self: Any, variable_state: Any) -> None:
        """Take the value of `variable_state`, as `nnx.update` does.

        Raises:
          ValueError: the value is sharded in another way. Its rows would be in a wrong order.
        """
        own, given = map(find_layout, (self, variable_state))
        if own != given:
            raise ValueError(
                f"state: expected a value {_in_words(own)}, because the module that is updated has "
                f"one; got a value {_in_words(given)}. Save the other module with `nvfp4.save`, "
                "and `nvfp4.restore` converts it"
            )
        super().update_from_state(variable_state)  # pyright: ignore[reportAttributeAccessIssue]


class ShardedParam(ShardedVariable, nnx.Param):
    """An `nnx.Param` that a mesh shards; a parameter that no mesh shards is an `nnx.Param`."""


class ShardedLoRAParam(ShardedVariable, nnx.LoRAParam):
    """An `nnx.LoRAParam` that a mesh shards."""


# Class of a variable -> the class that it has if a mesh shards it.
_SHARDED = {nnx.Param: ShardedParam, nnx.LoRAParam: ShardedLoRAParam}


def mark(variable: nnx.Variable | None, layout: ShardLayout | None) -> Any:
    """Return a variable that stores how its global array is sharded.

    Args:
      variable: an `nnx.Param`, an `nnx.LoRAParam`, a `ShardedVariable`, or None, which is
        returned.
      layout: how the array is sharded. None returns the variable as it is.
    """
    if variable is None or layout is None:
        return variable
    metadata = variable.get_metadata() | {_METADATA: layout}
    kind = _SHARDED.get(type(variable), type(variable))
    return kind.from_metadata(variable.get_raw_value(), metadata)


def find_layout(variable: nnx.Variable) -> ShardLayout | None:
    """Return how a variable is sharded; None if it is replicated."""
    return variable.get_metadata(_METADATA, None)


def sharded_axes(variable: nnx.Variable) -> list[int | None]:
    """Return the sharded axis of each array of a variable; None for replicated arrays."""
    made = array_layouts(variable.get_value(), find_layout(variable))
    return [one.axis for one in jax.tree.leaves(made)]


def variables(module: nnx.Module | nnx.Variable) -> list[nnx.Variable]:
    """Return the variables of a module in the order of its leaves."""
    return jax.tree.leaves(module, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def module_axes(module: nnx.Module | nnx.Variable) -> list[int | None]:
    """Return the sharded axis of each leaf of a module, in the order of `jax.tree.leaves`.

    Raises:
      TypeError: if a leaf is not in an `nnx.Variable`.
    """
    found = variables(module)
    if not all(isinstance(one, nnx.Variable) for one in found):
        raise TypeError("module: expected every array in an nnx.Variable, got a plain array")
    return [axis for variable in found for axis in sharded_axes(variable)]
