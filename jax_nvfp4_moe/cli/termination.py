"""Clean up when the system ends a command, as an error does."""

import contextlib
import signal
import sys
from collections.abc import Iterator

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def cleaning_up() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `SystemExit`, so that the block deletes what is incomplete.

    By default, these signals end a process at once. The exit status is 128 plus the signal's
    number, as a shell reports it.
    """

    def leave(number, frame):
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
