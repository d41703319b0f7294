"""Record the facts that make a figure reproducible: commit, date, driver, versions and command."""

import datetime
import importlib.metadata
import json
import pathlib
import platform
import shlex
import subprocess
import sys

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch")


def provenance(commit: str | None) -> dict:
    """Return the facts of this run. `commit` is the commit to record; None asks git."""
    here = pathlib.Path(__file__).parent
    return {
        "commit": commit or _output("git", "-C", here, "rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "driver": _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ).partition("\n")[0],  # nvidia-smi prints a line for each GPU
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "command": shlex.join(["python", *sys.argv]),
    }


def write_page(stem: pathlib.Path, result: dict, page: str) -> None:
    """Write `result` to ``stem.json`` and its page to ``stem.md``, and print the page."""
    # A stem may have a dot before the name of a device, which `with_suffix` would replace.
    text = json.dumps(result, indent=1) + "\n"
    stem.with_name(f"{stem.name}.json").write_text(text, encoding="utf-8")
    stem.with_name(f"{stem.name}.md").write_text(page, encoding="utf-8")
    print(page)


def _versions():
    for name in _PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _output(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
