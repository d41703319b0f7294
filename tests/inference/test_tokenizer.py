"""Tokenizer, stop ids and chat templates of checkpoint folders."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from support.files import tokenizer_folders as folders
from support.files.given import EXAMPLE

from jax_nvfp4_moe import CheckpointError
from jax_nvfp4_moe.checkpoint.stop_ids import read_end_of_text, read_stop_ids
from jax_nvfp4_moe.inference.tokenizer import Tokenizer, load_tokenizer

MESSAGES = [{"role": "user", "content": "Wie <geht>'s?"}]


@pytest.fixture
def folder(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((EXAMPLE / name).read_bytes())
    return tmp_path


def with_template(folder, template):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return load_tokenizer(folder)


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
    config = {"llm_config": {"eos_token_id": 6}, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).stop_ids == (6, 0)


def test_the_end_in_the_map_of_special_tokens(folder):
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).stop_ids == ()
    end = {"content": "return", "lstrip": False, "normalized": False}
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": end}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.stop_ids == (tokenizer.encoder.token_to_id("return"),)


@pytest.mark.parametrize("value", ["0", 1.0, True, [[1]], {"a": 1}, -2, 2**31, [1, "2"]])
def test_stop_ids_of_a_wrong_type(folder, value):
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": value}}))
    with pytest.raises(
        CheckpointError, match=r"config\.json: text_config\.eos_token_id: expected a"
    ):
        load_tokenizer(folder)


def with_files(folder, **files):
    """Write JSON files into a folder, and load its tokenizer."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return load_tokenizer(folder)


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
def test_wrong_contents_are_refused_by_name(folder, name, content, message):
    with pytest.raises(CheckpointError, match=message):
        with_files(folder, **{name: content})


def test_tokens_as_plain_objects(folder):
    """transformers refuses these; their meaning is plain."""
    config = {"eos_token": {"content": "return"}, "extra_special_tokens": [{"content": "<x>"}]}
    tokenizer = with_files(folder, tokenizer_config=config)
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
def test_differences_between_the_files_are_said(folder, caplog, files, words):
    given = {"special_tokens_map": {"eos_token": "return", "pad_token": "<x>"}} | files
    with_files(folder, **given)
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


def test_files_that_agree_say_nothing(folder, caplog):
    with_files(
        folder,
        tokenizer_config={"eos_token": "<|endoftext|>", "add_bos_token": False, "bos_token": None},
        special_tokens_map={"eos_token": {"content": "<|endoftext|>", "lstrip": False}},
        added_tokens={"<|endoftext|>": 0},
        config={"vocab_size": 4096},
        generation_config={"eos_token_id": [0]},
    )
    load_tokenizer(EXAMPLE)
    assert caplog.text == ""


def test_a_model_whose_files_name_a_wrong_class(folder, caplog):
    """vLLM reads tokenizer.json of Step-3.7 as it is, and so does transformers on the Hub."""
    text = "don't  12 x"
    expected = load_tokenizer(folder).encode(text)
    config = {"tokenizer_class": "GPT2Tokenizer"}
    changed = with_files(folder, tokenizer_config=config, config={"model_type": "qwen3_moe"})
    assert changed.encode(text).tolist() != expected.tolist()
    caplog.clear()
    right = with_files(folder, tokenizer_config=config, config={"model_type": "step3p7"})
    np.testing.assert_array_equal(right.encode(text), expected)
    assert caplog.text == ""


def test_published_shapes_say_nothing(tmp_path, caplog):
    """A class whose rules are those of the file changes nothing."""
    folders.write(folders.VARIANTS["Qwen 3"], tmp_path)
    load_tokenizer(tmp_path)
    assert caplog.text == ""


def test_a_chat_template(folder):
    tokenizer = with_template(
        folder,
        "{{ bos_token }}{% for m in messages %}\n"
        "  {% if m.role == 'user' %}\n"
        "[{{ m.role }}] {{ m.content }} {{ m | tojson }}\n"
        "  {% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}{% generation %}[bot]{% endgeneration %}{% endif %}",
    )
    text = tokenizer.chat(MESSAGES)
    assert text == (
        '<|endoftext|>[user] Wie <geht>\'s? {"role": "user", "content": "Wie <geht>\'s?"}\n[bot]'
    )


def test_a_template_file_comes_first(folder):
    (folder / "chat_template.jinja").write_text("file")
    assert with_template(folder, "config").chat(MESSAGES) == "file"


def test_named_templates(folder):
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    assert with_template(folder, named).chat(MESSAGES) == "y"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "SecurityError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{{ messages[5].role.x }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_templates_that_fail(folder, template, message):
    with pytest.raises(CheckpointError, match=message):
        with_template(folder, template).chat(MESSAGES)


def test_no_template():
    with pytest.raises(CheckpointError, match="no chat template"):
        load_tokenizer(EXAMPLE).chat(MESSAGES)


def test_templates_of_processors_come_last(folder):
    """transformers' processors read them, and its tokenizers do not."""
    assert with_files(folder, processor_config={"chat_template": "p"}).chat(MESSAGES) == "p"
    assert with_files(folder, chat_template={"chat_template": "j"}).chat(MESSAGES) == "j"
    (folder / "chat_template.jinja").write_text("f")
    assert load_tokenizer(folder).chat(MESSAGES) == "f"


def test_a_template_outside_of_the_folder(folder):
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="outside the checkpoint's folder"):
        load_tokenizer(folder)


def test_tools_choose_their_template(folder):
    tokenizer = with_template(
        folder,
        [{"name": "tool_use", "template": "t{{ tools }}"}, {"name": "default", "template": "d"}],
    )
    assert tokenizer.chat(MESSAGES, tools=[{"a": 1}]) == "t[{'a': 1}]"
    assert tokenizer.chat(MESSAGES, documents=[{"a": 1}]) == "d"
    assert tokenizer.template == "d"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": [len]}, "tools: expected None or a list of dictionaries"),
        ({"tools": "x"}, "tools: expected None or a list of dictionaries"),
        ({"documents": ["x"]}, "documents: expected None or a list of dictionaries"),
        ({"messages": []}, "messages: expected at least one"),
        ({"messages": ["hi"]}, "messages: expected dictionaries"),
    ],
)
def test_wrong_arguments_of_chat(folder, arguments, message):
    with pytest.raises(ValueError, match=message):
        with_template(folder, "x").chat(**{"messages": MESSAGES, **arguments})


def test_templates_see_plain_data(folder):
    """The sandbox does not know which methods of other objects do harm."""

    class Text(str):
        def leak(self):
            return "leaked"

    message = {"role": "user", "content": Text("x"), "picture": np.zeros(3), "n": np.int32(4)}
    tokenizer = with_template(
        folder, "{% for key, value in messages[0].items() %}{{ key }}={{ value }} {% endfor %}"
    )
    assert tokenizer.chat([message]) == "role=user content=x picture=<ndarray> n=4 "
    tokenizer = with_template(folder, "{{ messages[0].content.leak is defined }}{{ extra }}")
    assert tokenizer.chat([message], extra=(1, np.float32(2))) == "False(1, 2.0)"


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
