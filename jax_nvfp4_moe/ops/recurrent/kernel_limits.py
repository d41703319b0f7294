"""Sizes of the CUDA kernels of recurrent mixers."""

MOST = 128  # rows and columns of a state that a kernel holds in registers
# Widths of the rows and columns of a state that a kernel takes.
STATES: dict[str, range | str] = dict.fromkeys(
    ("key width", "value width", "head width", "state width"), "STATE_WIDTHS"
)
CHUNK, SMALL_CHUNK = 64, 32  # tokens in the chunks of a recurrence over a prompt


def pad_tokens(t):
    """Round a number of tokens up to whole chunks."""
    return -(-t // CHUNK) * CHUNK
