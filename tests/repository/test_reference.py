"""Test the generator of reference data, as far as it runs without torch."""

import shutil
import subprocess
import sys

import pytest
from support.files.given import CHECKPOINTS, ROOT, user_environment


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=user_environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_lists_architectures_and_forms_without_torch():
    listed = command("tests.reference", "--list")
    assert listed.returncode == 0
    assert {"nemotron_h-latent", "ct-mixed"} <= set(listed.stdout.split())


@pytest.mark.parametrize("wanted", ["qwen3_moe", "qwen3_moe:nothing", "nothing:ct-w4a4"])
def test_it_names_what_it_does_not_know(wanted):
    refused = command("tests.reference", wanted)
    assert refused.returncode == 2
    assert f"{wanted}: expected architecture:form" in refused.stderr


@pytest.mark.slow
def test_the_comparison_finds_no_difference_and_a_real_one(tmp_path):
    """The bound of blocks is 1e-5. If only the reference rounds inputs, the error is 0.17."""
    right, other = CHECKPOINTS / "qwen3moe-modelopt-w4a16", CHECKPOINTS / "qwen3moe-modelopt-w4a4"
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for path in right.iterdir():
        source = other if path.name == "reference.safetensors" else right
        shutil.copyfile(source / path.name, wrong / path.name)
    compared = command("tests.reference.compare", str(right), str(wrong))
    assert compared.returncode == 0
    exact, unrounded = (line.split("|")[2:6] for line in compared.stdout.splitlines()[2:])
    assert max(map(float, exact)) < 1e-5
    assert float(unrounded[0]) > 1e-2
