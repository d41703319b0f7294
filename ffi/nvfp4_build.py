"""The build backend: scikit-build-core, which gets what the CUDA kernels need on this machine.

The option `NVFP4_CUDA` (``-C cmake.define.NVFP4_CUDA=...``) decides whether the kernels are built:

* AUTO, the default: if this machine has an NVIDIA driver and a GPU that the kernels support. They
  are built for the GPUs of this machine.
* ON: always, and for all architectures. No driver is needed.
* OFF: never.

`NVFP4_CUDA_ARCHITECTURES` names other architectures. If no nvcc of a fitting version is found, the
nvcc of PyPI's wheels becomes a requirement of the build, which pip installs for the build alone.

A build that should have CUDA kernels and cannot have them fails: an installation without them would
run a slow reference on the GPU.

Source: PEP 517, and https://scikit-build-core.readthedocs.io on in-tree backends.
"""

import ctypes
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from scikit_build_core import build as scikit_build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Version = tuple[int, int]
Settings = Mapping[str, Any] | None

OLDEST = (12, 9)  # the first nvcc that knows 100f and 120f
# nvcc depends on the others without naming versions, so that pip would mix releases. Every driver
# for CUDA 13 runs what these make.
NVCC_WHEELS = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)
WHEELS_VERSION = (13, 0)
CUTLASS_WHEEL = "nvidia-cutlass==4.2.0.0"
# Code for 8.0 runs on 8.6 and 8.9, too, and no kernel has other code for them.
ALL_ARCHITECTURES = "80;90a-real;100f-real;120f-real"
# The major number of a compute capability -> the architecture of its kernels. Other GPUs compile
# the intermediate code for 8.0 when they load it.
_ARCHITECTURES = {8: "80-real", 9: "90a-real", 10: "100f-real", 12: "120f-real"}
_INTERMEDIATE = "80-virtual"
_WITHOUT = "To install without CUDA kernels, add -C cmake.define.NVFP4_CUDA=OFF"


@dataclasses.dataclass(frozen=True)
class Driver:
    """The NVIDIA driver of this machine.

    Attributes:
      cuda: the newest version of CUDA that the driver supports.
      capabilities: the compute capability of each GPU that this process may use.
    """

    cuda: Version
    capabilities: tuple[Version, ...]


@dataclasses.dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler."""

    path: str
    version: Version


@dataclasses.dataclass(frozen=True)
class Decision:
    """What is built.

    Attributes:
      architectures: CMake's list of architectures; empty if the CUDA kernels are not built.
      why: why the kernels are not built, or are built for these architectures.
      nvcc: the compiler. None if there is no kernel to build, or if the wheels bring the compiler.
      requirements: the packages that the build needs besides those of scikit-build-core.
    """

    architectures: str
    why: str
    nvcc: Nvcc | None = None
    requirements: tuple[str, ...] = ()


class BuildError(SystemExit):
    """End the build with a message, which pip shows last."""

    def __init__(self, problem: str):
        super().__init__(f"\njax-nvfp4-moe: {problem}\n{_WITHOUT}.\n")


def read_option(settings: Settings, name: str, default: str = "") -> str:
    """Return the value of a CMake option, as the caller of pip has set it."""
    defined = os.environ.get("SKBUILD_CMAKE_DEFINE", "").split(";")
    given = {f"cmake.define.{pair.split('=')[0]}": pair.partition("=")[2] for pair in defined}
    given |= {key.removeprefix("skbuild."): value for key, value in (settings or {}).items()}
    return str(given.get(f"cmake.define.{name}", default))


def decide(
    option: str,
    architectures: str,
    driver: Driver | None,
    compilers: Sequence[Nvcc],
    *,
    has_cutlass: bool = False,
) -> Decision:
    """Decide whether the CUDA kernels are built, for which GPUs, and by which compiler.

    Args:
      option: the value of `NVFP4_CUDA`.
      architectures: the value of `NVFP4_CUDA_ARCHITECTURES`; empty if it is not set.
      driver: the driver of this machine; None if there is none.
      compilers: the compilers of this machine, in the order of preference.
      has_cutlass: whether the caller says where CUTLASS's headers are.

    Raises:
      BuildError: the option has no such value.
    """
    if option not in ("AUTO", "ON", "OFF"):
        raise BuildError(f"NVFP4_CUDA: expected AUTO, ON or OFF, got {option!r}")
    if option == "OFF":
        return Decision("", "NVFP4_CUDA was OFF")
    wanted, why = ALL_ARCHITECTURES, "NVFP4_CUDA was ON"
    if option == "AUTO":
        wanted, why = _of_this_machine(driver)
    wanted = (architectures or wanted) if wanted else ""
    if not wanted:
        return Decision("", why)
    newest = driver.cuda[0] if driver else None
    fitting = [
        nvcc
        for nvcc in compilers
        if nvcc.version >= OLDEST and (newest is None or nvcc.version[0] <= newest)
    ]
    # A build for all architectures leaves these kernels out unless the caller brings the headers:
    # one file takes 7 GB of memory to compile.
    needs_cutlass = option == "AUTO" and "100f" in wanted and not has_cutlass
    headers = (CUTLASS_WHEEL,) if needs_cutlass else ()
    if fitting:
        return Decision(wanted, why, fitting[0], headers)
    if newest is not None and newest < WHEELS_VERSION[0]:
        return Decision(
            "",
            f"the NVIDIA driver supports CUDA {_text(driver.cuda)}, and no nvcc from "
            f"{_text(OLDEST)} to that version was found; a driver for CUDA 13 (580 or newer) "
            "needs none",
        )
    return Decision(wanted, why, None, (*NVCC_WHEELS, *headers))


def _of_this_machine(driver) -> tuple[str, str]:
    """Return the architectures of this machine's GPUs, or an empty text, and the reason."""
    if driver is None:
        return "", "no NVIDIA driver was found when the package was built"
    if not driver.capabilities:
        return "", "no GPU was found when the package was built"
    served = sorted({one for one in driver.capabilities if one >= (8, 0)})
    found = ", ".join(map(_text, sorted(set(driver.capabilities))))
    if not served:
        return "", f"the GPU had compute capability {found}, and the kernels need 8.0 or newer"
    names = [_ARCHITECTURES.get(major, _INTERMEDIATE) for major, _ in served]
    return ";".join(dict.fromkeys(names)), f"the GPUs had compute capability {found}"


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def find_driver(library: str = "libcuda.so.1") -> Driver | None:
    """Ask the NVIDIA driver for its version and its GPUs.

    Returns:
      None if there is no driver.
    """
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return None
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)):
        return None
    version = number.value // 1000, number.value % 1000 // 10
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(number)):
        return Driver(version, ())
    return Driver(version, tuple(_capability(cuda, index) for index in range(number.value)))


