"""Test that the name of a folder or a file breaks no message over lines."""

import json

import numpy as np
import pytest
from support.files.given import CHECKPOINTS, EXAMPLE, copy_with_config

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe import figures
from jax_nvfp4_moe.checkpoint.writing import files
from jax_nvfp4_moe.cli import inspect, options
from jax_nvfp4_moe.quantization.layer_errors import check_original

NAME, SHOWN = "a\nb\u2028\x1b[31m", r"a\nb\u2028\x1b[31m"
ARRAYS = {"x": np.ones(3, np.float32)}


def make(folder, **files):
    """Make a folder with JSON files."""
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_bytes(path):
    path.write_bytes(b"\xff")
    return path


def harness(path, **attributes):
    """Return a model of the harness that knows nothing but its path."""
    from jax_nvfp4_moe.inference.harness import HarnessModel  # needs an extra

    model = object.__new__(HarnessModel)
    vars(model).update({"_path": str(path), **attributes})
    return model


def save_twice(folder):
    nvfp4.save(folder, ARRAYS)
    nvfp4.save(folder, ARRAYS)


def restore_other_arrays(folder):
    nvfp4.save(folder, ARRAYS)
    nvfp4.restore(folder, {"x": np.ones(4, np.float32)})


def write_while_another_does(folder):
    with files.sole_writer(make(folder)), files.sole_writer(folder):
        pass


def stage_beside_files(folder):
    with files.staged_folder(make(folder, other={}), "config.json"):
        pass


class NoTokens:
    special, stop_ids, template = {}, (), None


# What a user calls with a path that has the name, and that is absent before.
CALLS = {
    "load an absent folder": nvfp4.load_model,
    "load a file": lambda path: nvfp4.load_model(write_bytes(path)),
    "load a config alone": lambda path: nvfp4.load_model(make(path, config={})),
    "load without a config": lambda path: nvfp4.load_model(make(path)),
    "load several problems": lambda path: nvfp4.load_model(
        make(path, config={"quantization_config": 1})
    ),
    "load a layer": lambda path: nvfp4.load_moe(make(path, config={}), 0),
    "load a tokenizer": lambda path: nvfp4.load_tokenizer(make(path)),
    "save to a file": lambda path: nvfp4.save(write_bytes(path), ARRAYS),
    "save to other files": lambda path: nvfp4.save(make(path, other={}), ARRAYS),
    "save twice": save_twice,
    "restore an absent folder": lambda path: nvfp4.restore(path, ARRAYS),
    "restore other files": lambda path: nvfp4.restore(make(path), ARRAYS),
    "restore other arrays": restore_other_arrays,
    "quantize to other files": lambda path: nvfp4.quantize_model(EXAMPLE, make(path, other={})),
    "quantize what is quantized": lambda path: nvfp4.quantize_model(
        copy_with_config(EXAMPLE, path), path.with_name("to")
    ),
    "cast to other files": lambda path: nvfp4.cast_model(EXAMPLE, make(path, other={})),
    "cast what is no MXFP4": lambda path: nvfp4.cast_model(
        copy_with_config(EXAMPLE, path), path.with_name("to")
    ),
    "compare other sizes": lambda path: check_original(
        copy_with_config(EXAMPLE, path), CHECKPOINTS / "qwen3moe-modelopt-w4a16"
    ),
    "write to an absent folder": lambda path: files.write_file(path / "file", [b""]),
    "write while another does": write_while_another_does,
    "write beside other files": stage_beside_files,
    "plot of another kind": figures.check_plot,
    "plot in an absent folder": lambda path: figures.check_plot(path / "plot.png"),
    "read a text": lambda path: options.read_text(write_bytes(path)),
    "end of a text": lambda path: harness(path, text_tokenizer=NoTokens()).eot_token_id,
    "name of a template": lambda path: harness(
        path, text_tokenizer=NoTokens(), _templates={NAME: ""}
    ).chat_template("none"),
}


OF_HARNESS = ("end of a text", "name of a template")
CASES = [
    pytest.param(call, id=name, marks=[pytest.mark.lm_eval] if name in OF_HARNESS else [])
    for name, call in CALLS.items()
]


@pytest.mark.parametrize("call", CASES)
def test_an_error_has_the_name_on_one_line(call, tmp_path):
    with pytest.raises((ValueError, OSError)) as caught:
        call(tmp_path / NAME)
    message = str(caught.value)
    assert SHOWN in message.replace("\\\\", "\\")
    assert NAME not in message
    assert all(line.isprintable() for line in message.split("\n"))


def test_warnings_have_the_name_on_one_line(tmp_path, caplog):
    folder = copy_with_config(CHECKPOINTS / "qwen3moe-modelopt-w4a16", tmp_path / NAME)
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": 2}))
    nvfp4.load_model(folder)
    assert any(SHOWN in one for one in caplog.messages)
    assert all(one.isprintable() for one in caplog.messages)


def test_what_commands_say_has_the_name_on_one_line(tmp_path, capsys):
    folder = copy_with_config(CHECKPOINTS / "qwen3moe-modelopt-w4a16", tmp_path / NAME)
    inspect._sample(folder, None, 4)
    assert f"{SHOWN} has no tokenizer" in capsys.readouterr().err


def test_names_that_can_be_shown_are_kept(tmp_path):
    folder = tmp_path / "Übung 漢字 'a' \\n"
    with pytest.raises(nvfp4.CheckpointError) as caught:
        nvfp4.load_model(make(folder, config={}))
    assert str(caught.value).startswith(f"{folder}: ")
