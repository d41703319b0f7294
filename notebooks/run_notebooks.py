"""Run the notebooks from top to bottom and store what they printed and drew.

    python notebooks/run_notebooks.py [01_format ...]

People edit the page ``NAME.md``. ``NAME.ipynb`` is the page with its outputs, for those who read it
on a website. Each page runs in this folder, as in Jupyter. The `test` extra is needed, and for
08_compare_schemes the `eval` extra too.
"""

import base64
import io
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
PAGES = sorted(HERE.glob("[0-9]*.md"))
PNG = "image/png"


def execute(page: pathlib.Path):
    """Run `page` and return its notebook with the outputs; raise if a cell fails."""
    import jupytext
    import nbclient

    notebook = jupytext.read(page)
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"  # random ids would differ in each run
    nbclient.NotebookClient(
        notebook,
        timeout=900,  # seconds of a cell; the longest trains for some minutes on a busy machine
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(HERE)}},
    ).execute()
    notebook.metadata.pop("language_info", None)  # names the Python that ran it
    return notebook


def store(page: pathlib.Path) -> None:
    """Run `page` and write its notebook beside it."""
    import nbformat

    notebook = execute(page)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if PNG in output.get("data", {}):
                output["data"][PNG] = smaller(output["data"][PNG])
    nbformat.write(notebook, page.with_suffix(".ipynb"))


def smaller(picture: str) -> str:
    """Reduce a PNG in base64 to 256 colors, which takes a third of the bytes."""
    import PIL.Image  # installed, because matplotlib needs it

    opened = PIL.Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    written = io.BytesIO()
    opened.quantize(256, dither=PIL.Image.Dither.NONE).save(written, "PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode() + "\n"


def main():
    names = sys.argv[1:]
    for page in PAGES:
        if not names or page.stem in names:
            start = time.perf_counter()
            store(page)
            size = page.with_suffix(".ipynb").stat().st_size
            print(f"{page.stem}: {time.perf_counter() - start:.0f} s, {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
