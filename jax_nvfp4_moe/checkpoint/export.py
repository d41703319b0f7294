"""Write checkpoint folders: safetensors files, their index, and the JSON files beside them.

Tensors are made one at a time, so that memory never holds the whole checkpoint.
"""

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jax_nvfp4_moe.checkpoint.folder import CONFIG
from jax_nvfp4_moe.checkpoint.formats.modelopt import QUANT_FILE, declaration
from jax_nvfp4_moe.checkpoint.safetensors import INDEX, SINGLE_FILE, STORED_TYPES
from jax_nvfp4_moe.checkpoint.writing.files import write_file

SHARD_BYTES = 5_000_000_000  # the size that Hugging Face's tools write by default
_STORED_NAMES = {
    stored.numpy: name
    for name, stored in STORED_TYPES.items()
    if stored.numpy.itemsize * 8 == stored.bits
}


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor that is made when its turn to be written comes.

    Attributes:
      shape: the shape of the array.
      dtype: the dtype of the array.
      make: returns the array. It is called once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


Writable = np.ndarray | LazyTensor


def write_safetensors(
    path: str | pathlib.Path,
    tensors: Mapping[str, Writable],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file. After an error, no incomplete file remains.

    Tensors are written in the order of the reference writer: the widest dtype first, then by name.
    Each tensor therefore begins at a multiple of its element size.

    Args:
      path: the file to write. An existing file is replaced.
      tensors: name -> array. A `LazyTensor` is made when its turn comes, and dropped once it is
        written.
      metadata: strings for ``__metadata__`` of the header. None writes no metadata.

    Raises:
      ValueError: the format has no such dtype, or a `LazyTensor` makes an array of another shape or
        dtype than it declares.
      OSError: the file cannot be written. The message names the file and its device.
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
    """Write a checkpoint folder: the config, the tensors, and the quantization config of ModelOpt.

    The tensors go into one file, or into several files with an index.

    Args:
      folder: the folder to write. It is created if it is missing.
      tensors: name -> array, as for `write_safetensors`.
      config: the contents of ``config.json``. Its quantization config is replaced.
      algorithm: a key of `modelopt.ALGORITHMS`, or "MIXED_PRECISION". None for a checkpoint that is
        not quantized.
      exclude: the modules that are not quantized.
      layers: for "MIXED_PRECISION", a module or the experts' module -> a key of `ALGORITHMS`.
      kv_cache: "FP8" if the tensors include the scales of an FP8 KV cache, else None.
      version: the version of the writer, for the quantization config.
      shard_bytes: the most bytes in one file. A tensor that is larger gets a file of its own.

    Raises:
      ValueError: the quantization config could not be read back. Nothing is written then.
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
    """Write the tensors and the JSON files of a checkpoint folder.

    ``config.json`` is written last: a folder without it is not a checkpoint, so an interrupted
    write cannot be mistaken for a complete one.

    Args:
      folder: as for `write_checkpoint`.
      tensors: as for `write_checkpoint`.
      config: the contents of ``config.json``, written unchanged.
      quant_file: the contents of ``hf_quant_config.json``. None writes no such file.
      shard_bytes: as for `write_checkpoint`.
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
    """Yield the names, in order, in groups whose tensors have at most `shard_bytes`."""
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
    """Return the format's name for the dtype of the tensor `name`."""
    dtype = np.dtype(dtype)
    if dtype not in _STORED_NAMES or dtype.byteorder == ">":
        known = ", ".join(sorted(dtype.name for dtype in _STORED_NAMES))
        raise ValueError(f"{name}: safetensors has no dtype {dtype}; expected one of {known}")
    return _STORED_NAMES[dtype]


def _bytes(name, tensor) -> memoryview:
    """Return the bytes of a tensor, made now if it is a `LazyTensor`."""
    array = tensor.make() if isinstance(tensor, LazyTensor) else np.asarray(tensor)
    if array.shape != tuple(tensor.shape) or array.dtype != tensor.dtype:
        raise ValueError(
            f"{name}: expected {np.dtype(tensor.dtype)} {tuple(tensor.shape)}, "
            f"got {array.dtype} {array.shape}"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write_json(path, value) -> None:
    write_file(path, [(json.dumps(value, indent=2) + "\n").encode()])
