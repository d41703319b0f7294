"""Sizes of the CUDA kernels of recurrent mixers."""

# The kernels hold a state of at most this many rows and columns in registers, and read 4 columns at
# a time.
MOST, _FACTOR = 128, 4
# Widths of the rows and columns of a state that a kernel takes.
STATES: dict[str, range] = dict.fromkeys(
    ("key width", "value width", "head width", "state width"), range(_FACTOR, MOST + 1, _FACTOR)
)
CHUNK, SMALL_CHUNK = 64, 32  # tokens in the chunks of a recurrence over a prompt


def pad_tokens(t):
    """Round a number of tokens up to whole chunks."""
    return -(-t // CHUNK) * CHUNK
