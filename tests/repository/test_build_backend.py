"""Test what the build backend builds and requires, with stand-ins for the driver and for nvcc."""

import importlib.util
import subprocess
import sys

import pytest
from support.files.given import ROOT

from jax_nvfp4_moe.backends._ffi import runs_on

DRIVER = """
extern "C" int cuDriverGetVersion(int* v) { *v = VERSION; return 0; }
extern "C" int cuInit(unsigned) { return INIT; }
extern "C" int cuDeviceGetCount(int* n) { *n = 2; return 0; }
extern "C" int cuDeviceGet(int* device, int index) { *device = 10 + index; return 0; }
extern "C" int cuDeviceGetAttribute(int* v, int attribute, int device) {
  *v = attribute == 75 ? (device == 10 ? 9 : 12) : attribute == 76 ? 0 : -1;
  return 0;
}
"""


def load_backend():
    spec = importlib.util.spec_from_file_location("nvfp4_build", ROOT / "ffi" / "nvfp4_build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nvfp4_build"] = module  # a dataclass looks its module up by name
    spec.loader.exec_module(module)
    return module


backend = load_backend()
Driver, Nvcc = backend.Driver, backend.Nvcc
H200, CUDA13 = Driver((13, 0), ((9, 0),)), Nvcc("/usr/bin/nvcc", (13, 0))


def make_driver(folder, version=13000, init=0):
    source = folder / "driver.cc"
    source.write_text(DRIVER)
    library = folder / "libcuda.so.1"
    defines = [f"-DVERSION={version}", f"-DINIT={init}"]
    subprocess.run(["g++", "-shared", "-fPIC", *defines, source, "-o", library], check=True)
    return str(library)


def make_nvcc(folder, release):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("option", "architectures", "driver", "compilers", "built", "compiler", "required"),
    [
        # No driver: AUTO builds for the CPU, and downloads nothing.
        ("AUTO", "", None, [], "", None, ()),
        ("AUTO", "", None, [CUDA13], "", None, ()),
        ("AUTO", "", Driver((13, 0), ()), [], "", None, ()),
        # A driver and an nvcc that fits.
        ("AUTO", "", H200, [CUDA13], "90a-real", CUDA13, ()),
        ("AUTO", "80-real", H200, [CUDA13], "80-real", CUDA13, ()),
        ("AUTO", "", Driver((13, 0), ((8, 9), (8, 0))), [CUDA13], "80-real", CUDA13, ()),
        ("AUTO", "", Driver((13, 0), ((7, 5), (12, 0))), [CUDA13], "120f-real", CUDA13, ()),
        ("AUTO", "", Driver((13, 0), ((11, 0),)), [CUDA13], "80-virtual", CUDA13, ()),
        (
            *("AUTO", "", Driver((13, 0), ((10, 3),)), [CUDA13], "100f-real", CUDA13),
            (backend.CUTLASS_WHEEL,),
        ),
        # A driver without an nvcc that fits: the wheels.
        ("AUTO", "", H200, [], "90a-real", None, backend.NVCC_WHEELS),
        ("AUTO", "", H200, [Nvcc("old", (12, 8))], "90a-real", None, backend.NVCC_WHEELS),
        ("AUTO", "", H200, [Nvcc("newer", (14, 0))], "90a-real", None, backend.NVCC_WHEELS),
        # A driver that does not run what the wheels make.
        ("AUTO", "", Driver((12, 9), ((9, 0),)), [], "", None, ()),
        (
            *("AUTO", "", Driver((12, 9), ((9, 0),)), [CUDA13, Nvcc("own", (12, 9))]),
            *("90a-real", Nvcc("own", (12, 9)), ()),
        ),
        # GPUs that are too old.
        ("AUTO", "", Driver((13, 0), ((7, 5),)), [CUDA13], "", None, ()),
        # ON needs no driver, and builds for all GPUs.
        ("ON", "", None, [CUDA13], backend.ALL_ARCHITECTURES, CUDA13, ()),
        ("ON", "90a-real", None, [], "90a-real", None, backend.NVCC_WHEELS),
        ("ON", "", H200, [], backend.ALL_ARCHITECTURES, None, backend.NVCC_WHEELS),
        ("OFF", "90a-real", H200, [CUDA13], "", None, ()),
    ],
)
def test_decisions(option, architectures, driver, compilers, built, compiler, required):
    found = backend.decide(option, architectures, driver, compilers)
    assert (found.architectures, found.nvcc, found.requirements) == (built, compiler, required)
    assert found.why


