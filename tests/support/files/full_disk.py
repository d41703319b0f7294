"""Let writing fail as it does on a full disk."""

import contextlib
import resource

import jax


@contextlib.contextmanager
def full_disk(most: int):
    """Refuse files of more than `most` bytes. Python ignores the signal that the system sends.

    Programs that are compiled meanwhile are not cached, because the limit would cut their files.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before, (soft, hard) = getattr(jax.config, name), resource.getrlimit(resource.RLIMIT_FSIZE)
    jax.config.update(name, 1e9)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        jax.config.update(name, before)
