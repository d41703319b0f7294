"""Test tokenizers: text and ids, stop ids, and files that are wrong or missing."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from support.files import tokenizer_folders as folders
from support.files.given import EXAMPLE

from jax_nvfp4_moe import CheckpointError
from jax_nvfp4_moe.checkpoint.stop_ids import read_end_of_text, read_stop_ids
from jax_nvfp4_moe.inference.tokenizer import Tokenizer, load_tokenizer


@pytest.mark.parametrize("text", ["import jax\n", "naïve 漢字 🙂\n\tx", ""])
def test_text_comes_back(text):
    tokenizer = load_tokenizer(EXAMPLE)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    pieces = list(tokenizer.decode_stream(iter(ids)))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", ["hello . world ' s don ' t", "it ' hello", "leading '", ". ,"])
def test_cleaned_text_comes_piece_by_piece(tmp_path, text):
    """A space that the next token removes has not been shown."""
    folders.write(folders.VARIANTS["words, cleaned"], tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(text)
    assert len(text.split()) == len(ids)
    assert "".join(tokenizer.decode_stream(iter(ids))) == tokenizer.decode(ids)


def test_a_streamed_text_is_decoded_a_few_tokens_at_a_time(monkeypatch):
    """The time for a token does not grow with the text."""
    tokenizer = load_tokenizer(EXAMPLE)
    ids = np.tile(tokenizer.encode("def f(x):\n    return naïve 漢字 🙂\n"), 40)
    expected, lengths, decode = tokenizer.decode(ids), [], Tokenizer.decode

    def noted(self, some):
        lengths.append(len(some))
        return decode(self, some)

    monkeypatch.setattr(Tokenizer, "decode", noted)
    assert "".join(tokenizer.decode_stream(iter(ids))) == expected
    assert len(ids) > 500
    assert max(lengths) < 50


def test_the_space_before_a_streamed_word_is_kept(tmp_path):
    """Tokenizers as Llama's leave out the space before the first word of a text."""
    folders.write(folders.VARIANTS["LlamaTokenizer, legacy"], tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    prompt, whole = tokenizer.encode("import numpy"), tokenizer.encode("import numpy as np")
    new = whole[len(prompt) :]
    assert whole[: len(prompt)].tolist() == prompt.tolist()
    assert "".join(tokenizer.decode_stream(iter(new), prompt)) == " as np"
    assert "".join(tokenizer.decode_stream(iter(new))) == "as np"


def test_dropout_is_not_applied(folder, caplog):
    text = (EXAMPLE / "tokenizer.json").read_text()
    expected = load_tokenizer(folder).encode(text[:2000])
    (folder / "tokenizer.json").write_text(text.replace('"dropout": null', '"dropout": 0.5', 1))
    np.testing.assert_array_equal(load_tokenizer(folder).encode(text[:2000]), expected)
    assert "dropout of its model is 0.5" in caplog.text


def test_an_unfinished_character_is_shown_at_the_end():
    tokenizer = load_tokenizer(EXAMPLE)
    ids = tokenizer.encode("a🙂")[:-1]
    assert "".join(tokenizer.decode_stream(iter(ids))) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, (0,)),
        ([3, 5], (3, 5, 0)),
        ([0, 5], (0, 5)),
        (None, (0,)),
        (-1, (0,)),
        ([7, None, -1, 7], (7, 0)),
        ([], (0,)),
    ],
)
def test_stop_ids(folder, value, expected):
    """The tokenizer's eos_token is 0, and comes after the ids of the configurations."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert load_tokenizer(folder).stop_ids == expected


def test_the_model_finds_the_end_that_the_tokenizer_has(folder):
    """`load_model` finds the same stop ids as `load_tokenizer`, without loading a tokenizer."""

    def both():
        found = load_tokenizer(folder).stop_ids
        assert read_stop_ids(folder, read_end_of_text(folder)) == found
        return found

    assert both() == (0,)
    named = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "return"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    (folder / "generation_config.json").unlink()
    assert len(both()) == 2
    (folder / "tokenizer_config.json").write_text("{}")
    assert both() == (3,)
    end = {"content": "<|endoftext|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": end}))
    assert both() == (3, 0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"added_tokens": [3], "model": {"vocab": [3]}}'),
        ("tokenizer.json", '{"added_tokens": [{"content": "<|endoftext|>", "id": "0"}]}'),
        ("tokenizer.json", '{"added_tokens": [{"content": "<|endoftext|>", "id": -1}]}'),
        ("tokenizer_config.json", '{"eos_token": 3}'),
        ("tokenizer_config.json", '{"eos_token": {"content": []}}'),
    ],
)
def test_a_model_does_not_need_its_tokenizer(folder, name, text):
    assert read_end_of_text(folder) == (0,)
    (folder / name).write_text(text)
    assert read_end_of_text(folder) == ()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(EXAMPLE)


def test_several_texts(tokenizer):
    """Texts become one padded array with their lengths; rows become texts again."""
    texts = ["def f(x):", "", "import jax.numpy as jnp", "é"]
    ids, lengths = tokenizer.encode(texts)
    assert ids.dtype == lengths.dtype == np.int32
    assert ids.shape == (4, lengths.max())
    for text, row, length in zip(texts, ids, lengths, strict=True):
        np.testing.assert_array_equal(row[:length], tokenizer.encode(text))
        assert not row[length:].any()
    assert tokenizer.decode(ids, lengths) == texts
    assert tokenizer.decode(jnp.asarray(ids), jnp.asarray(lengths)) == texts
    assert tokenizer.decode([list(row[:n]) for row, n in zip(ids, lengths, strict=True)]) == texts
    assert tokenizer.decode(ids)[2] == texts[2]
    assert tokenizer.decode(np.zeros((0, 3), np.int32)) == []
    none, no_lengths = tokenizer.encode([])
    assert (none.shape, no_lengths.shape) == ((0, 0), (0,))
    assert tokenizer.encode(("a",))[0].shape == (1, 1)


def test_texts_of_a_wrong_type(tokenizer):
    for wrong in (5, b"text", [b"text"], ["a", None], [["a"]], {"a": 1}):
        with pytest.raises(TypeError, match="text: expected a text or a sequence of texts, got"):
            tokenizer.encode(wrong)
    for ids, lengths in (([[1, 2]], [1, 2]), ([[1, 2]], [1.5]), ([1, 2], [1]), ([[1]], 1)):
        with pytest.raises(ValueError, match="lengths: expected"):
            tokenizer.decode(ids, lengths)


def test_stop_ids_are_those_of_all_files(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    config = {"eos_token_id": [7, 5], "text_config": {"eos_token_id": 4}, "llm_config": None}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).stop_ids == (9, 7, 5, 4, 0)
    (folder / "generation_config.json").unlink()
    config = {"thinker_config": {"text_config": {"eos_token_id": 6}}, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).stop_ids == (6, 0)


@pytest.mark.parametrize("value", ["0", 1.0, True, [[1]], {"a": 1}, -2, 2**31, [1, "2"]])
def test_stop_ids_of_a_wrong_type(folder, value):
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": value}}))
    with pytest.raises(
        CheckpointError, match=r"config\.json: text_config\.eos_token_id: expected a"
    ):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config", {"eos_token": 3}, "eos_token: expected text"),
        ("tokenizer_config", {"bos_token": {"text": "<s>"}}, "bos_token: expected text"),
        (
            "tokenizer_config",
            {"bos_token": {"content": "<s>", "lstrip": 1}},
            "bos_token: expected true",
        ),
        ("tokenizer_config", {"added_tokens_decoder": []}, "added_tokens_decoder: expected an obj"),
        ("tokenizer_config", {"added_tokens_decoder": {"a": {"content": "x"}}}, "a token id"),
        ("tokenizer_config", {"added_tokens_decoder": {"1": "x"}}, "content"),
        (
            "tokenizer_config",
            {"extra_special_tokens": "x"},
            "extra_special_tokens: expected a list",
        ),
        (
            "tokenizer_config",
            {"additional_special_tokens": [1]},
            r"extra_special_tokens|additional",
        ),
        ("tokenizer_config", {"tokenizer_class": 1}, "tokenizer_class: expected text"),
        ("tokenizer_config", {"chat_template": 1}, "chat_template: expected text"),
        ("tokenizer_config", {"chat_template": [{"name": "default"}]}, "chat_template: expected"),
        ("chat_template", {"chat_template": ["x"]}, r"chat_template\.json: chat_template"),
        ("special_tokens_map", {"eos_token": [1]}, r"special_tokens_map\.json: eos_token"),
        ("added_tokens", {"<x>": "1"}, r"added_tokens\.json: '<x>': expected a token id"),
    ],
)
def test_wrong_contents_are_refused_by_name(load_with, name, content, message):
    with pytest.raises(CheckpointError, match=message):
        load_with(**{name: content})


def test_a_model_whose_files_name_a_wrong_class(folder, load_with, caplog):
    """vLLM reads tokenizer.json of Step-3.7 as it is, and so does transformers on the Hub."""
    text = "don't  12 x"
    expected = load_tokenizer(folder).encode(text)
    config = {"tokenizer_class": "GPT2Tokenizer"}
    changed = load_with(tokenizer_config=config, config={"model_type": "qwen3_moe"})
    assert changed.encode(text).tolist() != expected.tolist()
    caplog.clear()
    right = load_with(tokenizer_config=config, config={"model_type": "step3p7"})
    np.testing.assert_array_equal(right.encode(text), expected)
    assert caplog.text == ""


def test_published_shapes_say_nothing(tmp_path, caplog):
    """A class whose rules are those of the file changes nothing."""
    folders.write(folders.VARIANTS["Qwen 3"], tmp_path)
    load_tokenizer(tmp_path)
    assert caplog.text == ""


def test_folders_without_a_tokenizer(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"'tokenizer\.json' is missing"):
        load_tokenizer(folder)
    (folder / "tiktoken.model").touch()
    with pytest.raises(CheckpointError, match=r"'tiktoken\.model' is not read.*save_pretrained"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="outside the checkpoint's folder"):
        load_tokenizer(folder)
