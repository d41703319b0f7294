"""Turn what the library `tokenizers` raises for a broken tokenizer into errors of this package.

The library is written in Rust. It checks little of ``tokenizer.json`` when it reads it, and fails
where the file makes no sense: at the load, at a text, or at tokens.
"""

import contextlib
import re
from collections.abc import Iterator

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import parse_object
from jax_nvfp4_moe.inference.tokenizer_class import TOKENIZER

_LONGEST = 1000  # the most characters that a message repeats of an error
_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')


@contextlib.contextmanager
def blaming_tokenizer(task: str) -> Iterator[None]:
    """Raise `CheckpointError` for an error of the library in this block.

    Args:
      task: what the library does in the block, such as "encode a text".
    """
    try:
        yield
    except BaseException as error:
        if not _is_of_library(error):
            raise
        said = one_line(error)
        raise CheckpointError(
            [f"{TOKENIZER}: the tokenizers library failed to {task}: {said}"]
        ) from None


def one_line(error: BaseException) -> str:
    """Return the message of an error as one line that is not too long."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."


def check_prefix(text: str) -> None:
    """Check merges that the library would cut in the middle of a character.

    It takes ``continuing_subword_prefix`` off the second part of each merge without a look at that
    part, and then ends the process.

    Args:
      text: the text of ``tokenizer.json``.

    Raises:
      CheckpointError: a second part does not begin with the prefix.
    """
    if not _PREFIX.search(text):
        return
    try:
        model = parse_object(text.encode()).get("model")
    except ValueError as error:
        raise CheckpointError([f"{TOKENIZER}: {error}"]) from None
    model = model if isinstance(model, dict) else {}
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        second = parts[-1] if isinstance(parts, list) and parts else None
        if isinstance(second, str) and not second.startswith(prefix):
            raise CheckpointError(
                [
                    f"{TOKENIZER}: model.merges: expected second parts that begin with "
                    f"continuing_subword_prefix {quoted(prefix)}, got {quoted(merge)}"
                ]
            )


def _is_of_library(error: BaseException) -> bool:
    """Return whether the library raised an error.

    A panic of Rust is no `Exception`. Most other errors are plain `Exception` objects. Text and
    numbers that Rust's types do not hold have types of their own.
    """
    if type(error).__name__ == "PanicException":
        return True
    return type(error) is Exception or isinstance(error, (UnicodeError, OverflowError))
