"""Test that extensions are found, checked before registration, and may be missing."""

import subprocess
import sys
import types

import pytest

from jax_nvfp4_moe.backends import _ffi


@pytest.fixture
def fresh(monkeypatch):
    """Forget the extensions that were loaded, before and after a test."""
    for cached in (_ffi.load, _ffi.why_unavailable):
        cached.cache_clear()
    yield monkeypatch
    for cached in (_ffi.load, _ffi.why_unavailable):
        cached.cache_clear()


def extension(version, names=()):
    module = types.ModuleType("extension")
    module.ffi_api_version = lambda: version
    module.registrations = lambda: dict.fromkeys(names, object())
    return module


def test_the_cpu_extension_is_built_and_usable():
    assert _ffi.why_unavailable("_nvfp4_cpu") is None
    targets = _ffi.load("_nvfp4_cpu").registrations()
    assert {"nvfp4_moe_w4a16_cpu", "nvfp4_grouped_gemm_w4a16_cpu"} <= targets.keys()


@pytest.mark.parametrize(("major", "minor"), [(0, 1), (1, 0)])
def test_newer_headers_are_refused_before_registration(fresh, major, minor):
    running = _ffi._running_ffi_api_version()
    built = (running[0] + major, running[1] + minor)
    registered = []
    fresh.setattr(_ffi, "_module", lambda name: extension(built, ["nvfp4_x"]))
    fresh.setattr(_ffi.jax.ffi, "register_ffi_target", lambda *a, **k: registered.append(a))
    reason = _ffi.why_unavailable("_nvfp4_cpu")
    assert f"was built for XLA FFI {built[0]}.{built[1]}" in reason
    assert f"supports {running[0]}.{running[1]}" in reason
    assert _ffi.load("_nvfp4_cpu") is None
    assert registered == []


def test_older_headers_are_taken(fresh):
    registered = []
    fresh.setattr(_ffi, "_module", lambda name: extension((0, 1), ["nvfp4_x"]))
    fresh.setattr(
        _ffi.jax.ffi, "register_ffi_target", lambda name, *a, **k: registered.append(name)
    )
    assert _ffi.why_unavailable("_nvfp4_cpu") is None
    assert registered == ["nvfp4_x"]


def test_a_missing_extension_says_what_to_install(fresh):
    def absent(name):
        raise ImportError(f"No module named {name}")

    fresh.setattr(_ffi, "_module", absent)
    assert "NVFP4_CUDA=ON" in _ffi.why_unavailable("_nvfp4_cuda")
    assert dict(_ffi.missing()).keys() == {"_nvfp4_cpu", "_nvfp4_cuda"}


@pytest.mark.parametrize("built_with_cutlass", [False, True])
def test_a_missing_part_says_what_to_install(fresh, built_with_cutlass):
    names = ["nvfp4_moe_w4a4_sm100"] if built_with_cutlass else []
    fresh.setattr(_ffi, "_module", lambda name: extension((0, 1), names))
    fresh.setattr(_ffi.jax.ffi, "register_ffi_target", lambda *a, **k: None)
    reason = _ffi.why_unavailable("_nvfp4_cuda.w4a4_sm100")
    assert reason is None if built_with_cutlass else "nvidia-cutlass==4.2.0.0" in reason


def test_without_any_extension_the_reference_runs(tmp_path):
    """A wheel of Python files alone imports, computes, and says what a kernel needs."""
    code = """
import sys
sys.modules["jax_nvfp4_moe._nvfp4_cpu"] = None
sys.modules["jax_nvfp4_moe._nvfp4_cuda"] = None
import jax, jax.numpy as jnp, jax_nvfp4_moe as nvfp4
weight = nvfp4.quantize(jnp.ones((16, 32)))
with jax.default_device(jax.devices("cpu")[0]):
    print(float(nvfp4.ops.linear(jnp.ones((1, 32)), weight)[0, 0]))
    try:
        nvfp4.ops.linear(jnp.ones((1, 32)), weight, backend="moe_w4a16_cpu")
    except nvfp4.NoBackendError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("32.0\n")
    assert "moe_w4a16_cpu: the extension _nvfp4_cpu is not usable here" in done.stdout
    assert "runs the slow reference" in done.stderr
