"""Test tokenizers that the library fails to read or to use: the errors are those of the package."""

import json

import pytest
from support.files.given import EXAMPLE

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.inference import text_file
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer


@pytest.fixture
def load(tmp_path):
    """Return a function that changes the example's ``tokenizer.json`` and loads it."""

    def call(**changes):
        content = json.loads((EXAMPLE / "tokenizer.json").read_text())
        content["model"] |= changes.pop("model", {})
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | changes))
        return load_tokenizer(tmp_path)

    return call


WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "\x1b[31mU"}


def around(piece):
    """Return a post-processor that makes one piece of a text."""
    return {"type": "TemplateProcessing", "single": [piece], "pair": [], "special_tokens": {}}


UNKNOWN = around({"SpecialToken": {"id": "x", "type_id": 0}})
OTHER = around({"Sequence": {"id": "B", "type_id": 0}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
            "failed to read the tokenizer: .*charsmap",
        ),
        (
            {"post_processor": UNKNOWN},
            "entry",
        ),
        (
            {"post_processor": OTHER},
            "index",
        ),
        (
            {"model": {"continuing_subword_prefix": "ab", "vocab": {"x": 0, "xy": 1}}},
            "model.merges: expected second parts that begin with continuing_subword_prefix 'ab'",
        ),
        (
            {
                "model": {
                    "continuing_subword_prefix": "ab",
                    "vocab": {"x": 0, "\x1bé": 1},
                    "merges": [["x", "\x1bé"]],
                }
            },
            "model.merges: expected second parts",  # the library would end the process
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded(load, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load(**changes).encode("def f(x):")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size must be non-zero"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}}, "index"),
        ({"model": WORDS}, "Missing .UNK. token"),
        (
            {"post_processor": {"type": "BertProcessing", "sep": ["x", 1], "cls": ["y", 2**31]}},
            "OverflowError|out of bounds|too large",
        ),
    ],
)
def test_a_tokenizer_that_cannot_encode(load, changes, message):
    with pytest.raises(CheckpointError, match=rf"failed to encode a text: .*({message})"):
        load(**changes).encode("def f(x):")


@pytest.mark.parametrize("token", [-1, 2**40])
def test_ids_that_no_tokenizer_has(load, token):
    with pytest.raises(CheckpointError, match="failed to decode tokens"):
        load().decode([token])


def test_half_of_a_surrogate_pair_is_no_text(load):
    with pytest.raises(ValueError, match=r"text: expected characters .* got '\\ud800' at posi"):
        load().encode("a\ud800")


def test_special_tokens_that_are_no_text(load, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "\ud800"}))
    with pytest.raises(CheckpointError, match=r"failed to read the tokenizer: .*surrogates"):
        load()


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_files_that_are_no_text_or_too_large(load, tmp_path, name, monkeypatch):
    load()
    (tmp_path / name).write_bytes(b"caf\xe9")
    with pytest.raises(CheckpointError, match=f"'{name}': it is not text in UTF-8"):
        load_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(b"a" * 101)
    monkeypatch.setattr(text_file.read_text, "__defaults__", (100,))
    with pytest.raises(CheckpointError, match=r"\.json?' has more than 100 bytes|inja' has more"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}, "a token id as the key"),
        ({"added_tokens_decoder": {"\u00b2": {"content": "x"}}}, "a token id as the key"),
        ({"chat_template": [{"name": {}, "template": "x"}]}, "a list of objects with name and"),
        ({"chat_template": [{"name": [], "template": {}}]}, "a list of objects with name and"),
    ],
)
def test_odd_keys_and_names(load, tmp_path, config, message):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load().chat([{"role": "user", "content": "x"}])


def test_a_special_token_of_an_older_folder_is_no_number(load, tmp_path):
    (tmp_path / "added_tokens.json").write_text("{}")
    config = {"tokenizer_class": "GPT2Tokenizer", "additional_special_tokens": [3]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"additional_special_tokens\[0\]: expected text"):
        load()
