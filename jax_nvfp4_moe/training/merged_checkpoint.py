"""`merge_model`: write a checkpoint whose weights have the adapters of a folder in them."""

import collections
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.checkpoint.export import SHARD_BYTES, LazyTensor, Writable, write_folder
from jax_nvfp4_moe.checkpoint.folder import CONFIG, expand_home, read_json
from jax_nvfp4_moe.checkpoint.formats.modelopt import QUANT_FILE
from jax_nvfp4_moe.checkpoint.opening import Checkpoint, open_checkpoint
from jax_nvfp4_moe.checkpoint.reading.unread import Piece, Unread
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES, Tensors
from jax_nvfp4_moe.checkpoint.table import Source
from jax_nvfp4_moe.checkpoint.values import LinearWeights
from jax_nvfp4_moe.checkpoint.writing.files import staged_folder
from jax_nvfp4_moe.models.loading import UnreadModel, find_unquantized
from jax_nvfp4_moe.nn.linear.lora import merge_weight
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.ops.low_rank import LowRank, add_to_each, product_of
from jax_nvfp4_moe.quantization.pipeline import check_destination, copy_beside
from jax_nvfp4_moe.training.adaptable import find_adaptable
from jax_nvfp4_moe.training.peft_files import read_adapters

_EXPERT_MATRICES = {"gate_up": ("gate_up_proj", "up_proj"), "down": ("down_proj",)}


