"""Test chat templates: which file holds them, what they see, and what they may not do."""

import json

import numpy as np
import pytest
from support.files.given import EXAMPLE

from jax_nvfp4_moe import CheckpointError
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer

MESSAGES = [{"role": "user", "content": "Wie <geht>'s?"}]


def with_template(folder, template):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return load_tokenizer(folder)


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


def test_templates_of_processors_come_last(folder, load_with):
    """transformers' processors read them, and its tokenizers do not."""
    assert load_with(processor_config={"chat_template": "p"}).chat(MESSAGES) == "p"
    assert load_with(chat_template={"chat_template": "j"}).chat(MESSAGES) == "j"
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
