"""Test that each notebook runs from top to bottom, and is stored with outputs of its page."""

import re

import jupytext
import nbformat
import pytest
import run_notebooks as run

# Paths of the machine that ran a notebook mean nothing to a reader and differ in each run.
MACHINE = re.compile(r"/(?:home|root|work|tmp|usr|opt|Users|var)/")
LIMIT = 300_000  # bytes of a stored notebook

# Pages that run lm-evaluation-harness need the `eval` extra.
RUNS = [
    pytest.param(page, marks=pytest.mark.lm_eval) if "import lm_eval" in page.read_text() else page
    for page in run.PAGES
]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the notebook machinery
    pytest.mark.every_case,  # each notebook is another program
]


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell):
    """Yield what a cell printed or showed, as text."""
    for output in cell.outputs:
        yield output.get("text", "")
        yield str(output.get("data", {}).get("text/plain", ""))


def faults(page, notebook, size):
    """Return what is wrong with the stored notebook of a page."""
    sources = [(cell.cell_type, cell.source) for cell in jupytext.read(page).cells]
    cells = code_cells(notebook)
    outputs = [output for cell in cells for output in cell.outputs]
    checks = {
        "other cells than the page": [(c.cell_type, c.source) for c in notebook.cells] != sources,
        "a cell that was not run": any(cell.execution_count is None for cell in cells),
        "no picture": not any("image/png" in output.get("data", {}) for output in outputs),
        "an error": any(output.output_type == "error" for output in outputs),
        "warnings or logs": any(output.get("name") == "stderr" for output in outputs),
        "a path of the machine": any(MACHINE.search(t) for cell in cells for t in texts(cell)),
        "too large": size > LIMIT,
    }
    return [fault for fault, found in checks.items() if found]


def test_each_page_has_its_notebook():
    assert run.PAGES
    assert {p.stem for p in run.PAGES} == {p.stem for p in run.HERE.glob("*.ipynb")}
    assert {p.stem for p in run.PAGES} == {p.stem for p in run.HERE.glob("*.md")}


@pytest.mark.parametrize("page", run.PAGES, ids=lambda p: p.stem)
def test_stored_notebook_is_a_run_of_its_page(page):
    path = page.with_suffix(".ipynb")
    found = faults(page, nbformat.read(path, as_version=4), path.stat().st_size)
    assert not found, f"run `python notebooks/run_notebooks.py {page.stem}` again"


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda cells: cells[0].update(source="1"), "other cells than the page"),
        (lambda cells: cells[0].update(execution_count=None), "a cell that was not run"),
        (lambda cells: [cell.update(outputs=[]) for cell in cells], "no picture"),
        (lambda cells: cells[0].outputs.append(stream("stdout", "/home/me")), "a path of the"),
        (lambda cells: cells[0].outputs.append(stream("stderr", "slow")), "warnings or logs"),
    ],
)
def test_what_is_wrong_with_a_stored_notebook_is_found(spoil, fault):
    page = run.PAGES[0]
    notebook = nbformat.read(page.with_suffix(".ipynb"), as_version=4)
    spoil(code_cells(notebook))
    (found,) = faults(page, notebook, 0)
    assert found.startswith(fault)


def stream(name, text):
    return nbformat.v4.new_output("stream", name=name, text=text)


@pytest.mark.notebook
@pytest.mark.parametrize("page", RUNS, ids=lambda p: p.stem)
def test_notebook_runs(page):
    before = sorted(run.HERE.iterdir())
    notebook = run.execute(page)
    assert any(cell.outputs for cell in code_cells(notebook))
    assert sorted(run.HERE.iterdir()) == before  # pages write only to temporary folders


@pytest.mark.notebook
def test_a_notebook_that_fails_is_caught(tmp_path):
    import nbclient

    page = tmp_path / "00_fails.md"
    page.write_text("```python\nassert 1 == 2\n```\n")
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        run.execute(page)
