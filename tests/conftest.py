"""Strict promotion everywhere, and markers that skip unless the machine must have the device."""

import importlib
import importlib.util

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def _gpus():
    return [device for device in jax.devices() if device.platform in ("gpu", "cuda")]


def _compute_capability():
    gpus = _gpus()
    return tuple(map(int, gpus[0].compute_capability.split("."))) if gpus else None


def _emulates_blackwell():
    if importlib.util.find_spec("jax_nvfp4_moe._nvfp4_cuda") is None:
        return False
    return importlib.import_module("jax_nvfp4_moe._nvfp4_cuda").emulates_blackwell()


def _why_absent(marker):
    """Say why this machine lacks what `marker` needs; None where it has it."""
    capability = _compute_capability()
    has = {
        "gpu": capability is not None,
        "several_gpus": len(_gpus()) > 1,
        "hopper": capability is not None and capability[0] == 9,
        "blackwell": capability is not None and capability[0] in (10, 12),
        "fp4": capability is not None
        and (capability[0] == 12 or (capability[0] == 9 and _emulates_blackwell())),
        "fp4_sm100": capability is not None and (capability[0] == 10 or _emulates_blackwell()),
        "cuda_build": importlib.util.find_spec("jax_nvfp4_moe._nvfp4_cuda") is not None,
        "cutlass": importlib.util.find_spec("cutlass_library") is not None,
        "deviceless": importlib.util.find_spec("jax_cuda13_plugin") is not None,
    }
    return None if has[marker] else f"this machine has no {marker}"


MARKERS = (
    "gpu",
    "several_gpus",
    "hopper",
    "blackwell",
    "fp4",
    "fp4_sm100",
    "cuda_build",
    "cutlass",
    "deviceless",
)


def pytest_addoption(parser):
    parser.addoption(
        "--must-run",
        action="append",
        default=[],
        choices=MARKERS,
        help="fail instead of skipping where the machine lacks this",
    )


def pytest_runtest_setup(item):
    for marker in MARKERS:
        if item.get_closest_marker(marker) and (why := _why_absent(marker)):
            if marker in item.config.getoption("--must-run"):
                pytest.fail(f"{why}, and --must-run {marker} was given")
            pytest.skip(why)
