"""Compile the programs that convert weights, side by side, before the weights are there.

A load converts weights of many shapes, and each shape is a program that takes up to half a second
to compile for a GPU. One after the other, they would take longer than to read the files.
"""

import concurrent.futures
import contextlib
import contextvars
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

# The calls of the current trace: function, structure of the arguments, and their leaves, which are
# shapes of arrays and static values.
_Call = tuple[Any, Any, tuple[Any, ...]]
_CALLS: contextvars.ContextVar[dict[_Call, None] | None] = contextvars.ContextVar(
    "calls", default=None
)


class Noted:
    """A function of `jax.jit` whose calls `lower_calls` notes. Arguments are positional."""

    def __init__(self, jitted: Any):
        """Wrap `jitted`, the result of `jax.jit`."""
        self._jitted = jitted
        self.__doc__ = jitted.__doc__

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        calls = _CALLS.get()
        if calls is not None:
            leaves, tree = jax.tree.flatten(arguments)
            calls[self._jitted, tree, tuple(map(_shape_of, leaves))] = None
        return self._jitted(*arguments)


def _shape_of(leaf):
    """Return the shape and dtype of an array; other values as they are."""
    if not hasattr(leaf, "dtype"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def lower_calls(functions: Iterable[Callable[[], Any]]) -> list[jax.stages.Lowered]:
    """Trace functions, and return the programs of the `Noted` functions that they call.

    Returns:
      The programs, each once. `jax.jit` finds them when it is called with arrays of their shapes.
    """
    calls: dict[_Call, None] = {}
    token = _CALLS.set(calls)
    try:
        for function in functions:
            jax.eval_shape(function)
    finally:
        _CALLS.reset(token)
    return [jitted.lower(*tree.unflatten(leaves)) for jitted, tree, leaves in calls]


@contextlib.contextmanager
def compiling(programs: Iterable[jax.stages.Lowered]) -> Iterator[Callable[[], None]]:
    """Compile programs in threads while the context is entered. It yields what waits for them.

    Args:
      programs: what `jax.stages.Wrapped.lower` returns.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(program.compile) for program in programs]

        def wait():
            while futures:
                futures.pop().result()

        try:
            yield wait
        finally:
            pool.shutdown(cancel_futures=True)
