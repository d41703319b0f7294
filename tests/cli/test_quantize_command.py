"""Test the `quantize` command, and `eval` of its result beside the original."""

import json
import logging
import os
import subprocess
import sys

import pytest
from support.files import letters
from support.files.checkpoint_edits import read_all
from support.files.full_disk import full_disk
from support.files.given import EXAMPLE
from support.files.unquantized import SMALL, read_config, tokens, write_source

from jax_nvfp4_moe import load_model, quantize_model
from jax_nvfp4_moe.checkpoint import export
from jax_nvfp4_moe.cli import app as cli
from jax_nvfp4_moe.inference.evaluation import evaluate
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer

IDS = tokens().reshape(-1)
WINDOW = tokens().shape[1]


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(argument) for argument in arguments])
    return stopped.value.code or 0, *capsys.readouterr()


@pytest.fixture
def source_with_tokenizer(tmp_path):
    """Return a copy of `SMALL` with a tokenizer of 60 letters."""
    source = write_source(
        tmp_path / "source", read_all(SMALL / "source"), read_config(SMALL / "source")
    )
    letters.write_tokenizer(source)
    (tmp_path / "text.txt").write_text(letters.TEXT * 8)
    return source


def test_the_command(source_with_tokenizer, tmp_path, capsys, caplog):
    """Without a progress bar, calibration and quantization each log the name of each layer once."""
    arguments = ("quantize", source_with_tokenizer, tmp_path / "q", "--text", tmp_path / "text.txt")
    status, out, err = call(capsys, *arguments, "--calibration-tokens", 256, "--window", 64)
    assert status == 0, err
    (line,) = out.splitlines()
    assert json.loads(line)["scheme"] == "w4a4"
    assert json.loads(line)["tokens"] == 256
    assert (tmp_path / "q" / "tokenizer.json").exists()
    layers = range(read_config(source_with_tokenizer)["num_hidden_layers"])
    assert [line for line in caplog.messages if " model.layers." in line] == [
        f"{part} model.layers.{layer}" for part in ("calibrating", "quantizing") for layer in layers
    ]


def test_a_quantizer_that_shall_be_quiet_is(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "jax_nvfp4_moe"):
        quantize_model(SMALL / "source", tmp_path / "q", progress=False)
    assert not [line for line in caplog.messages if " model.layers." in line]


def test_eval_compares_with_the_original(source_with_tokenizer, tmp_path, capsys):
    """The original is the first row of the table, and differences are relative to it."""
    quantize_model(source_with_tokenizer, tmp_path / "q", token_ids=IDS, window=WINDOW)
    arguments = ("eval", tmp_path / "q", "--original", source_with_tokenizer, "--window", 32)
    schemes = ("--scheme", "w4a16", "--scheme", "w4a4", "--text", tmp_path / "text.txt")
    status, out, err = call(capsys, *arguments, *schemes)
    assert status == 0, err
    found = [json.loads(line) for line in out.splitlines()]
    paths = [str(source_with_tokenizer), *[str(tmp_path / "q")] * 2]
    assert [(one["path"], one["scheme"]) for one in found] == [
        *zip(paths, (None, "w4a16", "w4a4"), strict=True)
    ]
    model = load_model(source_with_tokenizer, dtype="float32")
    ids = load_tokenizer(source_with_tokenizer).encode((tmp_path / "text.txt").read_text())
    assert found[0]["mean_cross_entropy"] == evaluate(model, ids, window=32)["mean_cross_entropy"]
    rows = [line.split() for line in err.splitlines()]
    at = next(i for i, row in enumerate(rows) if row[:1] == ["scheme"])
    assert [row[0] for row in rows[at + 1 : at + 4]] == ["original", "w4a16", "w4a4"]
    difference = found[2]["mean_cross_entropy"] - found[0]["mean_cross_entropy"]
    assert rows[at + 3][4] == f"{difference:.5f}"


