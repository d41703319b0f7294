"""Test special tokens: which file counts, and that differences between files are told."""

import json

import pytest
from support.files import tokenizer_folders as folders
from support.files.given import EXAMPLE

from jax_nvfp4_moe.checkpoint.stop_ids import read_end_of_text
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer


@pytest.mark.parametrize(
    "vocabulary", [{"a": 4, "</s>": 7}, [["a", -1.0], ["b", -2.0], ["</s>", -3.0]]]
)
def test_the_end_in_vocabularies_without_added_tokens(tmp_path, vocabulary):
    files = {
        "tokenizer.json": {"added_tokens": None, "model": {"vocab": vocabulary}},
        "tokenizer_config.json": {"eos_token": "</s>"},
    }
    for name, contents in files.items():
        (tmp_path / name).write_text(json.dumps(contents))
    assert read_end_of_text(tmp_path) == ((7,) if isinstance(vocabulary, dict) else (2,))


def test_the_end_in_the_map_of_special_tokens(folder):
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).stop_ids == ()
    end = {"content": "return", "lstrip": False, "normalized": False}
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": end}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.stop_ids == (tokenizer.encoder.token_to_id("return"),)


def test_tokens_as_plain_objects(load_with):
    """transformers refuses these; their meaning is plain."""
    config = {"eos_token": {"content": "return"}, "extra_special_tokens": [{"content": "<x>"}]}
    tokenizer = load_with(tokenizer_config=config)
    assert tokenizer.special == {"eos_token": "return"}
    assert tokenizer.encode("<x>").tolist() == [4096]
    assert tokenizer.decode([4096]) == ""


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config": {"vocab_size": 4096}}, ["config.json: vocab_size is 4096", "'<x>'"]),
        ({"tokenizer_config": {"add_bos_token": True, "bos_token": "<x>"}}, ["add_bos_token"]),
        ({"tokenizer_config": {"tokenizer_class": "BertTokenizer"}}, ["BertTokenizer"]),
        (
            {"tokenizer_config": {"tokenizer_class": "Qwen2Tokenizer"}},
            ["normalizer and pre_tokenizer", "Qwen2Tokenizer", 'tokenizer_class to "Tokenizers'],
        ),
        ({"tokenizer_config": {"auto_map": {"AutoTokenizer": ["a.B"]}}}, ["auto_map", "never run"]),
        ({"tokenizer_config": {"fix_mistral_regex": True}}, ["fix_mistral_regex"]),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"5000": {"content": "<y>"}}}},
            ["'<y>' (4096, not 5000)"],
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {}, "eos_token": "<x>"}},
            ["eos_token is '<x>', and special_tokens_map.json has 'return'"],
        ),
        (
            {"tokenizer_config": {"eos_token": "<x>"}},
            ["eos_token is '<x>', and special_tokens_map.json has 'return'; the latter"],
        ),
        (
            {"chat_template": {"chat_template": "a"}, "tokenizer_config": {"chat_template": "b"}},
            ["tokenizer_config.json and chat_template.json hold different chat templates"],
        ),
        (
            {"added_tokens": {"<y>": 4096}, "tokenizer_config": {"added_tokens_decoder": {}}},
            ["added_tokens.json: '<y>'"],
        ),
    ],
)
def test_differences_between_the_files_are_said(load_with, caplog, files, words):
    given = {"special_tokens_map": {"eos_token": "return", "pad_token": "<x>"}} | files
    load_with(**given)
    assert all(word in caplog.text for word in words), caplog.text


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("pieces, generic", {"add_bos_token": False}, "add_bos_token is false, and the post_proc"),
        ("pieces, generic", {"add_bos_token": True, "add_eos_token": False}, ""),
        ("pieces, generic", {"add_eos_token": True}, "tokenizer.json does not add '</s>'"),
        ("begins and ends", {"add_bos_token": True}, ""),
        ("unigram", {"add_bos_token": True, "add_eos_token": False}, ""),  # it has no bos_token
    ],
)
def test_what_stands_around_a_text_is_compared(tmp_path, caplog, name, asked, said):
    variant = folders.VARIANTS[name]
    folders.write(variant._replace(config={**variant.config, **asked}), tmp_path)
    load_tokenizer(tmp_path)
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


def test_files_that_agree_say_nothing(load_with, caplog):
    load_with(
        tokenizer_config={"eos_token": "<|endoftext|>", "add_bos_token": False, "bos_token": None},
        special_tokens_map={"eos_token": {"content": "<|endoftext|>", "lstrip": False}},
        added_tokens={"<|endoftext|>": 0},
        config={"vocab_size": 4096},
        generation_config={"eos_token_id": [0]},
    )
    load_tokenizer(EXAMPLE)
    assert caplog.text == ""
