"""Test what `env` says about an installation, with and without GPUs, extensions and a driver."""

import json

import jax
import pytest

from jax_nvfp4_moe.backends import _ffi, resolution
from jax_nvfp4_moe.cli import app as cli
from jax_nvfp4_moe.cli import env
from jax_nvfp4_moe.ops.records import RECORDS
from jax_nvfp4_moe.scheme import Problem, Scheme, Target

H200 = Target("cuda", (9, 0))


@pytest.fixture
def run(capsys):
    """Return a function that runs `env` here and returns its standard output."""

    def call(*arguments):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["env", *arguments])
        assert not stopped.value.code
        return capsys.readouterr().out

    return call


def test_it_prints_what_a_report_needs(run):
    out = run()
    found = json.loads(run("--json"))
    assert f"jax {jax.__version__}" in found["packages"]
    assert any(one.startswith("cpu") or "gpu" in one for one in found["devices"])
    assert any(one.startswith("_nvfp4_cpu: usable") for one in found["extensions"])
    for value in found.values():
        for line in value if isinstance(value, list) else [value]:
            assert line in out


def test_a_platform_that_is_not_there_is_said(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", fail)
    assert env.describe()["devices"] == ["JAX has no device: Unable to initialize backend 'cuda'"]


def test_gpus_are_listed_by_the_driver(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 9.0, 143771 MiB, 580.159.04'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert env.describe()["driver"] == ["NVIDIA H200, 9.0, 143771 MiB, 580.159.04"]
    smi.unlink()
    assert env.describe()["driver"] == "no NVIDIA driver answers"


class Extension:
    """Stands for a compiled module."""

    def __init__(self, architectures="90a-real"):
        self._architectures = architectures

    def ffi_api_version(self):
        return 0, 1

    def registrations(self):
        return {}

    def architectures(self):
        return self._architectures

    def nvcc_version(self):
        return "13.0.88"

    def why_cuda(self):
        return "no NVIDIA driver was found when the package was built"


@pytest.fixture
def extensions(monkeypatch):
    """Return a function that replaces the CUDA module; None takes it away."""
    cached = (_ffi.why_unavailable, _ffi.load, _ffi._module, resolution._warn_of_extension)

    def clear():
        for function in cached:
            function.cache_clear()

    def give(cuda):
        def find(name):
            if name == "_nvfp4_cpu":
                return Extension()
            if cuda is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=f"jax_nvfp4_moe.{name}")
            return cuda

        clear()
        monkeypatch.setattr(_ffi, "_module", find)
        monkeypatch.setattr(Target, "current", classmethod(lambda cls: H200))

    yield give
    monkeypatch.undo()
    clear()


def listed(name):
    return next(one for one in env._extensions() if one.startswith(f"{name}:"))


def test_a_build_without_cuda_says_why_and_how_to_get_it(extensions, caplog):
    extensions(None)
    line = listed("_nvfp4_cuda")
    assert "it was not built: no NVIDIA driver was found when the package was built" in line
    assert "-C cmake.define.NVFP4_CUDA=ON" in line
    problem = Problem("moe_mlp", Scheme.W4A16, H200, num_experts=8, hidden=64, intermediate=32)
    for _ in range(2):
        assert resolution.resolve(problem, RECORDS).backend.name == "reference"
    said = [one.message for one in caplog.records if "no kernels on cuda 9.0" in one.message]
    assert len(said) == 1
    assert "no NVIDIA driver was found" in said[0]
    assert "pip install --force-reinstall" in said[0]


def test_a_build_for_other_gpus_says_so(extensions, caplog):
    extensions(Extension("80-real 120f-real"))
    problem = Problem("moe_mlp", Scheme.W4A16, H200, num_experts=8, hidden=64, intermediate=32)
    plan = resolution.resolve(problem, RECORDS)
    assert plan.backend.name == "reference"
    reason = dict(plan.problem.unavailable)["_nvfp4_cuda"]
    assert "was built for 80-real 120f-real, and this GPU has compute capability 9.0" in reason
    assert reason in caplog.text
    assert "built for 80-real 120f-real with nvcc 13.0.88" in listed("_nvfp4_cuda")


def test_a_build_for_this_gpu_is_taken(extensions, caplog):
    extensions(Extension("90a-real"))
    problem = Problem("moe_mlp", Scheme.W4A16, H200, num_experts=8, hidden=64, intermediate=32)
    assert resolution.resolve(problem, RECORDS).backend.name == "moe_w4a16_sm90"
    assert "no kernels" not in caplog.text
