"""Pause Python's garbage collector while many objects are made that stay."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Pause the collection of cyclic garbage in this process, as a context or as a decorator.

    The headers of a large checkpoint become some hundred thousand objects. Without a pause, their
    number starts collections that walk all objects of JAX and free nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
