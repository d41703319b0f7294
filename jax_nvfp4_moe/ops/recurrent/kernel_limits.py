"""Sizes of the CUDA kernels of recurrent mixers."""

from jax_nvfp4_moe.backends.launch_facts import facts

# Widths of the rows and columns of a state, which a kernel holds in registers.
STATES: dict[str, range | str] = dict.fromkeys(
    ("key width", "value width", "head width", "state width"), "STATE_WIDTHS"
)


def count_chunks(b, t):
    """Return the chunks of t tokens of each of b rows, for which a recurrence needs memory."""
    return b * -(-t // facts().RECURRENCE_CHUNK)
