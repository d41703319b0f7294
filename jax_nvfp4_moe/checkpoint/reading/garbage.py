"""Pause Python's garbage collector while many objects are made that stay."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Pause the collection of cyclic garbage in this process, as a context or as a decorator.

    The headers of a large checkpoint become some hundred thousand objects. Without a pause, their
    number starts collections that walk all objects of JAX and free nothing.

    Afterwards all objects are old. Otherwise the next three collections, of young objects, would
    walk the objects of the headers. Nothing is moved if the process has frozen objects itself.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