def merge_model(
    source: str | pathlib.Path,
    adapters: str | pathlib.Path,
    destination: str | pathlib.Path,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint with the adapters of a folder merged into its weights.

    Each adapted weight becomes what `merge_lora` makes of it: ``Q(W + alpha / rank * B @ A)``,
    rounded to the format in which the file stores it. All other tensors, names, configs and
    formats stay. Memory holds one layer.

    Args:
      source: str or path, the folder or Hub name of the checkpoint on which the adapters were
        trained.
      adapters: folder that `save_lora` or PEFT wrote.
      destination: the folder to write. It must be empty or not exist.
      shard_bytes: the most bytes in one file, 5e9 by default. A larger tensor gets a file of its
        own.

    Raises:
      ValueError: `destination` is not empty, or an adapter is not finite.
      CheckpointError: as for `load_model` and `load_lora`. Also if an adapted weight is stored in
        MXFP4, or with scales of more than 16 weights: use `cast_model` first, where it applies.
      OSError: a file cannot be written. The message names the file and its device.

    After any error `destination` is as it was before.

    Example:
      >>> import importlib.resources, pathlib, tempfile
      >>> from flax import nnx
      >>> import jax_nvfp4_moe as nvfp4
      >>> path = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
      >>> model = nvfp4.load_model(path)
      >>> nvfp4.add_lora(model, 4, targets="q_proj", merge_aware=True, rngs=nnx.Rngs(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     nvfp4.save_lora(model, f"{folder}/adapters")
      ...     nvfp4.merge_model(path, f"{folder}/adapters", f"{folder}/merged")
      ...     merged = nvfp4.load_model(f"{folder}/merged")

    Source: as for `merge_lora`.
    """
    destination = expand_home(destination)
    check_destination(destination)
    with open_checkpoint(source) as checkpoint, staged_folder(destination, last=CONFIG) as stage:
        load = find_unquantized(checkpoint)
        pairs = {}
        for layer, matrices in read_adapters(find_adaptable(load.model), adapters):
            a, b = (np.asarray(matrix, np.float32) for matrix in (matrices.a, matrices.b))
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                raise ValueError(f"adapters: {layer.name} has values that are not finite")
            pairs[layer.stored] = LowRank(a, b, matrices.alpha / a.shape[-2])
        with load.open_reader(progress=False) as reader:
            changed = _changed(load, checkpoint.tensors, pairs, reader)
            quant = read_json(checkpoint.folder, QUANT_FILE) if _has(checkpoint) else None
            copy_beside(checkpoint, stage)
            tensors = _tensors(checkpoint, changed)
            how = {"quant_file": quant, "shard_bytes": shard_bytes}
            write_folder(stage, tensors, checkpoint.config, **how)


def _has(checkpoint) -> bool:
    """Return whether a checkpoint has the quantization file of ModelOpt."""
    return (checkpoint.folder / QUANT_FILE).exists()


def _tensors(checkpoint: Checkpoint, changed: Mapping[str, Callable]) -> dict[str, Writable]:
    """Return all tensors of a checkpoint; those that are `changed` are made by their function."""
    made, tensors = {}, checkpoint.tensors
    spelled = collections.Counter(tensors.info(name).name for name in tensors.names())
    for name in tensors.names():
        info = tensors.info(name)
        make = changed.get(name, functools.partial(tensors.read, name))
        # A tensor of several matrices, such as those of all experts, is written as these.
        own = info.name if spelled[info.name] == 1 else checkpoint.key_mapping.spell(name)
        made[own] = LazyTensor(info.array_shape, STORED_TYPES[info.dtype].numpy, make)
    return made


class _Merged:
    """The merged arrays of one weight of a file, which are kept until those of another are made."""

    def __init__(self, reader: Any):
        """Store the reader of the file."""
        self._reader = reader
        self._key, self._arrays = None, {}

    def make(self, weight: Any, change: Callable[[Any], Any], name: str) -> np.ndarray:
        """Return one array of ``change(weight)``.

        Args:
          weight: a weight with an `Unread` in place of each array.
          change: adds the adapter to the weight.
          name: name of the array; see `_arrays`.
        """
        if self._key is not weight:
            self._key, self._arrays = None, {}  # frees the last ones first
            made = change(self.read(weight))
            self._reader.raise_problems()
            self._arrays = {name: np.asarray(array) for name, array in _arrays(made).items()}
            self._key = weight
        return self._arrays[name]

    def read(self, value: Any) -> Any:
        """Return a value with its arrays."""
        return jax.tree.map(lambda leaf: jnp.asarray(self._reader.open(leaf)[()]), value)


def _arrays(weight: Any) -> dict[str, Any]:
    """Return those arrays of a weight that merging changes."""
    if isinstance(weight, NVFP4Tensor):
        return {"packed": weight.packed, "block_scale": weight.block_scale}
    return {"values": weight.values if isinstance(weight, FP8Tensor) else weight}


def _changed(
    load: UnreadModel, tensors: Tensors, pairs: Mapping[str, LowRank], reader
) -> dict[str, Callable]:
    """Return the function that makes each tensor that changes.

    Args:
      load: the model of the file.
      tensors: the tensors of the file.
      pairs: name of a layer, or of a matrix of experts -> its adapter.
      reader: reads the file.

    Raises:
      CheckpointError: the file stores a weight in another form than the model has.
    """
    merged, found = _Merged(reader), {}
    for part in load.parts:
        for source in part.sources.values():
            for weight, change in _weights(source, part.experts is not None, pairs, merged):
                arrays = _arrays(weight)
                if any(array.decode is not None for array in arrays.values()):
                    raise CheckpointError(
                        f"{source.name}: expected weights that are stored in NVFP4, FP8 or a float "
                        "dtype, to merge an adapter into; got another form, such as MXFP4. Leave "
                        "this layer out of the adapters"
                    )
                for name, array in arrays.items():
                    make = functools.partial(merged.make, weight, change, name)
                    for tensor, pieces in _by_tensor(array).items():
                        found[tensor] = functools.partial(_fill, tensors, tensor, pieces, make)
    return found


def _weights(source: Source, has_experts: bool, pairs, merged: _Merged) -> Iterator[Any]:
    """Yield each adapted weight of a source, and the function that adds its adapter."""
    if has_experts:
        for matrix, endings in _EXPERT_MATRICES.items():
            for name in (f"{source.name}.{ending}" for ending in endings):
                if name in pairs:
                    change = functools.partial(_add_to_experts, pair=pairs[name])
                    yield getattr(source.value, matrix), change
    elif isinstance(source.value, LinearWeights) and source.name in pairs:
        channels = source.value.channel_scale
        scale = None if channels is None else merged.read(channels)
        yield (
            source.value.weight,
            functools.partial(_add_to_linear, pair=pairs[source.name], channel_scale=scale),
        )


@jax.jit
def _add_to_experts(weight, pair: LowRank):
    """Return the weights of the experts of a layer with their adapter added."""
    return add_to_each(weight, pair)


@jax.jit
def _add_to_linear(weight, pair: LowRank, channel_scale):
    """Return the weight of a linear layer with its adapter added."""
    return merge_weight(weight, product_of(pair), channel_scale)


def _by_tensor(array: Unread) -> dict[str, list[Piece]]:
    """Return the pieces of an array by the tensors from which they come."""
    found: dict[str, list[Piece]] = {}
    for piece in array.pieces:
        found.setdefault(piece.name, []).append(piece)
    return found


def _fill(tensors: Tensors, name: str, pieces: Sequence[Piece], make) -> np.ndarray:
    """Return a tensor of the file with the values of an array, of which it fills some pieces."""
    stored, array = np.array(tensors.read(name)), make()
    for piece in pieces:
        place = stored if piece.shape is None else stored.reshape(piece.shape)
        part = array[piece.at]
        part = np.swapaxes(part, -1, -2) if piece.swapped else part
        place[piece.part] = part.astype(stored.dtype)
    return stored
