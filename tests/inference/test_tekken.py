"""Read ``tekken.json`` as mistral-common does. `tests/reference/tekken.py` stored its answers."""

import json

import pytest
from support.files import tekken_files
from support.files.given import EXAMPLE
from support.files.mistral_files import write_mistral_format

from jax_nvfp4_moe import CheckpointError, load_model
from jax_nvfp4_moe.checkpoint.stop_ids import read_end_of_text
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer

STORED = json.loads(tekken_files.STORED.read_text(encoding="utf-8"))
VOCAB, TEXTS = STORED["vocab"], STORED["texts"]
FORMS = tuple(tekken_files.FORMS)


def write(folder, form="newer", **changes):
    """Write a ``tekken.json`` with changed values."""
    tekken_files.write(folder, tekken_files.contents(form, VOCAB) | changes)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_texts_have_the_ids_of_mistral_common(tmp_path, form):
    tokenizer = load_tokenizer(write(tmp_path, form))
    ids = [tokenizer.encode(text).tolist() for text in TEXTS]
    assert ids == STORED["ids"][form]
    assert [tokenizer.encode(text, special=False).tolist() for text in TEXTS] == [
        row[1:] for row in ids
    ]
    assert [tokenizer.decode(row) for row in ids] == TEXTS
    for text, row in zip(TEXTS, ids, strict=True):
        assert "".join(tokenizer.decode_stream(iter(row))) == text


def test_ids_depend_on_the_order_of_merges(tmp_path):
    """With the merges in another order, most texts have other ids."""
    vocab = VOCAB[:256] + VOCAB[:255:-1]
    tekken_files.write(tmp_path, tekken_files.contents("newer", vocab))
    tokenizer = load_tokenizer(tmp_path)
    ids = [tokenizer.encode(text).tolist() for text in TEXTS]
    same = [a == b for a, b in zip(ids, STORED["ids"]["newer"], strict=True)]
    assert sum(same) < len(TEXTS) / 2


@pytest.mark.parametrize("form", FORMS)
def test_special_tokens_in_a_text_become_their_ids(tmp_path, form):
    tokenizer = load_tokenizer(write(tmp_path, form))
    plain = tokenizer.encode("Why?", special=False).tolist()
    ids = tokenizer.encode("<s>[INST]Why?[/INST]", special=False).tolist()
    assert ids == [1, 3, *plain, 4]
    assert tokenizer.decode(ids) == "Why?"
    assert tokenizer.special == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }
    assert tokenizer.stop_ids == (2,)
    count = tekken_files.FORMS[form][1]
    assert tokenizer.encoder.get_vocab_size() == tekken_files.KEPT + count
    assert tokenizer.encoder.id_to_token(count - 1) == f"<SPECIAL_{count - 1}>"


def test_a_token_with_the_text_of_a_special_one_is_hidden(tmp_path):
    """Its id is kept free, so that the ids after it do not move."""
    vocab = [*VOCAB[:300], "W0lOU1Rd", *VOCAB[300:]]  # "[INST]"
    tekken_files.write(tmp_path, tekken_files.contents("newer", vocab))
    tokenizer, apart = load_tokenizer(tmp_path), load_tokenizer(write(_made(tmp_path / "apart")))
    assert tokenizer.encode("a[INST]b", special=False).tolist()[1] == 3
    assert tokenizer.encoder.id_to_token(12 + 300) is None
    for text in TEXTS:
        moved = [i if i < 12 + 300 else i + 1 for i in apart.encode(text).tolist()]
        if max(moved) < 12 + tekken_files.KEPT:  # the last token is cut off now
            assert tokenizer.encode(text).tolist() == moved


def _made(folder):
    folder.mkdir()
    return folder


def test_a_template_beside_it_renders_a_conversation(tmp_path):
    write(tmp_path)
    template = "{{ bos_token }}[INST]{{ messages[0].content }}[/INST]"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(tmp_path)
    prompt = tokenizer.chat([{"role": "user", "content": "Why?"}])
    assert prompt == "<s>[INST]Why?[/INST]"
    assert tokenizer.encode(prompt, special=False)[:2].tolist() == [1, 3]


