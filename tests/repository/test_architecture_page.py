"""Test that the page on the architecture names the folders that there are."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "jax_nvfp4_moe"
PAGE = (ROOT / "docs" / "guides" / "architecture.md").read_text(encoding="utf-8")
ROWS = re.compile(r"^\| `([\w/]+)/` \|", re.MULTILINE)  # of the page's tables of folders


def named(text):
    """Return the folders that a page names, each of which ends in a slash."""
    return re.findall(r"`([\w/]+)/`", text)


def missing(text):
    """Return the named folders that are neither in the repository nor in the package."""
    places = ROOT, PACKAGE
    return [n for n in named(text) if not any((place / n).is_dir() for place in places)]


def left_out(text):
    """Return the folders of the package that have no row in a table of the page."""
    return {path.parent.name for path in PACKAGE.glob("*/*.py")} - set(ROWS.findall(text))


def test_each_folder_that_the_page_names_is_there():
    assert {"numerics", "ffi/cuda", "tests/support"} <= set(named(PAGE))
    assert missing(PAGE) == []


def test_each_folder_of_the_package_has_a_row():
    assert left_out(PAGE) == set()


@pytest.mark.parametrize("name", ["numerics", "ffi/cuda"])
def test_a_folder_that_has_moved_is_caught(name):
    assert missing(PAGE.replace(f"`{name}/`", f"`{name}_moved/`")) != []


def test_a_folder_without_a_row_is_caught():
    assert left_out(PAGE.replace("| `parallel/` |", "| `other/` |")) == {"parallel"}
