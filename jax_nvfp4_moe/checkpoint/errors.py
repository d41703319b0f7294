"""CheckpointError: everything that is wrong with a checkpoint, in one error."""

from collections.abc import Iterable

_LONGEST = 160  # characters of a name from a file that a message repeats


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or does not hold what the model needs.

    Attributes:
      problems: one sentence each, with the file or tensor that it is about, in the order found.
    """

    def __init__(self, problems: Iterable[str], where: str | None = None):
        self.problems = tuple(dict.fromkeys(problems))  # the same fact may be met twice
        self.where = where
        super().__init__(self._message())

    def _message(self) -> str:
        place = f"{self.where}: " if self.where else ""
        if len(self.problems) == 1:
            return place + self.problems[0]
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        return f"{place}{len(self.problems)} problems:{lines}"

    def __reduce__(self):
        return type(self), (self.problems, self.where)


def quoted(value: object) -> str:
    """Return `value`, which comes from a file, as short printable text for a message."""
    text = ascii(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]}...{text[-1]}"
