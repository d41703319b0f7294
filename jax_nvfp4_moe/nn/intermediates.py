"""Record intermediate values of modules, in the manner of `nnx.sow`.

A module calls `record` with a value that may interest a caller, such as its input. Outside of
`capture`, `record` does nothing, so a model that nobody inspects keeps no values and compiles to
the same program::

  with capture(model) as seen:
      y = model(x)
  seen["layers.0.attention.out"]  # list of the values that each call of that module recorded

`listen` hands each value to a function where the module records it.

Under `jax.jit`, use `capture` inside the traced function and return the values that you need.
Values that leave the function in another way are leaked tracers.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from flax import nnx

Seen = dict[str, list[Any]]  # path of a module -> values that its calls recorded


class _Listener(NamedTuple):
    """Who takes the values that modules record: a test of modules, and a function."""

    wants: Callable[[nnx.Module], bool]
    take: Callable[[nnx.Module, Any], None]


_listeners: contextvars.ContextVar[tuple[_Listener, ...]] = contextvars.ContextVar(
    "listeners", default=()
)


@contextlib.contextmanager
def listen(
    take: Callable[[nnx.Module, Any], None], wants: Callable[[nnx.Module], bool]
) -> Iterator[None]:
    """Call ``take(module, value)`` when a module records a value.

    Inside a transformation such as `nnx.scan`, Flax makes new modules that stand for the original
    ones. `take` then gets such a module, and values that are tracers.

    Args:
      take: function of a module and of the value that it records.
      wants: function that returns whether `take` wants the values of a module.
    """
    token = _listeners.set((*_listeners.get(), _Listener(wants, take)))
    try:
        yield
    finally:
        _listeners.reset(token)


@contextlib.contextmanager
def capture(root: nnx.Module) -> Iterator[Seen]:
    """Yield a dictionary that collects the values that `root` and the modules inside it record.

    The keys are paths as `nnx.iter_modules` returns them, such as "layers.0.attention.out". The
    path of `root` is "".
    """
    paths = {id(module): ".".join(map(str, path)) for path, module in nnx.iter_modules(root)}
    seen: Seen = {}

    def take(module, value):
        seen.setdefault(paths[id(module)], []).append(value)

    with listen(take, lambda module: id(module) in paths):
        yield seen


def record(module: nnx.Module, value: Any) -> None:
    """Hand `value` to every active `capture` that contains `module`, and to all that listen."""
    for listener in _listeners.get():
        if listener.wants(module):
            listener.take(module, value)


def is_recorded(module: nnx.Module) -> bool:
    """Return whether `record` hands on values of `module`."""
    return any(listener.wants(module) for listener in _listeners.get())
