"""Read parts of arrays from the bytes of files."""
