"""Python's garbage collector, for tests that ask which of their own objects are alive."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collects_new_objects_alone() -> Iterator[None]:
    """Let nothing be collected but by ``gc.collect(0)``.

    All objects made since the last such call are then young, so that it finds every one that is
    dead. To visit all objects of a worker takes a second.
    """
    enabled = gc.isenabled()
    gc.collect(0)
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
