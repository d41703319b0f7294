"""Intermediates: what modules read while a caller looks, in the manner of `nnx.sow`.

A module calls `record` with what it reads. Outside of `capture` that does nothing, so a model that
nobody looks into keeps no values and compiles to the same program::

  with capture(model) as seen:
      y = model(x)
  seen["layers.0.attention.out"]  # a list: what each call of that module recorded

Under `jax.jit` both belong into the traced function, which returns what it needs of `seen`.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from flax import nnx

Seen = dict[str, list[Any]]  # path of a module -> what its calls recorded

_captures: contextvars.ContextVar[tuple[tuple[dict[int, str], Seen], ...]] = contextvars.ContextVar(
    "captures", default=()
)


@contextlib.contextmanager
def capture(root: nnx.Module) -> Iterator[Seen]:
    """Yield a dictionary that takes what `root` and the modules inside it record.

    Paths are those of `nnx.iter_modules`, such as "layers.0.attention.out"; that of `root` is "".
    """
    paths = {id(module): ".".join(map(str, path)) for path, module in nnx.iter_modules(root)}
    seen: Seen = {}
    token = _captures.set((*_captures.get(), (paths, seen)))
    try:
        yield seen
    finally:
        _captures.reset(token)


def record(module: nnx.Module, value: Any) -> None:
    """Give `value` to each `capture` of `module`; nothing happens where there is none."""
    for paths, seen in _captures.get():
        path = paths.get(id(module))
        if path is not None:
            seen.setdefault(path, []).append(value)