def test_tokenizer_json_comes_first(tmp_path):
    write(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((EXAMPLE / name).read_bytes())
    ids = load_tokenizer(tmp_path).encode("import jax").tolist()
    assert ids == load_tokenizer(EXAMPLE).encode("import jax").tolist()
    assert read_end_of_text(tmp_path) == read_end_of_text(EXAMPLE)


def test_a_model_in_mistrals_format_stops_at_the_end_of_text(tmp_path):
    write_mistral_format(tmp_path)
    assert load_model(tmp_path, dtype="float32").stop_ids == ()
    write(tmp_path)
    assert load_model(tmp_path, dtype="float32").stop_ids == (2,)


VOCAB_ENTRY = {"rank": 0, "token_bytes": "AA==", "token_str": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": []}, r"config: expected an object, got \[\]"),
        ({"vocab": None}, "vocab: expected a list, got None"),
        ({"vocab": [VOCAB_ENTRY] * 900}, r"vocab\[1\]: expected an object with rank 1, got"),
        ({"special_tokens": 3}, "special_tokens: expected a list of at most .* = 12, got 3"),
        (
            {"special_tokens": [{"rank": i, "token_str": str(i)} for i in range(13)]},
            "special_tokens: expected a list of at most default_num_special_tokens = 12, got 13",
        ),
        (
            {"special_tokens": [{"rank": 1, "token_str": "<s>"}]},
            r"special_tokens\[0\]: expected an object with rank 0",
        ),
        (
            {"special_tokens": [{"rank": 0, "token_str": 5}]},
            r"special_tokens\[0\].token_str: expected a text, got 5",
        ),
        (
            {"special_tokens": [{"rank": 0, "token_str": "\ud800"}]},
            r"special_tokens\[0\].token_str: expected a text, got '\\ud800'",
        ),
        (
            {"special_tokens": [{"rank": i, "token_str": "<s>"} for i in range(2)]},
            "special_tokens: expected distinct texts, got '<s>' more than once",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:24],
)
def test_wrong_values_are_named(tmp_path, changes, message):
    write(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=rf"tekken\.json: {message}"):
        load_tokenizer(tmp_path)
    assert read_end_of_text(tmp_path) == ()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("pattern", "(", "config.pattern: "),
        ("pattern", "\ud800", "config.pattern: "),
        ("pattern", None, "config.pattern: expected a regular expression, got None"),
        ("default_vocab_size", 2000, "expected 268 to 912, which .*, got 2000"),
        ("default_vocab_size", 200, "expected 268 to 912, which .*, got 200"),
        ("default_vocab_size", True, "default_vocab_size: expected an integer, got True"),
        ("default_num_special_tokens", -1, "special_tokens: expected 0 to 100000, got -1"),
        ("default_num_special_tokens", 10**9, "expected 0 to 100000, got 1000000000"),
        ("default_num_special_tokens", 3, "at most default_num_special_tokens = 3, got 7"),
    ],
)
def test_wrong_settings_are_named(tmp_path, key, value, message):
    values = tekken_files.contents("newer", VOCAB)
    values["config"][key] = value
    tekken_files.write(tmp_path, values)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("place", "stored", "message"),
    [
        (300, "%%%", r"vocab\[300\].token_bytes: expected base64, got '%%%'"),
        (300, "QUJD" * 400, r"vocab\[300\].token_bytes: expected at most 1024 bytes, got 1200"),
        (300, "\u00e4AAA", r"vocab\[300\].token_bytes: expected base64, got"),
        (300, 7, r"vocab\[300\].token_bytes: expected base64, got 7"),
        (3, "BA==", r"vocab\[3\].token_bytes: expected the byte 3, got b'\\x04'"),
        (300, "AA==", r"vocab\[300\].token_bytes: expected bytes that no other token has"),
        (300, "", r"vocab\[300\].token_bytes: expected bytes that no other token has, got b''"),
    ],
)
def test_wrong_tokens_are_named(tmp_path, place, stored, message):
    vocab = list(VOCAB)
    vocab[place] = stored
    tekken_files.write(tmp_path, tekken_files.contents("newer", vocab))
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)
