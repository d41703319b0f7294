"""Sizes of the scratch memory of kernels."""

SECTION_BYTES = 256  # C++ code divides the scratch memory the same way, and tests compare the sizes


def sections(*sizes: int) -> int:
    """Return the total bytes of arrays that each start at a multiple of 256 bytes."""
    return sum(-(-size // SECTION_BYTES) * SECTION_BYTES for size in sizes)
