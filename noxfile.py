"""The stages of the checks, one command each: nox -s STAGE, or nox for the fast ones.

`nox --list` names the stages. Each runs in the environment that nox is installed in, which needs
``pip install -e ".[test,notebooks,dev,docs,eval]"``. `.ci/run` runs all of them in environments of
its own.
"""

import pathlib
import sys

import nox

nox.options.sessions = ["lint", "types", "smoke"]
nox.options.default_venv_backend = "none"
ROOT = pathlib.Path(__file__).parent
KERNEL_SUFFIXES = {".cc", ".h", ".cu", ".cuh", ".c"}
WORKERS = ("-n", "2", "--dist", "loadscope")
# A minute or two of tests, of every layer, that find most faults.
SMOKE = (
    "tests/numerics",
    "tests/test_scheme.py",
    "tests/ops/test_ops.py",
    "tests/ops/test_route.py",
    "tests/ops/test_norms.py",
    "tests/ops/test_gradient.py",
    "tests/nn/experts/test_moe.py",
    "tests/nn/linear",
    "tests/nn/saving/test_saved_folder.py",
    "tests/checkpoint/formats/test_patterns.py",
    "tests/models/test_default_dtype.py",
    "tests/inference/test_generation.py",
    "tests/cli/test_cli.py",
    "tests/users",
    "tests/repository",
)
MUST_RUN = ("--must-run", "lm_eval", "--must-run", "notebook")
WITHOUT_CUDA = ("--ignore=tests/emulation", "--ignore=tests/gpu")
# The kernels as machine code, and compiled for the CPU. The second file that reads machine code
# comes last, because it would only wait for the first.
KERNELS = (
    "tests/gpu/test_sass.py",
    "tests/emulation",
    "tests/backends/test_deviceless.py",
    "tests/backends/test_deviceless_exchange.py",
    "tests/backends/test_deviceless_peers.py",
    "tests/gpu/test_sass_mixers.py",
)


def _python(session, *command):
    session.run(sys.executable, *command)


def _tool(session, name, *arguments):
    """Run a program of the environment of nox, which need not be activated."""
    program = pathlib.Path(sys.executable).with_name(name)
    session.run(str(program), *arguments, external=True, log=False)


def _test(session, *options):
    _python(session, "-P", "-m", "pytest", "-q", *WORKERS, *options, *session.posargs)


@nox.session
def lint(session):
    """Check the style of Python and C++, and that notebooks equal their Markdown."""
    _python(session, "-m", "ruff", "check", ".")
    _python(session, "-m", "ruff", "format", "--check", ".")
    folders = ("benchmarks", "ffi", "tests")
    sources = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    kernels = sorted(str(path) for path in sources if path.suffix in KERNEL_SUFFIXES)
    _tool(session, "clang-format", "--dry-run", "--Werror", *kernels)
    for notebook in sorted(ROOT.glob("notebooks/*.md")):
        check = ("--quiet", "--test", "--to", "ipynb", "--update")
        _tool(session, "jupytext", *check, str(notebook))


@nox.session
def types(session):
    """Check types with pyright."""
    _tool(session, "pyright", "--pythonpath", sys.executable)


@nox.session
def docs(session):
    """Build the documentation without a warning."""
    _python(session, "docs")


@nox.session
def site(session):
    """Build the documentation, and check its links, titles and widths; needs Chromium."""
    docs(session)
    _python(session, "docs/check_site.py")
    # Its own tests, which show that it finds faults.
    _test(session, "--must-run", "chromium", "tests/repository/test_check_site.py")


@nox.session
def smoke(session):
    """Run the tests of the fast gate."""
    _test(session, "--cases", "1", "-m", "not slow and not notebook", *SMOKE)


@nox.session
def tests(session):
    """Run the tests of the README's command."""
    _test(session, "--cases", "1", "-m", "not slow and not notebook")


@nox.session
def slow(session):
    """Run slow tests and notebooks, except those of CUDA builds."""
    _test(session, "-m", "slow or notebook", *MUST_RUN, *WITHOUT_CUDA)


@nox.session
def everything(session):
    """Run all tests with all cases, before a release; takes hours on two cores."""
    _test(session, *MUST_RUN, *WITHOUT_CUDA)


@nox.session
def kernels(session):
    """Check machine code, kernels on a CPU and XLA's CUDA compiler; needs a CUDA build."""
    must = ("cuda_build", "cutlass", "deviceless")
    _test(session, *KERNELS, *(option for name in must for option in ("--must-run", name)))
