"""Test the `chat` command: its turns, and a terminal where a user types, interrupts and leaves."""

import copy
import io
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest
from support.files.given import EXAMPLE

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.cli import app, chat
from jax_nvfp4_moe.cli.chat import Turns, read_variables

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# A key press becomes a signal only in the controlling terminal of the program's session. The
# program inherits the way signals are handled, and a shell starts jobs in the background with
# SIGINT ignored.
IN_TERMINAL = """
import fcntl, runpy, signal, termios
signal.signal(signal.SIGINT, signal.default_int_handler)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
runpy.run_module("jax_nvfp4_moe", run_name="__main__")
"""


@pytest.fixture
def tokenizer(tmp_path):
    """Return the example's tokenizer with a chat template."""
    folder = tmp_path / "model"
    shutil.copytree(EXAMPLE, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return nvfp4.load_tokenizer(folder)


def test_turns_keep_the_tokens_that_were_said(tokenizer):
    """Tokenizing an answer's text again could give tokens that do not match the cache."""
    turns = Turns(tokenizer, "be brief")
    first = turns.ask("hi")
    text = "<system>be brief</system><user>hi</user><assistant>"
    np.testing.assert_array_equal(first, tokenizer.encode(text, special=False))
    spoken = [int(tokenizer.encode(c, special=False)[0]) for c in "return"]  # letter by letter
    assert len(spoken) > len(tokenizer.encode("return", special=False))
    turns.answered([*spoken, tokenizer.stop_ids[0]])
    second = turns.ask("why")
    np.testing.assert_array_equal(second[: len(first) + len(spoken)], [*first, *spoken])
    rest = tokenizer.encode("</assistant><user>why</user><assistant>", special=False)
    np.testing.assert_array_equal(second[len(first) + len(spoken) :], rest)


def test_a_template_that_shows_earlier_turns_in_another_way(tokenizer):
    """Some templates leave out the reasoning of earlier turns."""
    turns = Turns(tokenizer)
    first = turns.ask("hi")
    turns.answered([7, 8, 9])
    turns._messages[-1]["content"] = "short"
    text = "<user>hi</user><assistant>short</assistant><user>why</user><assistant>"
    assert len(first)
    np.testing.assert_array_equal(turns.ask("why"), tokenizer.encode(text, special=False))


def test_the_template_sees_variables(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(EXAMPLE, folder)
    template = TEMPLATE + "{% if think is false %}<think></think>{% endif %}{{ tools | length }}"
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = nvfp4.load_tokenizer(folder)
    turns = Turns(tokenizer, None, read_variables(['tools=[{"a": 1}]', "think=false"]))
    text = "<user>hi</user><assistant><think></think>1"
    np.testing.assert_array_equal(turns.ask("hi"), tokenizer.encode(text, special=False))


def test_values_of_variables_are_json_or_text():
    deep = "[" * 9999
    given = ["a=false", "b=x = y", "c=", 'd="7"', "e=7", "f=null", "b=last", f"g={deep}"]
    read = read_variables(given)
    assert read == {"a": False, "b": "last", "c": "", "d": "7", "e": 7, "f": None, "g": deep}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("thinking", "--template-variable: expected NAME=VALUE"),
        ("=1", "--template-variable: expected NAME=VALUE"),
        ("enable-thinking=1", "--template-variable: expected NAME=VALUE"),
        ("messages=[]", "--template-variable: messages is not a variable"),
        ("tools=weather", "--template-variable: tools: expected None or a list of dictionaries"),
    ],
)
def test_wrong_variables(given, message):
    with pytest.raises(ValueError, match=message):
        read_variables(["a=1", given])


def test_a_wrong_variable_ends_the_command(run):
    """It is refused before anything is loaded."""
    status, out, err = run("chat", "nowhere", "--template-variable", "a")
    assert (status, out) == (2, "")
    assert err.startswith("error: --template-variable: expected NAME=VALUE"), err


def test_without_a_template_the_text_goes_on():
    tokenizer = nvfp4.load_tokenizer(EXAMPLE)
    turns = Turns(tokenizer)
    np.testing.assert_array_equal(turns.ask("def f("), tokenizer.encode("def f("))
    turns.answered([11, 12])
    more = turns.ask("x")
    assert more[-3:].tolist() == [11, 12, *tokenizer.encode("x", special=False)]


def test_a_new_conversation_begins_as_the_first_one(tokenizer, tmp_path, monkeypatch):
    """It has the system message and the variables of the command, and no earlier turn."""
    asked, options = [], {}

    class Recorded:
        def __init__(self, model, **given):
            options.update(given)
            self.max_length, self.ids = given["max_length"], ()

        def check(self, ids):
            assert len(ids)

        def answer(self, text, max_new_tokens):
            asked.append((text.tolist(), max_new_tokens))
            yield from (7, 8)

    lines = iter(("hi", "why", "/reset", "hi", "/exit"))
    positions = types.SimpleNamespace(max_positions=2048)
    monkeypatch.setattr(
        chat, "load_model", lambda *_, **__: types.SimpleNamespace(config=positions)
    )
    monkeypatch.setattr(chat, "Conversation", Recorded)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    command = ["chat", str(tmp_path / "model"), "--system", "be brief", "--max-new-tokens", "9"]
    command += ["--draft", "lookup", "--draft-tokens", "2"]
    sampling = {"temperature": 0.7, "top_k": 3, "top_p": 0.3}
    for name, value in (sampling | {"seed": 5, "context": 100}).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with pytest.raises(SystemExit) as stopped:
        app.main(command)
    assert not stopped.value.code
    text = "<system>be brief</system><user>hi</user><assistant>"
    first = tokenizer.encode(text, special=False).tolist()
    assert [new for _, new in asked] == [9] * 3
    assert [asked[0][0], asked[2][0]] == [first] * 2
    assert asked[1][0][: len(first) + 2] == [*first, 7, 8]
    assert options.pop("key") == jax.random.key(5)
    drafting = {"draft": "lookup", "draft_tokens": 2}
    assert options == sampling | drafting | {"max_length": 100, "stop_ids": tokenizer.stop_ids}


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *arguments):
        self.master, slave = pty.openpty()
        command = [sys.executable, "-c", IN_TERMINAL, *arguments]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def type(self, text):
        """Press keys."""
        os.write(self.master, text.encode())

    def wait_for(self, pattern, again="", seconds=120):
        """Read until `pattern` appears in the output since the last call, and return that output.

        In each second without output, press the keys in `again`. Python's input() misses an
        interrupt that arrives after its prompt but before it waits for a key.
        """
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            assert time.monotonic() < end, f"{pattern!r} did not come: {self.shown!r}"
            if select.select([self.master], [], [], 1)[0]:
                self.shown += os.read(self.master, 4096).decode()
            else:
                self.type(again)
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before


