"""Test `pyproject.toml` against the package and the documentation."""

import importlib.resources
import re
import tomllib

import pages
from support.files.given import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Pages and messages of the package that a user reads.
TEXTS = [ROOT / page for page in ("README.md", "CONTRIBUTING.md", *pages.GUIDES)]
TEXTS += sorted((ROOT / "jax_nvfp4_moe").rglob("*.py"))


def test_type_checkers_read_the_annotations():
    assert (importlib.resources.files("jax_nvfp4_moe") / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def named_extras(text):
    """Yield the extras that a text tells a user to install."""
    for extras in re.findall(r"(?:jax-nvfp4-moe|[\"']\.)\[([\w,]+)\]", text):
        yield from extras.split(",")


def test_extras_that_texts_name_exist():
    named = {path: set(named_extras(path.read_text(encoding="utf-8"))) for path in TEXTS}
    known = PROJECT["optional-dependencies"].keys()
    assert {path: extras - known for path, extras in named.items() if extras - known} == {}
    assert sum(map(len, named.values())) > 5


def test_a_text_that_names_an_extra_is_found():
    assert [*named_extras('pip install "jax-nvfp4-moe[cuda13]" ".[test,dev]"')] == [
        "cuda13", "test", "dev",
    ]  # fmt: skip


def test_the_extras_of_users_are_documented():
    """The extras of contributors are described in CONTRIBUTING."""
    guides = "".join((ROOT / page).read_text(encoding="utf-8") for page in pages.GUIDES)
    assert {"cuda13", "eval", "plot"} <= set(named_extras(guides))


def test_python_versions_agree():
    oldest = PROJECT["requires-python"].removeprefix(">=")
    versions = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert versions[0] == oldest


def test_requirements_of_tests_are_the_extra():
    """README's second command reads the file, so that pip does not build the package again."""
    lines = (ROOT / "tests" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == PROJECT["optional-dependencies"][
        "test"
    ]
