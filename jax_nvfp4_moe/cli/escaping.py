"""Keep characters that control a terminal out of what commands print.

Names in a checkpoint, the errors of its chat template and the text of its model come from
strangers. With escape sequences they could recolor, rewrite or hide what a terminal shows, and with
marks of direction they could show text in another order.
"""

import logging
import re

# Control characters except newline and tab; marks, embeddings, overrides and isolates of direction;
# separators of lines and paragraphs; halves of surrogate pairs, which no encoding can write.
_CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
# Other characters that show nothing. Names can differ in them and look the same. Emoji and the text
# of some languages need the joiners among them.
_INVISIBLE = (
    r"\xad\u180e\u200b-\u200d\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
)
_TEXT = re.compile(f"[{_CONTROLS}]")
_MESSAGE = re.compile(f"[{_CONTROLS}{_INVISIBLE}]")
_CELL = re.compile(f"[\t\n{_CONTROLS}{_INVISIBLE}]")


def escape_text(text: str) -> str:
    r"""Return generated text for a terminal: control characters as escapes, such as ``\x1b``.

    Newlines and tabs stay. The text of a stream can be escaped piece by piece.
    """
    return _TEXT.sub(_escape, text)


def escape_message(text: str) -> str:
    """Return a message with control characters and invisible characters as escapes.

    Newlines and tabs stay, because messages may have several lines.
    """
    return _MESSAGE.sub(_escape, text)


def escape_line(text: str) -> str:
    """Return the text of one line or cell: as `escape_message`, with newlines and tabs escaped."""
    return _CELL.sub(_escape, text)


class EscapingFormatter(logging.Formatter):
    """A formatter of log records that escapes as `escape_message` does."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record, with its traceback if it has one."""
        return escape_message(super().format(record))


def _escape(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]
