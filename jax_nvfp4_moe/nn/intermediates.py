"""Record intermediate values of modules, in the manner of `nnx.sow`.

A module calls `record` with a value that may interest a caller, such as its input. Outside of
`capture`, `record` does nothing, so a model that nobody inspects keeps no values and compiles to
the same program::

  with capture(model) as seen:
      y = model(x)
  seen["layers.0.attention.out"]  # list of the values that each call of that module recorded

Under `jax.jit`, use `capture` inside the traced function and return the values that you need.
Values that leave the function in another way are leaked tracers.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from flax import nnx

Seen = dict[str, list[Any]]  # path of a module -> values that its calls recorded

_captures: contextvars.ContextVar[tuple[tuple[dict[int, str], Seen], ...]] = contextvars.ContextVar(
    "captures", default=()
)


@contextlib.contextmanager
def capture(root: nnx.Module) -> Iterator[Seen]:
    """Yield a dictionary that collects the values that `root` and the modules inside it record.

    The keys are paths as `nnx.iter_modules` returns them, such as "layers.0.attention.out". The
    path of `root` is "".
    """
    paths = {id(module): ".".join(map(str, path)) for path, module in nnx.iter_modules(root)}
    seen: Seen = {}
    token = _captures.set((*_captures.get(), (paths, seen)))
    try:
        yield seen
    finally:
        _captures.reset(token)


def record(module: nnx.Module, value: Any) -> None:
    """Add `value` to every active `capture` that contains `module`."""
    for paths, seen in _captures.get():
        path = paths.get(id(module))
        if path is not None:
            seen.setdefault(path, []).append(value)


def is_recorded(module: nnx.Module) -> bool:
    """Return whether an active `capture` contains `module`, so that `record` keeps values of it."""
    return any(id(module) in paths for paths, _ in _captures.get())
