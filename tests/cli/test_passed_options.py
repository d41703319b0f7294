"""Test that each option of a command reaches the function that it is for."""

import types

import jax
import numpy as np
import pytest
from support.files import letters
from support.files.given import CHECKPOINTS, copy_with_config

from jax_nvfp4_moe.cli import app
from jax_nvfp4_moe.cli import eval as evaluation
from jax_nvfp4_moe.cli import generate as generation
from jax_nvfp4_moe.cli import quantize as quantization

SAMPLING = {"temperature": 0.7, "top_k": 3, "top_p": 0.3}
LOADING = {"scheme": "w4a16", "dtype": "float16", "backend": "reference", "dispatch": "all_to_all"}


def run(command, *arguments, **options):
    """Run a command with options, whose names here have underscores."""
    words = [command, *map(str, arguments)]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    with pytest.raises(SystemExit) as stopped:
        app.main(words)
    assert not stopped.value.code


@pytest.fixture
def folder(tmp_path):
    """Return a checkpoint with a tokenizer of 60 letters."""
    folder = copy_with_config(CHECKPOINTS / "qwen3moe-modelopt-w4a16", tmp_path / "m")
    letters.write_tokenizer(folder)
    (tmp_path / "text.txt").write_text(letters.TEXT)
    return folder


@pytest.fixture
def replace(monkeypatch):
    """Return a function that replaces one of a module, and returns the arguments it is called with.

    What it is called with by position is in the entry "".
    """

    def put(module, name, result=None):
        seen = {}

        def record(*operands, **options):
            seen.update(options, **{"": operands})
            return result

        monkeypatch.setattr(module, name, record)
        return seen

    return put


MODEL = types.SimpleNamespace(config=types.SimpleNamespace(max_positions=512))


def test_generate(folder, replace):
    loaded = replace(generation, "load_model", MODEL)
    sampled = replace(generation, "stream", iter(()))
    prompt = letters.TEXT[:5]
    given = {"prompt": prompt, "max_new_tokens": 9, "seed": 5}
    run("generate", folder, **given, **SAMPLING, **LOADING, draft="mtp", draft_tokens=3)
    assert {name: loaded[name] for name in LOADING} == LOADING
    assert loaded["draft"] == "mtp"
    assert (sampled["draft"], sampled["draft_tokens"]) == ("mtp", 3)
    assert {name: sampled[name] for name in SAMPLING} == SAMPLING
    assert sampled["max_new_tokens"] == 9
    assert sampled["key"] == jax.random.key(5)
    assert np.shape(sampled[""][1]) == (1, 5)


def test_eval(folder, replace, monkeypatch):
    loaded = replace(evaluation, "load_model", MODEL)
    figures = {"windows": 2, "window": 16, "skip_tokens": 7, "perplexity": 2.0}
    figures |= {"cross_entropies": [0.7, 0.7], "perplexities": [2.0, 2.0]}
    found = replace(evaluation, "evaluate", figures)
    monkeypatch.setattr(evaluation, "find_plans", lambda model: ())
    windows = {"window": 16, "skip_tokens": 7, "max_windows": 2}
    run("eval", folder, text=folder.parent / "text.txt", **windows, **LOADING)
    assert {name: loaded[name] for name in LOADING} == LOADING
    assert {name: found[name] for name in windows} == windows
    assert len(found[""][1]) == len(letters.TEXT)


def test_quantize(folder, replace, tmp_path):
    called = replace(quantization, "quantize_model", {})
    same = {"scheme": "w4a16", "format": "compressed-tensors", "modules": "experts", "window": 16}
    same |= {"algorithm": "weighted_search", "dtype": "float16"}
    given = {"text": tmp_path / "text.txt", "calibration_tokens": 20, "shard_gb": 0.25}
    run("quantize", folder, tmp_path / "q", "--exclude", "a", "--exclude", "b*", **same, **given)
    assert called.pop("") == (folder, tmp_path / "q")
    first = quantization.load_tokenizer(folder).encode(letters.TEXT)[:20]
    assert list(called.pop("token_ids")) == list(first)
    assert list(called.pop("exclude")) == ["a", "b*"]
    assert called == same | {"shard_bytes": 250_000_000}


def test_cast(folder, replace, tmp_path):
    called = replace(quantization, "cast_model", {})
    run("quantize", folder, tmp_path / "q", "--cast", shard_gb=0.25)
    assert called == {"": (folder, tmp_path / "q"), "shard_bytes": 250_000_000}
