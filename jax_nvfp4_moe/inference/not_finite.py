"""Say that results are not finite: NaN, or infinite.

A model gives such results if a weight is NaN, or if a number overflows its dtype. Nothing raises
then, because the results of the other rows are right. A warning says which results are not finite,
and a command that has given such a warning exits with status 1.
"""

import logging

import numpy as np
from jaxtyping import Int32

from jax_nvfp4_moe.checkpoint.errors import CheckpointError

LOG = logging.getLogger("jax_nvfp4_moe")
MARK = "not_finite"  # attribute of the log records of this module
ADVICE = (
    "look for NaN and infinity in the checkpoint, or compute in another dtype, because float16 "
    "overflows above 65504"
)
_NAMED = 8  # a warning names at most so many rows


class NotFiniteError(CheckpointError):
    """Report that a calculation cannot go on, because numbers in it are not finite."""


def warn_not_finite(message: str, *values) -> None:
    """Log at WARNING that results are not finite.

    Args:
      message: what is not finite and where, a clause without a full stop, with the placeholders of
        `logging`.
      values: values of the placeholders.
    """
    LOG.warning(f"{message}; {ADVICE}", *values, extra={MARK: True})


def warn_rows(first: Int32[np.ndarray, " b"]) -> None:
    """Log for which rows of a batch the logits were not finite, if there are any.

    Args:
      first: int32 ``[b]``, for each row the index of the first new token that was drawn from such
        logits; -1 if there is none.
    """
    rows = np.flatnonzero(first >= 0).tolist()
    if not rows:
        return
    named = ", ".join(f"row {row} from new token {first[row]} on" for row in rows[:_NAMED])
    more = f", and {len(rows) - _NAMED} more rows" if len(rows) > _NAMED else ""
    warn_not_finite(
        "the logits are not finite, so the tokens drawn from them mean nothing: %s%s (both counted "
        "from 0)",
        named,
        more,
    )