def test_a_wrong_option_is_named():
    with pytest.raises(SystemExit, match="NVFP4_CUDA: expected AUTO, ON or OFF, got 'MAYBE'"):
        backend.decide("MAYBE", "", None, [])


def test_the_driver_is_asked_for_its_gpus(tmp_path):
    assert backend.find_driver(make_driver(tmp_path)) == Driver((13, 0), ((9, 0), (12, 0)))
    assert backend.find_driver(str(tmp_path / "there_is_none.so")) is None
    (tmp_path / "hidden").mkdir()
    no_gpu = make_driver(tmp_path / "hidden", version=12090, init=100)
    assert backend.find_driver(no_gpu) == Driver((12, 9), ())


def test_compilers_in_their_order(tmp_path, monkeypatch):
    home = make_nvcc(tmp_path / "home" / "bin", "12.4")
    path = make_nvcc(tmp_path / "path", "13.0")
    wheel = make_nvcc(tmp_path / "nvidia" / "cu13" / "bin", "13.1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", f"{path.parent}:/bin:/usr/bin")
    monkeypatch.setattr(backend, "_wheel_compilers", lambda: [str(wheel)])
    found = backend.find_compilers(None)
    assert [nvcc for nvcc in found if str(tmp_path) in nvcc.path] == [
        Nvcc(str(home), (12, 4)),
        Nvcc(str(path), (13, 0)),
        Nvcc(str(wheel), (13, 1)),
    ]
    named = {"cmake.define.CMAKE_CUDA_COMPILER": str(home)}
    assert backend.find_compilers(named) == [Nvcc(str(home), (12, 4))]
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert backend.find_compilers({"cmake.define.CMAKE_CUDA_COMPILER": str(broken)}) == []


@pytest.fixture
def machine(monkeypatch):
    """Return a function that gives the backend a driver and compilers."""
    monkeypatch.delenv("SKBUILD_CMAKE_DEFINE", raising=False)
    monkeypatch.chdir(ROOT)  # scikit-build-core reads pyproject.toml

    def give(driver, compilers):
        monkeypatch.setattr(backend, "find_driver", lambda: driver)
        monkeypatch.setattr(backend, "find_compilers", lambda settings: compilers)

    return give


@pytest.mark.parametrize(
    "hook", ["get_requires_for_build_wheel", "get_requires_for_build_editable"]
)
def test_what_pip_installs_for_the_build(machine, hook):
    require = getattr(backend, hook)

    def cuda(settings=None):
        return [name for name in require(settings) if name.startswith("nvidia")]

    machine(None, [])
    assert cuda() == []
    assert cuda({"cmake.define.NVFP4_CUDA": "ON"}) == list(backend.NVCC_WHEELS)
    machine(H200, [])
    assert cuda() == list(backend.NVCC_WHEELS)
    assert cuda({"cmake.define.NVFP4_CUDA": "off"}) == []
    machine(H200, [CUDA13])
    assert cuda() == []
    machine(Driver((13, 0), ((10, 0),)), [CUDA13])
    assert cuda() == [backend.CUTLASS_WHEEL]
    assert cuda({"cmake.define.NVFP4_CUTLASS_INCLUDE": "/headers"}) == []


