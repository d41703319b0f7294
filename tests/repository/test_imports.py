"""Test that imports point one way, as the rows below say."""

import ast
import importlib
import importlib.metadata
import importlib.util
import pathlib
import pkgutil
import subprocess
import sys
import types

from support.files.given import TESTS

import jax_nvfp4_moe

PACKAGE = pathlib.Path(jax_nvfp4_moe.__file__).parent
# A unit (a module or a subpackage) may import only units in rows above its own.
ROWS = (
    {"interrupts"},
    {"numerics"},
    {"scheme"},
    {"backends"},
    {"ops"},
    {"checkpoint"},
    {"parallel"},
    {"nn"},
    {"figures", "models", "testing"},
    {"inference"},
    {"quantization"},
    {"training"},
    {"cli"},
    {"__main__", "examples"},
)
ROW = {unit: row for row, units in enumerate(ROWS) for unit in units}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def imported_units(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax_nvfp4_moe"):
            parts = node.module.split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
            yield from names


def violations(unit, source):
    return [o for o in set(imported_units(source)) - {unit} if ROW[o] >= ROW[unit]]


def test_every_unit_has_a_row():
    units = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert units - {"__init__"} <= ROW.keys()


def test_imports_point_up_the_table():
    units = {path: path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in SOURCES}
    found = {
        str(path.relative_to(PACKAGE)): down
        for path, unit in units.items()
        if unit != "__init__" and (down := violations(unit, path.read_text()))
    }
    assert found == {}


def test_an_import_that_points_down_is_caught():
    assert violations("numerics", "from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE") == ["nn"]
    assert violations("numerics", "from jax_nvfp4_moe import nn") == ["nn"]


def test_the_run_time_reads_no_environment_variable():
    offenders = [
        p.name for p in SOURCES if "os.environ" in p.read_text() or "getenv" in p.read_text()
    ]
    assert offenders == []


# Modules that need a package of an extra -> the package.
OF_EXTRAS = {"harness": "lm_eval", "qwix_provider": "qwix", "swap_maxtext": "qwix"}


def packages(package):
    """Return a package and all packages inside."""
    yield package
    for found in pkgutil.iter_modules(package.__path__):
        if found.ispkg:
            yield from packages(importlib.import_module(f"{package.__name__}.{found.name}"))


def shadowed(package):
    """Yield the submodules whose names `package` uses for something else."""
    names = {found.name for found in pkgutil.iter_modules(package.__path__)} - {"__main__"}
    for name in sorted(names):
        if name.startswith("_nvfp4_"):  # compiled, and loaded when a kernel needs it
            continue
        if name in OF_EXTRAS and importlib.util.find_spec(OF_EXTRAS[name]) is None:
            continue
        module = importlib.import_module(f"{package.__name__}.{name}")
        if getattr(package, name) is not module:
            yield f"{package.__name__}.{name}"


def test_no_submodule_is_hidden_by_another_name():
    assert [name for package in packages(jax_nvfp4_moe) for name in shadowed(package)] == []


def test_a_submodule_that_is_hidden_is_caught(monkeypatch):
    monkeypatch.setattr(jax_nvfp4_moe.ops, "quantize", jax_nvfp4_moe.ops.quantize_nvfp4)
    assert list(shadowed(jax_nvfp4_moe.ops)) == ["jax_nvfp4_moe.ops.quantize"]


def test_public_names_are_modules_or_not_as_they_are_spelled():
    """Only `ops` and `testing` are modules. All other names can be called, or are types."""
    assert sorted(jax_nvfp4_moe.__all__) == list(jax_nvfp4_moe.__all__)
    values = {name: getattr(jax_nvfp4_moe, name) for name in jax_nvfp4_moe.__all__}
    modules = {name for name, value in values.items() if isinstance(value, types.ModuleType)}
    assert modules == {"ops", "testing"}
    assert all(callable(values[name]) for name in values.keys() - modules - {"__version__"})


def test_the_version_is_that_of_the_installed_package():
    installed = {one.name: one.version for one in importlib.metadata.distributions()}
    # Sources that are not installed have no version.
    assert jax_nvfp4_moe.__version__ == installed.get("jax-nvfp4-moe", "0+uninstalled")


HEAVY = (
    "tokenizers",
    "jinja2",
    "typer",
    "rich",
    "orbax",
    "matplotlib",
    "huggingface_hub",
    "lm_eval",
    "qwix",
    "jax_nvfp4_moe._nvfp4_cpu",
)
# Prints which of the named packages the import loads, and whether Python's garbage collector runs
# at most twice. Then it prints whether the collector is on behind the import, and behind one for
# which it was off.
IMPORT = """
import gc, importlib, sys, jax, flax.nnx
before, started = set(sys.modules), []
gc.callbacks.append(lambda phase, _: started.append(phase) if phase == "start" else None)
import jax_nvfp4_moe
count, on = len(started), gc.isenabled()
gc.disable()
importlib.reload(jax_nvfp4_moe)
new = {name for full in set(sys.modules) - before for name in (full, full.split(".")[0])}
print(sorted(new & set(sys.argv[1:])), count <= 2, on, gc.isenabled())
"""


def test_import_leaves_heavy_packages_and_the_garbage_collector_alone():
    """Packages of the command line and the tokenizer, and kernels, load when they are used.

    The modules of the package make enough objects for a visit of all objects of JAX.
    """
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, *HEAVY], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[] True True False"


def imported_tests(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("test_"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("test_"):
            yield node.module


def test_nothing_imports_a_test_module():
    """Code that test modules share belongs in `tests/support`."""
    found = {
        str(path.relative_to(TESTS)): names
        for path in TESTS.rglob("*.py")
        if (names := [*imported_tests(path.read_text())])
    }
    assert found == {}


def test_an_import_of_a_test_module_is_caught():
    assert [*imported_tests("import test_cuda_kernel as gpu")] == ["test_cuda_kernel"]
    assert [*imported_tests("from test_route import FORMS")] == ["test_route"]
