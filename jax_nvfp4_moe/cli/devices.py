"""Find the devices of JAX, and say in one sentence why it has none."""

import os
from typing import Any

import jax

from jax_nvfp4_moe.parallel.automatic_mesh import memory_limit

# How JAX begins the message about a platform that it cannot start.
_FAILED = "Unable to initialize backend"


class NoDeviceError(RuntimeError):
    """Report that JAX has no device, mostly because of JAX_PLATFORMS. The message says why."""


def list_devices() -> list[Any]:
    """Return the devices that JAX uses.

    Raises:
      NoDeviceError: JAX has none.
    """
    try:
        return jax.devices()
    except RuntimeError as error:
        raise NoDeviceError(f"JAX has no device: {' '.join(str(error).split())}") from error
    except AssertionError as error:  # it skips "cuda" without a word if no NVIDIA GPU is visible
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
        raise NoDeviceError(
            f"JAX has no device: none of the platforms in JAX_PLATFORMS={platforms} is on this "
            "machine (set JAX_PLATFORMS='' to choose one that is)"
        ) from error


def memory_of(device: Any) -> int:
    """Return the bytes of memory of a device; those of the host if the device is a CPU."""
    limit = memory_limit(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if limit is None else limit


def explain_missing(error: Exception) -> str | None:
    """Return why JAX has no device, if that is why `error` was raised; otherwise None."""
    if isinstance(error, RuntimeError) and str(error).startswith(_FAILED):
        return f"JAX has no device: {' '.join(str(error).split())}"
    if not isinstance(error, AssertionError):
        return None
    try:
        list_devices()
    except NoDeviceError as missing:
        return str(missing)
    return None
