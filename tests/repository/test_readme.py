"""Test README and guides: their Python runs as it stands, links lead somewhere, lines fit."""

import os
import re
import subprocess
import sys

import jax
import pages
import pytest
from support.files.given import ROOT

pytestmark = pytest.mark.every_case  # each page has other examples
README = "README.md"
PAGES = (README, *pages.GUIDES)
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}


def blocks(page, language):
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, TEXTS[page], re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_links_to_are_there(page):
    pattern = r"\]\(([^)#\s]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\""
    links = [link or source for link, source in re.findall(pattern, TEXTS[page])]
    folder = ROOT / os.path.dirname(page)
    files = [link for link in links if "://" not in link]
    assert [file for file in files if not (folder / file).exists()] == []


def test_the_site_has_all_guides():
    guides = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/guides/*.md")]
    assert sorted(pages.GUIDES) == sorted(guides)


def test_the_first_two_commands_install_generate_and_test():
    first, second = blocks(README, "bash")[:2]
    assert "pip install ." in first
    assert "jax-nvfp4-moe generate" in first
    assert "pytest" in second


def test_readme_is_a_landing_page():
    assert len(TEXTS[README].splitlines()) <= 130


@pytest.mark.parametrize("page", PAGES)
def test_code_needs_no_scroll_bar(page):
    code = re.findall(r"^```\w*\n(.*?)^```$", TEXTS[page], re.MULTILINE | re.DOTALL)
    long = [line for block in code for line in block.splitlines() if len(line) > 80]
    assert long == []


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "py")])
def test_examples_that_do_not_run_here_are_python(page):
    """A block tagged ``py`` needs something that the tests lack, such as another library."""
    for block in blocks(page, "py"):
        compile(block, page, "exec")


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_begins_a_line(page):
    """Markdown would take the rest of the paragraph for HTML."""
    assert re.findall(r"^\s*<!-- figure: \w+ -->", TEXTS[page], re.MULTILINE) == []


def program(page):
    """Return the examples of a page, which run one after the other, as one program."""
    return "".join(blocks(page, "python"))


def test_the_examples_of_the_readme_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", program(README)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "scheme   w4a16" in done.stdout


@pytest.mark.parametrize("page", [page for page in pages.GUIDES if program(page)])
def test_the_examples_of_a_guide_run(page, tmp_path, monkeypatch):
    """They run in this process, with the rules of promotion that users have."""
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(program(page), page, "exec"), {"__name__": "__main__"})
