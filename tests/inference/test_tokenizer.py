"""Tokenizer, stop ids and chat templates of checkpoint folders."""

import json

import pytest
from given import EXAMPLE

from jax_nvfp4_moe import CheckpointError
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer

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


def test_an_unfinished_character_is_shown_at_the_end():
    tokenizer = load_tokenizer(EXAMPLE)
    ids = tokenizer.encode("a🙂")[:-1]
    assert "".join(tokenizer.decode_stream(iter(ids))) == tokenizer.decode(ids)


@pytest.mark.parametrize(("value", "expected"), [(0, (0,)), ([3, 5], (3, 5)), (None, ())])
def test_stop_ids(folder, value, expected):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert load_tokenizer(folder).stop_ids == expected


def test_stop_ids_of_the_model_config(folder):
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load_tokenizer(folder).stop_ids == (7,)


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


def test_folders_without_a_tokenizer(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"'tokenizer\.json' is missing"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="outside the checkpoint's folder"):
        load_tokenizer(folder)
