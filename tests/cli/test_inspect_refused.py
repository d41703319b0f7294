"""Test that `inspect` says once for all layers why a checkpoint is refused."""

import json

import pytest
from support.files.given import CHECKPOINTS, copy_with_config

from jax_nvfp4_moe import CheckpointError, load_model
from jax_nvfp4_moe.cli import app as cli
from jax_nvfp4_moe.models.refused import REFUSED_FAMILIES

W4A4 = CHECKPOINTS / "qwen3moe-modelopt-w4a4"
MIXED = CHECKPOINTS / "qwen3_moe-modelopt-mixed-w4a16-kv8"


@pytest.fixture
def refuse(capsys):
    """Return a function that inspects a refused folder, and returns the lines of the error."""

    def call(*arguments):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["inspect", *map(str, arguments)])
        captured = capsys.readouterr()
        assert (stopped.value.code, captured.out) == (2, "")
        return captured.err.splitlines()

    return call


def edit_quantization(folder, edit):
    """Apply `edit` to both quantization configs of ModelOpt in a folder."""
    for name, key in (("config.json", "quantization_config"), ("hf_quant_config.json", None)):
        contents = json.loads((folder / name).read_text())
        edit(contents[key or "quantization"])
        (folder / name).write_text(json.dumps(contents))
    return folder


def test_a_family_that_is_refused(refuse, tmp_path):
    source = CHECKPOINTS / "deepseekv3-modelopt-w4a4"
    folder = copy_with_config(source, tmp_path / "m", architectures=["LongcatFlashForCausalLM"])
    (line,) = refuse(folder)
    assert line.count(REFUSED_FAMILIES["LongcatFlashForCausalLM"]) == 1
    with pytest.raises(CheckpointError, match="some of its experts return their input"):
        load_model(folder)


def test_a_format_that_is_refused(refuse, tmp_path):
    folder = copy_with_config(W4A4, tmp_path / "m")
    edit_quantization(folder, lambda section: section.update(quant_algo="NVFP4_SVD"))
    assert any("a low-rank product" in line for line in refuse(folder, "--json"))


def test_one_module_that_is_refused(refuse, tmp_path):
    folder = copy_with_config(MIXED, tmp_path / "m")
    edit_quantization(
        folder,
        lambda section: section["quantized_layers"].update(
            {"model.layers.1.self_attn.q_proj": {"quant_algo": "W4A8_AWQ"}}
        ),
    )
    err = "\n".join(refuse(folder))
    assert "W4A8_AWQ" in err
    assert "4-bit integers" in err


@pytest.mark.parametrize("module", ["self_attn.o_proj", "mlp.experts.0.down_proj"])
def test_a_tensor_that_is_missing_in_all_layers_is_one_problem(refuse, tmp_path, module):
    folder = copy_with_config(W4A4, tmp_path / "m")
    raw = (folder / "model.safetensors").read_bytes()
    for layer in range(2):
        name = f"model.layers.{layer}.{module}.weight_scale_2".encode()
        assert raw.count(name) == 1
        raw = raw.replace(name, name[:-1] + b"x")
    (folder / "model.safetensors").write_bytes(raw)
    missing = f"'model.layers.*.{module.replace('.0.', '.*.')}.weight_scale_2' is missing"
    assert sum(missing in line for line in refuse(folder)) == 1


def test_names_from_a_file_cannot_reach_the_terminal_unescaped(refuse, tmp_path):
    folder = copy_with_config(W4A4, tmp_path / "m", architectures=["\x1b[31mX"])
    assert "\x1b" not in "\n".join(refuse(folder))


def test_the_header_of_a_file_that_cannot_be_read(refuse, tmp_path):
    folder = copy_with_config(W4A4, tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"\x00" * 4)
    assert "model.safetensors" in "\n".join(refuse(folder))
