"""`CheckpointError` reports everything that is wrong with a checkpoint in one error."""

import contextlib
from collections.abc import Iterable, Iterator

_LONGEST = 160  # the most characters that a message repeats of a text from a file
_MOST_LINES = 1000  # the most problems that a message repeats; `problems` has all of them


class CheckpointError(ValueError):
    """Report that a checkpoint cannot be read, or does not hold what the model needs.

    The loader checks all files before it raises, so that one error lists every problem. Nothing is
    loaded after a problem. `CheckpointError` is a `ValueError`.

    Args:
      problems: one sentence for each problem, or a sentence alone. Repeated sentences are dropped.
      where: the checkpoint's folder, which begins the message; None for no folder.

    Attributes:
      problems: tuple of str. Each sentence names the file or the tensor that it is about, in the
        order in which the problems were found. The message repeats the first 1000 of them.
      where: str or None, the checkpoint's folder.

    Example:
      >>> import jax_nvfp4_moe as nvfp4
      >>> try:
      ...     nvfp4.load_model("a folder that is not there")
      ... except nvfp4.CheckpointError as error:
      ...     print(error.problems[0].partition(";")[0])
      'a folder that is not there' is not a folder that exists
    """

    def __init__(self, problems: str | Iterable[str], where: str | None = None):
        listed = (problems,) if isinstance(problems, str) else problems
        self.problems = tuple(dict.fromkeys(listed))  # two modules may find the same problem
        self.where = where
        super().__init__(self._message())

    def _message(self) -> str:
        place = f"{printable(self.where)}: " if self.where else ""
        if len(self.problems) == 1:
            return place + self.problems[0]
        lines = "".join(f"\n  {problem}" for problem in self.problems[:_MOST_LINES])
        more = len(self.problems) - _MOST_LINES
        rest = f"\n  and {more} more" if more > 0 else ""
        return f"{place}{len(self.problems)} problems:{lines}{rest}"

    def __reduce__(self):
        """Return what pickle needs: the default would pass the message in place of the problems."""
        return type(self), (self.problems, self.where)


class Problems(list[str]):
    """Sentences that one `CheckpointError` will list."""

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Add the problems of a `CheckpointError` inside of the block, which ends there."""
        try:
            yield
        except CheckpointError as error:
            self += error.problems

    def finish(self, where: str | None = None) -> None:
        """Raise all problems as one `CheckpointError`, if there are any."""
        if self:
            raise CheckpointError(self, where)


def printable(path: object) -> str:
    r"""Return a path for a message: as it is, with what would break the line as escapes.

    A folder's name may hold a line feed, which becomes ``\n``, and bytes that no encoding writes.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(path))


def quoted(value: object) -> str:
    """Return text for a message: `value`, which comes from a file, shortened and with escapes.

    Escapes keep control characters of an untrusted file out of the user's terminal.
    """
    if isinstance(value, (str, list)):
        value = value[:_LONGEST]  # a file may hold millions of characters or of elements
    text = ascii(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]}...{text[-1]}"
