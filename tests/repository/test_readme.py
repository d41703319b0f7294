"""The README's Python examples run as they stand, one after the other."""

import re
import subprocess
import sys

from given import ROOT

PATH = ROOT / "README.md"
README = PATH.read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_files_that_it_links_to_are_there():
    links = re.findall(r"\]\(([^)#]+)\)|(?:src|srcset)=\"([^\"]+)\"", README)
    files = [link or source for link, source in links if "://" not in (link or source)]
    assert "notebooks/01_format.ipynb" in files
    assert "benchmarks/results/moe.NVIDIA-H200.dark.svg" in files
    assert [file for file in files if not (PATH.parent / file).is_file()] == []


def test_all_notebooks_are_listed():
    listed = set(re.findall(r"\(notebooks/(\w+)\.ipynb\)", README))
    assert listed == {path.stem for path in (PATH.parent / "notebooks").glob("*.ipynb")}


def test_the_first_two_commands_install_generate_and_test():
    first, second = blocks("bash")[:2]
    assert "pip install ." in first
    assert "jax-nvfp4-moe generate" in first
    assert "pytest" in second


def test_the_python_examples_run(tmp_path):
    examples = blocks("python")
    assert max(len(example.strip().splitlines()) for example in examples) <= 25
    done = subprocess.run(
        [sys.executable, "-c", "".join(examples)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "scheme   w4a16" in done.stdout
