"""Build the documentation in build/docs/html, without a network: python docs.

The package must be installed with its extra "docs". Every warning is an error.
"""

import pathlib
import shutil
import sys

import pages
from sphinx.cmd.build import main

if __name__ == "__main__":
    left_out = pages.left_out()
    if left_out:
        sys.exit(f"{', '.join(left_out)} cannot be imported: run pip install -e '.[docs]'")
    work = pages.ROOT / "build" / "docs"
    pages.write(work / "source")
    shutil.rmtree(work / "html", ignore_errors=True)  # pages that no longer exist
    settings = str(pathlib.Path(__file__).parent)
    options = ["--fail-on-warning", "--keep-going", "--quiet", "--fresh-env"]
    sys.exit(main([*options, "--conf-dir", settings, str(work / "source"), str(work / "html")]))
