"""Every notebook runs from top to bottom, and stands beside its Markdown."""

import pathlib

import pytest

NOTEBOOKS = pathlib.Path(__file__).parents[1] / "notebooks"
PAGES = sorted(NOTEBOOKS.glob("*.md"))


def test_each_page_has_its_notebook():
    assert PAGES
    assert {p.stem for p in PAGES} == {p.stem for p in NOTEBOOKS.glob("*.ipynb")}


@pytest.mark.notebook
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the notebook machinery, not ours
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_notebook_runs(page, tmp_path):
    import jupytext
    import nbclient

    notebook = jupytext.read(page)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    assert any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.notebook
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_notebook_that_fails_is_caught(tmp_path):
    import nbclient
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2")])
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
