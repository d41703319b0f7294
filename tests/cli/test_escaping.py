"""Test that control characters from files reach no terminal: in messages, tables and text."""

import io
import json
import logging
import sys
import warnings

import pytest
from support.files import letters
from support.files.given import CHECKPOINTS, EXAMPLE, copy_with_config

from jax_nvfp4_moe.cli import app as cli
from jax_nvfp4_moe.cli import output
from jax_nvfp4_moe.cli.escaping import escape_line, escape_message, escape_text

# What controls a terminal, and what reorders or hides text.
HOSTILE = "\x1b]0;title\x07\x1b[31m \x9b31m \r\b\x7f\u202e\u2066\u200e\u2028\ud800"
ESCAPED = r"\x1b]0;title\x07\x1b[31m \x9b31m \r\x08\x7f\u202e\u2066\u200e\u2028\ud800"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_is_escaped_where():
    for escape in (escape_text, escape_message, escape_line):
        assert escape(HOSTILE) == ESCAPED
    plain = "grün 漢字 👩\N{ZERO WIDTH JOINER}🚀 \\x1b"
    assert escape_text(plain + "\n\t") == plain + "\n\t"
    assert escape_message("a\u200d\u200b\ufeff\N{TAG LATIN SMALL LETTER A}\n\tb") == (
        "a\\u200d\\u200b\\ufeff\\U000e0061\n\tb"
    )
    assert escape_line("a\nb\tc") == r"a\nb\tc"


def test_generated_text_is_escaped_on_a_terminal_alone(monkeypatch):
    text = f"def\tf\n{HOSTILE[:-1]}é"
    for stream, expected in (
        (Terminal(), f"def\tf\n{ESCAPED[:-6]}é"),
        (io.StringIO(), text),
    ):
        monkeypatch.setattr(sys, "stdout", stream)
        for character in text:  # as a stream may split it
            output.write(character)
        assert stream.getvalue() == expected


def test_tables_and_json_are_escaped():
    assert output.table([("a" + HOSTILE, "b\n"), ("c", "d")])[0].rstrip() == rf"a{ESCAPED}  b\n"
    text = output.to_json({HOSTILE: HOSTILE})
    assert text.isprintable()
    assert text.isascii()
    assert json.loads(text) == {HOSTILE: HOSTILE}


def test_log_records_warnings_and_tracebacks_are_escaped(monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    cli._prepare_messages()
    try:
        logging.getLogger("jax_nvfp4_moe").warning("a %s", HOSTILE)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            monkeypatch.setattr(warnings, "showwarning", logging._showwarning)
            warnings.warn(f"b {HOSTILE}", stacklevel=1)
        try:
            raise KeyError("c " + HOSTILE)
        except KeyError as error:
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        logging.captureWarnings(False)
    said = capsys.readouterr().err
    assert f"a {ESCAPED}" in said
    assert f"b {ESCAPED}" in said
    assert "KeyError: 'c " in said
    assert all(line.isprintable() for line in said.replace("\t", " ").splitlines())


def test_generated_text_is_raw_in_a_pipe(tmp_path, capsys, monkeypatch):
    """Each token of this tokenizer is an escape sequence, but those of the prompt."""
    folder = copy_with_config(CHECKPOINTS / "qwen3moe-modelopt-w4a4", tmp_path / "m")
    letters.write_tokenizer(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"].items()
    renamed = {name if i < 26 else f"\x1b[{i}m\r\u202e": i for name, i in vocabulary}
    content["model"]["vocab"] = renamed
    (folder / "tokenizer.json").write_text(json.dumps(content))
    shown = []
    for on_terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda on=on_terminal: on)
        with pytest.raises(SystemExit) as stopped:
            cli.main(["generate", str(folder), "--prompt", "TEXT", "--max-new-tokens", "12"])
        assert not stopped.value.code
        shown.append(capsys.readouterr().out)
    raw, escaped = shown
    assert "\x1b[" in raw
    assert "\r\u202e" in raw
    assert escaped == escape_text(raw)
    assert escaped.replace("\n", "").isprintable()


TEMPLATE = "{{ raise_exception('no " + HOSTILE[:-1] + "') }}"


@pytest.mark.parametrize("options", [(), ("--traceback",)])
def test_messages_of_commands_are_escaped(tmp_path, capsys, options):
    folder = copy_with_config(EXAMPLE, tmp_path / "m\x1b[31m")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", "--chat", str(folder), *options])
    captured = capsys.readouterr()
    assert (stopped.value.code, captured.out) == (2, "")
    assert r"no \x1b]0;title\x07\x1b[31m" in captured.err
    assert captured.err.replace("\n", "").isprintable()
    assert captured.err.startswith("Traceback") == bool(options)


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize("architectures", [None, ["\x1b[31m\nx"]], ids=["read", "refused"])
def test_what_inspect_shows_is_escaped(tmp_path, capsys, options, architectures):
    changes = {"architectures": architectures} if architectures else {}
    folder = copy_with_config(EXAMPLE, tmp_path / "m\x1b[31m\nx", **changes)
    with pytest.raises(SystemExit):
        cli.main(["inspect", str(folder), *options])
    captured = capsys.readouterr()
    if architectures:  # messages have lines
        assert r"m\x1b[31m" in captured.err
    else:
        assert r"m\x1b[31m\nx" in captured.out or r"m\u001b[31m\nx" in captured.out
    assert (captured.out + captured.err).replace("\n", "").isprintable()