def _capability(cuda, index) -> Version:
    """Return the compute capability of one GPU."""
    device, value = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    parts = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        parts.append(value.value)
    return parts[0], parts[1]


def find_compilers(settings: Settings) -> list[Nvcc]:
    """Return the CUDA compilers of this machine, in the order of preference.

    A compiler that the caller names with CMAKE_CUDA_COMPILER is the only one.
    """
    named = read_option(settings, "CMAKE_CUDA_COMPILER")
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [named] if named else [*(f"{home}/bin/nvcc" for home in homes if home)]
    if not named:
        places += [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc", *_wheel_compilers()]
    found = [_read_version(place) for place in dict.fromkeys(places) if place]
    return [nvcc for nvcc in found if nvcc is not None]


def _wheel_compilers() -> list[str]:
    """Return where the wheels put nvcc, if they are installed for the build."""
    try:
        import nvidia  # a namespace package: each wheel adds a folder
    except ImportError:
        return []
    return [f"{folder}/cu13/bin/nvcc" for folder in nvidia.__path__]


def _read_version(path) -> Nvcc | None:
    """Return the compiler at `path`, or None if there is none that runs."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return Nvcc(str(path), (int(found[1]), int(found[2]))) if found else None


def _decide_here(settings: Settings) -> Decision:
    """Decide for this machine and what the caller of pip has set."""
    option = read_option(settings, "NVFP4_CUDA", "AUTO").upper()
    if option == "OFF":  # no process is started, and no driver is loaded
        return decide(option, "", None, ())
    return decide(
        option,
        read_option(settings, "NVFP4_CUDA_ARCHITECTURES"),
        find_driver(),
        find_compilers(settings),
        has_cutlass=bool(read_option(settings, "NVFP4_CUTLASS_INCLUDE")),
    )


def _with_decision(settings: Settings) -> dict[str, Any]:
    """Return the settings with which scikit-build-core builds what was decided.

    Raises:
      BuildError: the CUDA kernels are to be built, and there is no compiler.
    """
    found = _decide_here(settings)
    if found.architectures and found.nvcc is None:
        raise BuildError(
            f"no nvcc of version {_text(OLDEST)} or newer was found for the CUDA kernels. pip "
            "installs one for the build unless --no-build-isolation is set. With that option, "
            f"first run: pip install {' '.join(NVCC_WHEELS)}"
        )
    made = {
        "NVFP4_CUDA": "ON" if found.architectures else "OFF",
        "NVFP4_CUDA_WHY": found.why,
        "NVFP4_CUDA_ARCHITECTURES": found.architectures,
    }
    if found.nvcc:
        made["CMAKE_CUDA_COMPILER"] = found.nvcc.path
    ours = {f"cmake.define.{name}": value for name, value in made.items() if value}
    old = {f"skbuild.{name}" for name in ours}
    return {key: value for key, value in (settings or {}).items() if key not in old} | ours


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Return what a build needs besides the packages of `pyproject.toml`."""
    own = scikit_build.get_requires_for_build_wheel(config_settings)
    return [*own, *_decide_here(config_settings).requirements]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Return what an editable build needs besides the packages of `pyproject.toml`."""
    own = scikit_build.get_requires_for_build_editable(config_settings)
    return [*own, *_decide_here(config_settings).requirements]


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel, and return its name."""
    return _build(scikit_build.build_wheel, wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel of an editable installation, and return its name."""
    return _build(scikit_build.build_editable, wheel_directory, config_settings, metadata_directory)


def _build(build, wheel_directory, settings, metadata_directory) -> str:
    """Build, and end a failed build of CUDA kernels with what the user can do."""
    made = _with_decision(settings)
    try:
        return build(wheel_directory, made, metadata_directory)
    except BaseException as error:
        if made.get("cmake.define.NVFP4_CUDA") == "ON" and not isinstance(error, KeyboardInterrupt):
            name = pathlib.Path(made["cmake.define.CMAKE_CUDA_COMPILER"])
            raise BuildError(f"the build failed, and {name} compiles in it: {error}") from error
        raise