def test_a_conversation_in_a_terminal():
    """The user interrupts an answer and then the prompt, starts a new conversation and leaves."""
    terminal = Terminal("chat", "--max-new-tokens", "1500", "--temperature", "1")
    terminal.wait_for("no chat template.*> $")
    terminal.type("def add(a, b):\n")
    terminal.wait_for(r"\r\n[^>]*\w{3}")  # the answer begins
    terminal.type("\x03")
    terminal.wait_for(r"Stopped\.\r\n.*> $")
    terminal.type("\x03")
    terminal.wait_for("/reset to start over.*> $", again="\x03")
    terminal.type("/reset\n")
    terminal.wait_for(r"Started a new conversation\..*> $")
    terminal.type("/exit\n")
    assert terminal.process.wait(30) == 0


@pytest.fixture
def talk(tmp_path, capsys, monkeypatch):
    """Return a function that runs `chat` with lines on standard input.

    It returns status, stdout and stderr.
    """
    folder = tmp_path / "model"
    shutil.copytree(EXAMPLE, folder)

    def call(lines, *options, template=TEMPLATE):
        (folder / "chat_template.jinja").write_text(template)
        stdin = None if lines is None else io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(SystemExit) as stopped:
            app.main(["chat", str(folder), "--max-new-tokens", "3", *options])
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out.splitlines(), captured.err

    return call


def test_a_chat_goes_on_when_the_context_is_full(talk):
    """A line that is too long, and an answer that ends because there is no room for more."""
    long, many = b"a b c " * 40, b"\nhi" * 5
    status, out, err = talk(long + many + b"\n/reset\nhi\n", "--context", "48")
    assert status == 0
    assert len(out) >= 2
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) >= 2
    for line in errors:
        assert "and a conversation has room for 48, with the answer" in line
        assert "Type /reset" in line
    assert err.index("Started a new conversation") > err.index(errors[-1])


def test_an_answer_that_fills_the_context_says_so(talk):
    status, _, err = talk(b"hi\n", "--context", "48", "--max-new-tokens", "900")
    assert status == 0
    assert "The context of 48 tokens is full, so the answer ends here. Type /reset" in err


def test_a_chat_goes_on_when_the_template_fails_in_a_later_turn(talk):
    failing = "{% if messages[-1].content == 'no' %}{{ raise_exception('\x1b[31mno') }}{% endif %}"
    lines = b"hi\nno\nhi\n/reset\nno\nhi\n"
    status, out, err = talk(lines, "--context", "48", template=failing + TEMPLATE)
    assert status == 0
    assert len(out) >= 3
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    assert r"TemplateError: \x1b[31mno. The conversation goes on without this line" in errors[0]


def test_a_template_that_fails_from_the_start_ends_a_chat(talk):
    status, out, err = talk(b"hi\n", template="{{ raise_exception('never') }}")
    assert (status, out) == (2, [])
    assert err.splitlines()[-1] == "error: the chat template failed: TemplateError: never"


def test_a_turn_that_failed_leaves_no_trace(tokenizer):
    turns = Turns(tokenizer)
    turns.ask("hi")
    turns.answered([7, 8])
    before = copy.copy(turns)
    turns.ask("lost")
    turns.answered([9])
    np.testing.assert_array_equal(before.ask("why")[-8:], _ids_after(tokenizer, "why")[-8:])
    assert "lost" not in tokenizer.decode(before.ids)


def _ids_after(tokenizer, line):
    turns = Turns(tokenizer)
    turns.ask("hi")
    turns.answered([7, 8])
    return turns.ask(line)


def test_lines_that_are_no_text(talk):
    status, out, err = talk(b"\xff\xfe\nhi\n")
    assert status == 0
    assert out
    assert "error: input: expected text in UTF-8" in err


def test_a_tokenizer_that_leaves_nothing_of_a_line(talk):
    template = "{{ '' if messages[-1].content == 'no' else 1 }}"
    status, _, err = talk(b"hi\nno\nhi\n", template=template)
    assert status == 0
    assert "error: text: expected at least one token, got none. The conversation goes on" in err


def test_closed_standard_input(talk):
    status, out, err = talk(None)
    assert (status, out) == (2, [])
    assert err == "error: standard input is closed, and chat reads from it what you type\n"


def test_a_context_beyond_the_model_names_the_option(talk):
    status, _, err = talk(b"", "--context", "100000")
    assert (status, err) == (
        2,
        "error: --context: expected 1 to 2048, the positions of the model; got 100000\n",
    )
