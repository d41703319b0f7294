"""Open a checkpoint folder: read its configs and the headers of its files."""

import dataclasses
import pathlib
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, Problems
from jax_nvfp4_moe.checkpoint.experts.forms import divide_stacks
from jax_nvfp4_moe.checkpoint.folder import find_folder, read_config
from jax_nvfp4_moe.checkpoint.formats.quantization import QuantConfig, read_quant_config
from jax_nvfp4_moe.checkpoint.key_mapping import KeyMapping, canonical_names, find_key_mapping
from jax_nvfp4_moe.checkpoint.reading.garbage import paused_collection
from jax_nvfp4_moe.checkpoint.safetensors import Tensors, open_tensors


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint folder. As a context manager, it closes its files at the end of the block.

    Attributes:
      folder: the path of the folder.
      config: the parsed ``config.json``. Its values are not checked.
      tensors: the tensors, under the names by which models ask for them. Their headers are checked.
      quant: which modules are quantized, and how.
      key_mapping: how the file spells the names of the language model's tensors.
    """

    folder: pathlib.Path
    config: dict[str, Any]
    tensors: Tensors
    quant: QuantConfig
    key_mapping: KeyMapping

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error) -> None:
        self.tensors.close()


@paused_collection()
def open_checkpoint(folder: str | pathlib.Path) -> Checkpoint:
    """Open a checkpoint folder, and read its configs and the headers of all its files.

    Args:
      folder: a folder or a Hub name, as for `folder.find_folder`.

    Raises:
      CheckpointError: lists everything that is wrong with the configs and the headers.
    """
    folder = find_folder(folder)
    config = read_config(folder)
    problems, key_mapping = Problems(), KeyMapping()
    renamed: dict[str, str] = {}
    quant = tensors = None
    with problems.collected():
        quant = read_quant_config(folder, config)
    with problems.collected():
        tensors = open_tensors(folder)
        key_mapping = find_key_mapping(tensors.names(), problems)
        renamed = canonical_names(tensors.names(), key_mapping, problems)
    if problems or quant is None or tensors is None:
        if tensors is not None:
            tensors.close()
        raise CheckpointError(problems, str(folder))
    tensors.rename(renamed)
    divide_stacks(tensors)
    return Checkpoint(folder, config, tensors, quant, key_mapping)