def test_off_asks_nothing(monkeypatch):
    def fail(*_):
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(backend, "find_driver", fail)
    monkeypatch.setattr(backend, "find_compilers", fail)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SKBUILD_CMAKE_DEFINE", "NVFP4_CUDA=OFF")
    assert not any("nvidia" in one for one in backend.get_requires_for_build_wheel(None))
    given = {"cmake.define.NVFP4_CUDA": "OFF"}
    assert not any("nvidia" in one for one in backend.get_requires_for_build_wheel(given))


def test_what_scikit_build_core_gets(machine, monkeypatch, tmp_path):
    seen = {}

    def build(folder, settings, metadata):
        seen.update(settings)
        return "a.whl"

    monkeypatch.setattr(backend.scikit_build, "build_wheel", build)
    machine(H200, [CUDA13])
    given = {"skbuild.cmake.define.NVFP4_CUDA": "AUTO", "build-dir": "there"}
    assert backend.build_wheel(str(tmp_path), given) == "a.whl"
    assert seen == {
        "build-dir": "there",
        "cmake.define.NVFP4_CUDA": "ON",
        "cmake.define.NVFP4_CUDA_ARCHITECTURES": "90a-real",
        "cmake.define.NVFP4_CUDA_WHY": "the GPUs had compute capability 9.0",
        "cmake.define.CMAKE_CUDA_COMPILER": "/usr/bin/nvcc",
    }
    seen.clear()
    machine(None, [])
    backend.build_wheel(str(tmp_path))
    assert seen == {
        "cmake.define.NVFP4_CUDA": "OFF",
        "cmake.define.NVFP4_CUDA_WHY": "no NVIDIA driver was found when the package was built",
    }


def test_a_build_that_should_have_kernels_and_cannot_have_them_fails(
    machine, monkeypatch, tmp_path
):
    """An installation without them would run the reference on the GPU."""
    machine(H200, [])  # as without isolation: pip has installed no wheels
    with pytest.raises(SystemExit) as caught:
        backend.build_wheel(str(tmp_path))
    message = str(caught.value)
    assert "no nvcc of version 12.9 or newer was found" in message
    assert "pip install nvidia-cuda-nvcc==13.0.88" in message
    assert message.rstrip().endswith("add -C cmake.define.NVFP4_CUDA=OFF.")

    def fail(*_):
        raise RuntimeError("CMake build failed")

    monkeypatch.setattr(backend.scikit_build, "build_editable", fail)
    machine(H200, [CUDA13])
    with pytest.raises(SystemExit, match="CMake build failed") as caught:
        backend.build_editable(str(tmp_path))
    assert str(caught.value).rstrip().endswith("add -C cmake.define.NVFP4_CUDA=OFF.")
    machine(None, [])  # a failure that has nothing to do with CUDA stays as it is
    with pytest.raises(RuntimeError, match="CMake build failed"):
        backend.build_editable(str(tmp_path))


@pytest.mark.parametrize(
    ("architecture", "runs", "does_not"),
    [
        ("80-real", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0), (12, 0)]),
        ("86-real", [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        ("90a-real", [(9, 0)], [(8, 0), (9, 1), (10, 0)]),
        ("100f-real", [(10, 0), (10, 3)], [(9, 0), (11, 0), (12, 0)]),
        ("120f-real", [(12, 0), (12, 1)], [(10, 0)]),
        ("80-virtual", [(8, 0), (9, 0), (12, 0)], [(7, 5)]),
        ("80", [(8, 0), (9, 0)], [(7, 5)]),
        ("native", [(9, 0)], []),
    ],
)
def test_which_gpus_run_an_architecture(architecture, runs, does_not):
    assert [one for one in runs if not runs_on(architecture, one)] == []
    assert [one for one in does_not if runs_on(architecture, one)] == []


def test_every_architecture_of_a_release_serves_the_gpus_that_are_documented():
    built = backend.ALL_ARCHITECTURES.split(";")
    for gpu in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)):
        assert any(runs_on(one, gpu) for one in built), gpu
