"""Load the compiled extensions and register their FFI targets, or say why that is not possible."""

import contextlib
import functools
import importlib
import logging
import re
import types

import jax
import jaxlib.version

_LOG = logging.getLogger("jax_nvfp4_moe")

# How to get the CUDA kernels. Without these options, pip keeps what is installed, or takes a wheel
# of its cache.
BUILD_CUDA = (
    "reinstall the package in its source folder with `pip install --force-reinstall --no-deps "
    "--no-cache-dir .`, and add `-C cmake.define.NVFP4_CUDA=ON` on a machine without an NVIDIA "
    "driver"
)
# Extension module -> the platform for which its targets are registered, and how to install it.
EXTENSIONS = {
    "_nvfp4_cpu": ("cpu", "reinstall the package with a C++17 compiler at hand"),
    "_nvfp4_cuda": ("CUDA", BUILD_CUDA),
}

# Optional parts of an extension -> the extension, an FFI target that is registered only if this
# process can use the part, and why it cannot.
PARTS = {
    "_nvfp4_cpu.attention_amx": ("_nvfp4_cpu", "nvfp4_attention_amx", "which needs AMX-BF16"),
    "_nvfp4_cpu.attention_avx512": (
        "_nvfp4_cpu",
        "nvfp4_attention_avx512",
        "which needs AVX512-BF16",
    ),
    "_nvfp4_cuda.w4a4_sm100": (
        "_nvfp4_cuda",
        "nvfp4_moe_w4a4_sm100",
        "it was built without CUTLASS's headers: reinstall it with `pip install . -C "
        "cmake.define.NVFP4_CUDA=ON -C build.requires=nvidia-cutlass==4.2.0.0`",
    ),
}


@functools.cache
def load(extension: str) -> types.ModuleType | None:
    """Import `extension` and register its FFI targets, once per process.

    Returns:
      The module, or None if it cannot be used; `why_unavailable` returns the reason.
    """
    return None if why_unavailable(extension) else _module(extension)


@functools.cache
def why_unavailable(extension: str) -> str | None:
    """Return why `extension`, or an optional part of one, cannot be used; None if it can be.

    The first call registers the FFI targets. The version of the FFI headers is compared before
    that. Registering a handler that was built with newer headers than those of the running jaxlib
    would break the whole platform.
    """
    if extension in PARTS:
        return _why_part_is_missing(*PARTS[extension])
    platform, remedy = EXTENSIONS[extension]
    try:
        module = _module(extension)
    except ImportError as error:
        return f"the extension {extension} is not usable here ({_cause(error)}): {remedy}"
    built, running = tuple(module.ffi_api_version()), _running_ffi_api_version()
    if built[0] != running[0] or built > running:
        return (
            f"the extension {extension} was built for XLA FFI {built[0]}.{built[1]}, and jaxlib "
            f"{jaxlib.version.__version__} supports {running[0]}.{running[1]}: {remedy}, "
            "or upgrade jax"
        )
    for name, capsule in module.registrations().items():
        jax.ffi.register_ffi_target(name, capsule, platform=platform)
    _LOG.debug("registered the FFI targets of %s", extension)
    return None


def _cause(error: ImportError) -> str:
    """Return why an extension is missing. The CPU module tells why the build left CUDA out."""
    if isinstance(error, ModuleNotFoundError) and str(error.name).endswith("_nvfp4_cuda"):
        with contextlib.suppress(ImportError):
            return f"it was not built: {_module('_nvfp4_cpu').why_cuda()}"
    return str(error)


def why_not_built_for(capability: tuple[int, int]) -> str | None:
    """Return why the CUDA extension has no kernels for a GPU; None if it has, or is missing.

    Args:
      capability: the compute capability of the GPU.
    """
    if why_unavailable("_nvfp4_cuda"):
        return None
    built = _module("_nvfp4_cuda").architectures().split()
    if any(runs_on(architecture, capability) for architecture in built):
        return None
    return (
        f"the extension _nvfp4_cuda was built for {' '.join(built)}, and this GPU has compute "
        f"capability {capability[0]}.{capability[1]}: {BUILD_CUDA}"
    )


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Return whether code for an architecture, as CMake names it, runs on a GPU.

    Machine code runs on GPUs of the same major number and of the same or a later minor number. Code
    with features of one chip ("90a") runs on that chip alone. Intermediate code ("80-virtual", or
    no ending) runs on all later GPUs. Other names, such as "native", say nothing about a GPU.

    Source: "GPU compilation" in the documentation of nvcc, and CUDA_ARCHITECTURES in CMake's.
    """
    found = re.fullmatch(r"(\d+)(\d)([af]?)(-real|-virtual)?", architecture)
    if found is None:
        return True
    own = int(found[1]), int(found[2])
    if found[3] == "a":
        return capability == own
    same_family = capability[0] == own[0] and capability >= own
    return same_family or (found[4] != "-real" and not found[3] and capability >= own)


def _why_part_is_missing(extension, target, remedy):
    """Return why `extension`, or the FFI target `target` in it, cannot be used, else None."""
    if reason := why_unavailable(extension):
        return reason
    if target in _module(extension).registrations():
        return None
    return f"the extension {extension} has no {target}, {remedy}"


def missing(extensions=tuple(EXTENSIONS)) -> tuple[tuple[str, str], ...]:
    """Return pairs (extension or part, reason) for those that this process cannot use."""
    reasons = ((name, why_unavailable(name)) for name in extensions)
    return tuple((name, reason) for name, reason in reasons if reason)


@functools.cache
def _module(extension):
    """Import an extension of this package."""
    return importlib.import_module(f"jax_nvfp4_moe.{extension}")


@functools.cache
def _running_ffi_api_version():
    """Read the FFI version of the running jaxlib from the header that jaxlib ships."""
    header = f"{jax.ffi.include_dir()}/xla/ffi/api/c_api.h"
    found = {}
    with open(header, encoding="utf-8") as lines:
        for line in lines:
            words = line.split()
            if len(words) == 3 and words[:1] == ["#define"] and words[2].isdigit():
                found[words[1]] = int(words[2])
    return found["XLA_FFI_API_MAJOR"], found["XLA_FFI_API_MINOR"]
