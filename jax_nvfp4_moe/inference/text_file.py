"""Read a text file of a checkpoint."""

import pathlib

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import JSON_BYTES, locate


def read_text(folder: pathlib.Path, name: str, most: int = JSON_BYTES) -> str:
    """Return the text of the file `name` of `folder`.

    Args:
      folder: the checkpoint's folder.
      name: path of the file in it.
      most: the largest size of the file in bytes. Defaults to 100 MB.

    Raises:
      CheckpointError: the file is missing, lies outside of the folder, is too large, or is not
        UTF-8.
    """
    with locate(folder, name).open("rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise CheckpointError([f"{quoted(name)} has more than {most} bytes, the limit"])
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError([f"{quoted(name)}: it is not text in UTF-8: {error}"]) from None
