"""Build the documentation in build/docs/html, without a network: python docs.

The package must be installed with its extra "docs". Every warning is an error.
"""

import pathlib
import sys

import pages
from sphinx.cmd.build import main

if __name__ == "__main__":
    work = pages.ROOT / "build" / "docs"
    pages.write(work / "source")
    settings = str(pathlib.Path(__file__).parent)
    options = ["--fail-on-warning", "--keep-going", "--quiet", "--fresh-env"]
    sys.exit(main([*options, "--conf-dir", settings, str(work / "source"), str(work / "html")]))
