"""Test that `inspect` shows how far a refused checkpoint would load, and says why it is refused."""

import json

import pytest
from support.files.given import CHECKPOINTS, MODELS, copy_with_config

from jax_nvfp4_moe import CheckpointError, load_model
from jax_nvfp4_moe.checkpoint.survey import survey_checkpoint
from jax_nvfp4_moe.cli import app as cli
from jax_nvfp4_moe.models.refused import REFUSED_FAMILIES

W4A4 = CHECKPOINTS / "qwen3moe-modelopt-w4a4"
MIXED = CHECKPOINTS / "qwen3_moe-modelopt-mixed-w4a16-kv8"


@pytest.fixture
def inspect(capsys):
    """Return a function that runs `inspect` and returns status, stdout and stderr."""

    def call(*arguments):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["inspect", *map(str, arguments)])
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out, captured.err

    return call


def edit_quantization(folder, edit):
    """Apply `edit` to both quantization configs of ModelOpt in a folder."""
    for name, key in (("config.json", "quantization_config"), ("hf_quant_config.json", None)):
        contents = json.loads((folder / name).read_text())
        edit(contents[key or "quantization"])
        (folder / name).write_text(json.dumps(contents))
    return folder


def verdicts(out):
    """Return module -> verdict of the table in the output of `inspect`."""
    rows = out.partition("module in the file")[2].splitlines()[1:-1]
    return {row.split()[0]: row.split()[-1] for row in rows}


def test_a_family_that_is_refused_shows_that_all_modules_can_be_read(inspect, tmp_path):
    """The total equals the bytes of the file, and the reason is given once, on standard error."""
    source = CHECKPOINTS / "deepseekv3-modelopt-w4a4"
    folder = copy_with_config(source, tmp_path / "m", architectures=["LongcatFlashForCausalLM"])
    status, out, err = inspect(folder)
    assert status == 2
    found = verdicts(out)
    assert found["model.layers.*.mlp.experts"] == "read"
    assert set(found.values()) == {"read"}
    assert "NVFP4 w4a4" in out
    size = next(line for line in out.splitlines() if line.startswith("tensors")).split(", ")[1]
    assert out.splitlines()[-1].split("read", 1)[1].strip() == size
    (line,) = err.splitlines()
    assert line.count(REFUSED_FAMILIES["LongcatFlashForCausalLM"]) == 1
    with pytest.raises(CheckpointError, match="some of its experts return their input"):
        load_model(folder)


def test_a_format_that_is_refused_leaves_the_modules_that_are_not_quantized(inspect, tmp_path):
    folder = copy_with_config(W4A4, tmp_path / "m")
    edit_quantization(folder, lambda section: section.update(quant_algo="NVFP4_SVD"))
    status, out, err = inspect(folder)
    assert status == 2
    found = verdicts(out)
    assert found["model.layers.*.mlp.experts"] == found["model.layers.*.self_attn.q_proj"]
    assert found["model.layers.*.mlp.experts"] == "refused"
    assert found["model.embed_tokens"] == found["model.layers.*.mlp.gate"] == "read"
    assert "a low-rank product" in err


def test_one_module_that_is_refused_leaves_all_others(inspect, tmp_path):
    """The verdict belongs to the module, and modules of the same kind in other layers are read."""
    folder = copy_with_config(MIXED, tmp_path / "m")
    edit_quantization(
        folder,
        lambda section: section["quantized_layers"].update(
            {"model.layers.1.self_attn.q_proj": {"quant_algo": "W4A8_AWQ"}}
        ),
    )
    status, out, err = inspect(folder, "--json")
    assert status == 2
    report = json.loads(out)
    refused = [row for row in report["modules"] if row["verdict"] == "refused"]
    assert [(row["module"], row["count"]) for row in refused] == [
        ("model.layers.*.self_attn.q_proj", 1)
    ]
    assert report["file_bytes"] - report["readable_bytes"] == refused[0]["bytes"]
    assert any("W4A8_AWQ" in reason for reason in report["refused"])
    assert "4-bit integers" in err


@pytest.mark.parametrize("module", ["self_attn.o_proj", "mlp.experts.0.down_proj"])
def test_a_tensor_that_is_missing_is_the_reason(inspect, tmp_path, module):
    folder = copy_with_config(W4A4, tmp_path / "m")
    raw = (folder / "model.safetensors").read_bytes()
    name = f"model.layers.0.{module}.weight_scale_2".encode()
    assert raw.count(name) == 1
    (folder / "model.safetensors").write_bytes(raw.replace(name, name[:-1] + b"x"))
    status, out, err = inspect(folder, "--json")
    assert status == 2
    rows = json.loads(out)["modules"]
    refused = [(row["module"], row["count"]) for row in rows if row["verdict"] == "refused"]
    assert refused == [(f"model.layers.*.{module.partition('.0.')[0]}", 1)]
    assert f"'model.layers.*.{module.replace('.0.', '.*.')}.weight_scale_2' is missing" in err


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_that_loads_has_no_refused_module(name):
    survey = survey_checkpoint(CHECKPOINTS / name)
    assert survey.problems == ()
    assert any(module.format.startswith(("NVFP4", "FP8")) for module in survey.modules)


def test_names_from_a_file_cannot_reach_the_terminal_unescaped(inspect, tmp_path):
    folder = copy_with_config(W4A4, tmp_path / "m", architectures=["\x1b[31mX"])
    status, out, err = inspect(folder)
    assert status == 2
    assert "\x1b" not in out + err


def test_nothing_is_printed_if_the_files_cannot_be_read(inspect, tmp_path):
    folder = copy_with_config(W4A4, tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"\x00" * 4)
    status, out, err = inspect(folder)
    assert (status, out) == (2, "")
    assert "model.safetensors" in err
