"""Read in another thread, one step ahead of what uses the results."""

import concurrent.futures
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

Result = TypeVar("Result")


def read_ahead(reads: Iterable[Callable[[], Result]]) -> Generator[Result, None, None]:
    """Yield the result of each read, while a thread makes the next one.

    At most one result is in memory beside the one that the caller holds. Only the reads run in the
    other thread: `reads` is iterated in the caller's, in which contexts such as
    `jax.default_device` have an effect. An error of a read is raised in its turn. Close the
    generator to wait for the read that is under way.

    Args:
      reads: the functions that read, in order.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        coming = None
        for read in reads:
            if coming is None:
                coming = thread.submit(read)
                continue
            result, coming = coming.result(), thread.submit(read)
            yield result
            del result  # the caller decides how long it lives
        if coming is not None:
            yield coming.result()
