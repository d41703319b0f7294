"""Register tuples with named fields as pytrees whose keys are indices, as those of tuples are.

`nnx.tabulate` shows the arguments and the results of methods. It puts the leaves of a tuple into a
list, at the index that is their key. JAX names the fields of a named tuple and of a dataclass
instead, and `nnx.tabulate` raises an error if such an object is inside a tuple. Whatever public
methods of modules take or return is therefore registered here.
"""

from typing import TypeVar

import jax

Node = TypeVar("Node", bound=type[tuple])


def register_indexed(cls: Node) -> Node:
    """Register a class of tuples as a pytree whose children have their index as key.

    Args:
      cls: a subclass of tuple, which is made from its elements. The first ``len(cls) -
        len(cls.STATIC)`` elements are children. If `cls` has an attribute `STATIC`, it is the
        number of elements at the end that are static.

    Returns:
      `cls`.
    """
    static = getattr(cls, "STATIC", 0)

    def flatten(node):
        count = len(node) - static
        return tuple(node)[:count], tuple(node)[count:]

    def flatten_with_keys(node):
        children, rest = flatten(node)
        return [(jax.tree_util.SequenceKey(i), child) for i, child in enumerate(children)], rest

    def unflatten(rest, children):
        return cls(*children, *rest)

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
