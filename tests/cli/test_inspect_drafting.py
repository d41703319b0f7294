"""Test what `inspect` says of the drafting layers of a file."""

import json

import pytest
from support.files.drafted import in_bfloat16, packed, write_drafted
from support.files.drafting_tensors import drafting_tensors
from support.files.given import CHECKPOINTS
from typer.testing import CliRunner

from jax_nvfp4_moe.cli.app import app

GLM, NEMOTRON = "glm4_moe-groups-modelopt-w4a16", "nemotron_h-modelopt-w4a16"


def inspect(folder, *options):
    result = CliRunner().invoke(app, ["inspect", str(folder), *options])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    ("name", "change", "layers", "formats"),
    [
        (GLM, lambda tensors: packed(tensors)[0], 1, ["bfloat16", "NVFP4 w4a16"]),
        (NEMOTRON, in_bfloat16, 2, ["bfloat16"]),
    ],
)
def test_count_formats_and_bytes(name, change, layers, formats, tmp_path):
    folder = write_drafted(name, tmp_path / "drafted", change)
    stored = change(drafting_tensors(CHECKPOINTS / name)).values()
    size = sum(tensor.nbytes for tensor in stored)
    report = json.loads(inspect(folder, "--json"))["drafting"]
    assert report == {
        "layers": layers,
        "tensors": len(stored),
        "bytes": size,
        "formats": formats,
        "problem": None,
    }
    (line,) = [line for line in inspect(folder).splitlines() if line.startswith("drafting")]
    many = "s" if layers > 1 else ""
    assert f"{layers} layer{many} in {len(stored)} tensors, {size / 1024:.1f} KiB" in line
    assert f'{", ".join(formats)}; loaded by load_model(path, draft="mtp")' in line


def test_why_drafting_layers_cannot_be_loaded(tmp_path):
    def without_norm(tensors):
        return {name: one for name, one in in_bfloat16(tensors).items() if "head.norm" not in name}

    folder = write_drafted(GLM, tmp_path / "drafted", without_norm)
    assert "cannot be loaded: 'model.layers.2.shared_head.norm.weight' is missing" in inspect(
        folder
    )


def test_a_file_without_drafting_layers():
    assert "\ndrafting" not in inspect(CHECKPOINTS / GLM)
    assert json.loads(inspect(CHECKPOINTS / GLM, "--json"))["drafting"] is None
