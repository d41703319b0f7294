"""The subcommand `env`: print the versions, devices and extensions of this installation."""

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.cli.devices import NoDeviceError, list_devices
from jax_nvfp4_moe.cli.escaping import escape_line
from jax_nvfp4_moe.cli.output import show, to_json

_PACKAGES = (
    "jax-nvfp4-moe",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "flax",
    "ml_dtypes",
    "numpy",
    "tokenizers",
    "huggingface_hub",
    "orbax-checkpoint",
    "lm_eval",
)
_SECONDS = 20  # how long to wait for nvidia-smi


def env_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print versions, devices and compiled extensions, as a report of a problem needs them."""
    found = describe()
    if as_json:
        show(to_json(found))
        return
    width = max(map(len, found))
    for name, value in found.items():
        lines = value if isinstance(value, list) else [value]
        for index, line in enumerate(lines):
            show(f"{name if not index else '':<{width}}  {escape_line(line)}")


def describe() -> dict[str, Any]:
    """Return what `env` prints: name -> text, or a list of texts."""
    return {
        "python": f"{platform.python_version()} on {platform.platform()}",
        "packages": list(_packages()),
        "cpu": _cpu(),
        "driver": list(_driver()) or "no NVIDIA driver answers",
        "devices": list(_devices()),
        "extensions": list(_extensions()),
    }


def _packages() -> Iterator[str]:
    """Yield the versions of the installed packages."""
    for name in _PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _cpu() -> str:
    """Return the instruction sets that the CPU kernels choose from, best first."""
    module = _ffi.load("_nvfp4_cpu")
    levels = ", ".join(module.isa_levels()) if module else "unknown"
    return f"{platform.machine()}, kernels for {levels}"


def _driver() -> Iterator[str]:
    """Yield a line for each GPU that the NVIDIA driver lists."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return
    query = "--query-gpu=name,compute_cap,memory.total,driver_version"
    try:
        done = subprocess.run(
            [command, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield f"nvidia-smi failed: {error}"
        return
    yield from (done.stdout or done.stderr).strip().splitlines()


def _devices() -> Iterator[str]:
    """Yield a line for each device that JAX uses, or why it has none."""
    try:
        devices = list_devices()
    except NoDeviceError as error:
        yield str(error)
        return
    for device in devices:
        capability = getattr(device, "compute_capability", None)
        kind = f"{device.platform}: {device.device_kind}"
        yield f"{kind}, compute capability {capability}" if capability else kind


def _extensions() -> Iterator[str]:
    """Yield what each extension was built for, or why it cannot be used."""
    for name in _ffi.EXTENSIONS:
        module, reason = _ffi.load(name), _ffi.why_unavailable(name)
        if module is None:
            yield f"{name}: {reason}"
        elif name == "_nvfp4_cuda":
            yield (
                f"{name}: built for {module.architectures()} with nvcc {module.nvcc_version()}, "
                f"because {_why(_ffi.load('_nvfp4_cpu'))}"
            )
        else:
            yield f"{name}: usable"
    parts = [part for part, (whole, *_) in _ffi.PARTS.items() if _ffi.load(whole)]
    yield from (f"{name}: {reason}" for name, reason in _ffi.missing(tuple(parts)))


def _why(module) -> str:
    """Return why the build chose its architectures."""
    return module.why_cuda() if module else "the build said so"
