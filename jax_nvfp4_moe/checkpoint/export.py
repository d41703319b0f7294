"""Write checkpoints: safetensors files, one tensor in memory at a time, and their index."""

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jax_nvfp4_moe.checkpoint.folder import CONFIG
from jax_nvfp4_moe.checkpoint.modelopt import QUANT_FILE, declaration
from jax_nvfp4_moe.checkpoint.safetensors import INDEX, SINGLE_FILE, STORED_TYPES
from jax_nvfp4_moe.checkpoint.writing import write_file

SHARD_BYTES = 5_000_000_000  # what Hugging Face's tools write
_STORED_NAMES = {
    stored.numpy: name
    for name, stored in STORED_TYPES.items()
    if stored.numpy.itemsize * 8 == stored.bits
}


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor that is made when it is written.

    Attributes:
      shape: of the array.
      dtype: of the array.
      make: returns the array; called once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


Writable = np.ndarray | LazyTensor


def write_safetensors(
    path: str | pathlib.Path,
    tensors: Mapping[str, Writable],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file, complete or not at all.

    Tensors lie in the order of upstream's writer: widest dtype first, then by name, so that each
    begins at a multiple of its element.

    Args:
      path: of the file, replaced if it exists.
      tensors: by name; a `LazyTensor` is made when its turn comes, and dropped.
      metadata: strings for the header's ``__metadata__``.

    Raises:
      ValueError: a dtype is unknown to the format, or a `LazyTensor` makes another array than it
        said.
      OSError: the file cannot be written; names it and its device.
    """
    path = pathlib.Path(path)
    order = sorted(tensors, key=lambda name: (-np.dtype(tensors[name].dtype).itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": _stored_name(name, tensors[name].dtype),
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    head = len(encoded).to_bytes(8, "little") + encoded
    write_file(path, itertools.chain([head], (_bytes(name, tensors[name]) for name in order)))


def write_checkpoint(
    folder: str | pathlib.Path,
    tensors: Mapping[str, Writable],
    config: Mapping[str, Any],
    *,
    algorithm: str | None = None,
    exclude: tuple[str, ...] = (),
    layers: Mapping[str, str] | None = None,
    kv_cache: str | None = None,
    version: str = "0",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint folder: config, one file or shards with an index, and the declaration.

    Args:
      folder: created where it is missing.
      tensors: by name, as `write_safetensors`.
      config: for ``config.json``; its quantization section is replaced.
      algorithm: a key of `modelopt.ALGORITHMS`, "MIXED_PRECISION", or None for an unquantized
        checkpoint.
      exclude: modules that are not quantized.
      layers: of a mixed checkpoint: module or experts' container -> a key of `ALGORITHMS`.
      kv_cache: "FP8" where the tensors have its scales, else None.
      version: of the writer, for the declaration.
      shard_bytes: a file grows no larger than this, unless one tensor does.

    Raises:
      ValueError: what is to be declared could not be read back; nothing is written.
    """
    written = {key: value for key, value in config.items() if key != "quantization_config"}
    file = None
    if algorithm is not None:
        file, written["quantization_config"] = declaration(
            algorithm, exclude, version, layers=layers, kv_cache=kv_cache
        )
    write_folder(folder, tensors, written, quant_file=file, shard_bytes=shard_bytes)


def write_folder(
    folder: str | pathlib.Path,
    tensors: Mapping[str, Writable],
    config: Mapping[str, Any],
    *,
    quant_file: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors and the two configs; ``config.json`` comes last, as it makes a checkpoint.

    Args:
      folder, tensors, shard_bytes: as for `write_checkpoint`.
      config: for ``config.json``, as it is.
      quant_file: for ``hf_quant_config.json``, None for no such file.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if quant_file is not None:
        _write_json(folder / QUANT_FILE, quant_file)
    shards = list(_shards(tensors, shard_bytes))
    if len(shards) == 1:
        write_safetensors(folder / SINGLE_FILE, tensors, {"format": "pt"})
    else:
        weight_map = {}
        for number, names in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            part = {key: tensors[key] for key in names}
            write_safetensors(folder / name, part, {"format": "pt"})
            weight_map |= dict.fromkeys(names, name)
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / INDEX, index)
    _write_json(folder / CONFIG, config)


def _shards(tensors, shard_bytes) -> Iterator[list[str]]:
    """Split the names, in their order, into groups of at most `shard_bytes`."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def _stored_name(name, dtype) -> str:
    dtype = np.dtype(dtype)
    if dtype not in _STORED_NAMES or dtype.byteorder == ">":
        known = ", ".join(sorted(dtype.name for dtype in _STORED_NAMES))
        raise ValueError(f"{name}: safetensors has no dtype {dtype}; known: {known}")
    return _STORED_NAMES[dtype]


def _bytes(name, tensor) -> memoryview:
    array = tensor.make() if isinstance(tensor, LazyTensor) else np.asarray(tensor)
    if array.shape != tuple(tensor.shape) or array.dtype != tensor.dtype:
        raise ValueError(
            f"{name}: expected {np.dtype(tensor.dtype)} {tuple(tensor.shape)}, "
            f"got {array.dtype} {array.shape}"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write_json(path, value) -> None:
    write_file(path, [(json.dumps(value, indent=2) + "\n").encode()])
