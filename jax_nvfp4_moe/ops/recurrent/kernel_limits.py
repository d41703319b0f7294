"""Sizes of the CUDA kernels of recurrent mixers."""

# Widths of the rows and columns of a state, which a kernel holds in registers.
STATES: dict[str, range | str] = dict.fromkeys(
    ("key width", "value width", "head width", "state width"), "STATE_WIDTHS"
)