def test_the_command_says_what_is_wrong(source_with_tokenizer, tmp_path, capsys):
    arguments = ("quantize", source_with_tokenizer, tmp_path / "q", "--text", tmp_path / "text.txt")
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert "calibration_tokens: expected 1 to 280, the number of tokens in" in err
    status, _, err = call(capsys, "quantize", EXAMPLE, tmp_path / "q")
    assert status == 2
    assert "is quantized already" in err


@pytest.mark.parametrize(
    "how", [(), ("--scheme", "w4a16", "--algorithm", "weighted_search")], ids=["w4a4", "weighted"]
)
def test_activations_that_are_not_finite(source_with_tokenizer, tmp_path, capsys, how):
    """The weights to quantize are finite, but a norm is not. Nothing is written."""
    tensors = read_all(source_with_tokenizer)
    tensors["model.layers.0.post_attention_layernorm.weight"][5] = float("inf")
    config = read_config(source_with_tokenizer)
    folder = write_source(tmp_path / "broken", tensors, config)
    letters.write_tokenizer(folder)
    text = ("--text", tmp_path / "text.txt", "--calibration-tokens", 64, "--window", 32)
    status, out, err = call(capsys, "quantize", folder, tmp_path / "q", *text, *how)
    assert (status, out) == (1, "")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "the activations that enter model.layers.0.mlp" in line
    assert "during calibration are not finite" in line
    assert not (tmp_path / "q").exists()


def test_a_disk_that_is_full_is_named_and_a_second_try_works(tmp_path, capsys):
    """No file may exceed 30 KB. The weights do not fit into that, and all other files do."""
    q = tmp_path / "q"
    arguments = [str(SMALL / "source"), str(q)]
    with full_disk(30_000):
        status, out, err = call(capsys, "quantize", *arguments)
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "model.safetensors: File too large" in line
    assert f"mounted at {mount_point(tmp_path)} has" in line
    assert not q.exists()
    assert call(capsys, "quantize", *arguments)[0] == 0
    assert "config.json" in os.listdir(q)


def mount_point(path):
    return next(str(one) for one in (path, *path.parents) if one.is_mount())


def test_what_a_process_that_was_killed_left_is_replaced(tmp_path, monkeypatch):
    """`os._exit` ends the process during a write and leaves it no chance to clean up."""
    q = tmp_path / "q"
    killed = (
        "import os, sys, jax_nvfp4_moe\n"
        "from jax_nvfp4_moe.checkpoint import export\n"
        "export._bytes = lambda *_: os._exit(9)\n"
        "jax_nvfp4_moe.quantize_model(*sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", killed, str(SMALL / "source"), str(q)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 9
    assert not (q / "config.json").exists()
    quantize_model(SMALL / "source", q)
    quantize_model(SMALL / "source", tmp_path / "other")
    assert sorted(os.listdir(q)) == sorted(os.listdir(tmp_path / "other"))
    with pytest.raises(ValueError, match="destination: expected a folder that is empty"):
        quantize_model(SMALL / "source", q)


def test_a_second_writer_is_told_and_the_first_one_finishes(tmp_path, monkeypatch):
    """The second call begins while the first one writes its fifth tensor."""
    q, write, calls = tmp_path / "q", export._bytes, []

    def write_and_try(*given):
        calls.append(1)
        if len(calls) == 5:
            with pytest.raises(ValueError, match=f"another process is writing to {q}"):
                quantize_model(SMALL / "source", q)
        return write(*given)

    monkeypatch.setattr(export, "_bytes", write_and_try)
    quantize_model(SMALL / "source", q)
    quantize_model(SMALL / "source", tmp_path / "other")
    assert sorted(os.listdir(q)) == sorted(os.listdir(tmp_path / "other"))
    assert load_model(q).config.num_layers == load_model(tmp_path / "other").config.num_layers


def test_an_error_leaves_an_empty_folder_empty(tmp_path, monkeypatch):
    (tmp_path / "q").mkdir()

    def fail(*_):
        raise RuntimeError("in the middle")

    monkeypatch.setattr("jax_nvfp4_moe.checkpoint.export._bytes", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        quantize_model(SMALL / "source", tmp_path / "q")
    assert os.listdir(tmp_path / "q") == []
