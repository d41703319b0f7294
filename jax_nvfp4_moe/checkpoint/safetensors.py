"""Read safetensors files: headers checked in full first, tensors only when asked for.

A file is 8 bytes with the length of the header (little endian), the header (a JSON object, name
-> dtype, shape and offsets), and the tensors, row-major and little endian, without holes.
A folder holds one such file, or several and an index that says which file holds which tensor.

Source: https://github.com/huggingface/safetensors, README and ``safetensors/src/tensor.rs``.
"""

import bisect
import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

from jax_nvfp4_moe.checkpoint.byte_runs import Index, Run, find_runs, index_shape
from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import JSON_BYTES, exists, locate, parse_object, read_json
from jax_nvfp4_moe.checkpoint.memory import aligned_empty

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_MOST_AXES = 32  # no model has more; keeps the product of a hostile shape small
_ONE_READ = 1 << 30  # Linux reads at most 2 GiB - 4096 bytes at once


@dataclasses.dataclass(frozen=True)
class StoredType:
    """A dtype of the file format.

    Attributes:
      bits: per element, in the file.
      numpy: dtype of the array read; bytes as they are where an element is smaller than one.
    """

    bits: int
    numpy: np.dtype


STORED_TYPES: Mapping[str, StoredType] = {
    name: StoredType(bits, np.dtype(dtype))
    for name, bits, dtype in (
        ("F4", 4, np.uint8),  # two E2M1 codes in a byte, even element in the low nibble
        ("F6_E2M3", 6, np.uint8),
        ("F6_E3M2", 6, np.uint8),
        ("F8_E4M3", 8, ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", 8, ml_dtypes.float8_e5m2),
        ("F8_E8M0", 8, ml_dtypes.float8_e8m0fnu),
        ("F8_E4M3FNUZ", 8, ml_dtypes.float8_e4m3fnuz),
        ("F8_E5M2FNUZ", 8, ml_dtypes.float8_e5m2fnuz),
        ("BF16", 16, ml_dtypes.bfloat16),
        ("F16", 16, np.float16),
        ("F32", 32, np.float32),
        ("F64", 64, np.float64),
        ("C64", 64, np.complex64),
        ("BOOL", 8, np.bool_),
        ("U8", 8, np.uint8),
        ("I8", 8, np.int8),
        ("U16", 16, np.uint16),
        ("I16", 16, np.int16),
        ("U32", 32, np.uint32),
        ("I32", 32, np.int32),
        ("U64", 64, np.uint64),
        ("I64", 64, np.int64),
    )
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What the header says of one tensor.

    Attributes:
      name: of the tensor.
      file: its file's name in the folder.
      dtype: a key of `STORED_TYPES`.
      shape: in elements, as written.
      start: its first byte, counted from the start of the file.
      nbytes: its bytes.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def array_shape(self) -> tuple[int, ...]:
        """Shape of the array read: `shape`, or bytes where elements are smaller than one."""
        bits = STORED_TYPES[self.dtype].bits
        if bits >= 8 or not self.shape:
            return self.shape
        if self.shape[-1] * bits % 8:
            return (self.nbytes,)
        return (*self.shape[:-1], self.shape[-1] * bits // 8)

    def __str__(self) -> str:
        """Return "F8_E4M3 [256, 16]"."""
        return f"{self.dtype} {list(self.shape)}"


# What a file's header lists; None where an entry is not sound.
Header = dict[str, TensorInfo | None]


class Tensors:
    """The tensors of a checkpoint folder, read on demand; a context manager that closes its files.

    Arrays that `read` returned stay valid after `close`.
    """

    def __init__(self, paths: Mapping[str, pathlib.Path], infos: Mapping[str, TensorInfo]):
        self._infos = dict(infos)
        self._sorted = sorted(infos)
        self._files: dict[str, int] = {}
        try:
            for file, path in paths.items():
                self._files[file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.close()
            raise

    def rename(self, names: Mapping[str, str]) -> None:
        """Look tensors up by other names from now on; their `TensorInfo.name` stays the file's.

        Args:
          names: the present name of every tensor -> its new one, all of which differ.
        """
        self._infos = {names[name]: info for name, info in self._infos.items()}
        self._sorted = sorted(self._infos)

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return list(self._sorted)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def __len__(self) -> int:
        return len(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Return what the header says of the tensor `name`; KeyError if there is none."""
        return self._infos[name]

    def under(self, prefix: str) -> Iterator[str]:
        """Return the names that begin with `prefix`, sorted."""
        first = bisect.bisect_left(self._sorted, prefix)
        rest = itertools.islice(self._sorted, first, None)
        return itertools.takewhile(lambda name: name.startswith(prefix), rest)

    def runs(self, name: str, index: Index = (), *, bounded: bool = False) -> Iterator[Run]:
        """Yield where the file holds a part of the tensor; see `byte_runs.find_runs`."""
        info = self._infos[name]
        itemsize = STORED_TYPES[info.dtype].numpy.itemsize
        return find_runs(info.array_shape, itemsize, index, bounded=bounded)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Return ``tensor[index]``, an array of its own; no other part of the tensor is kept.

        Nothing is mapped: a mapped page of a file that shrinks ends the process by SIGBUS.

        Args:
          name: of the tensor.
          index: numbers of 0 and more, and slices of positive step, for the first axes.

        Raises:
          CheckpointError: the file has become shorter than its header said.
        """
        info = self._infos[name]
        shape = index_shape(info.array_shape, index)
        array = aligned_empty(shape, STORED_TYPES[info.dtype].numpy)
        for run in self.runs(name, index):
            if run.contiguous and run.nbytes == array.nbytes:
                self.read_into(name, array, run.start)
            else:
                array[run.at] = self.read_run(name, run)
        return array

    def read_run(self, name: str, run: Run) -> np.ndarray:
        """Return the elements of one of the tensor's runs; errors are those of `read`."""
        raw = aligned_empty((run.nbytes,), np.dtype(np.uint8))
        self._read_bytes(name, raw.data, run.start)
        return run.pick(raw, STORED_TYPES[self._infos[name].dtype].numpy)

    def read_into(self, name: str, out: np.ndarray, start: int = 0) -> None:
        """Copy the tensor's bytes from `start` on into `out`, C-contiguous and of the same dtype.

        Raises:
          ValueError: `out` does not fit.
          CheckpointError: the file has become shorter than its header said.
        """
        info = self._infos[name]
        if not out.flags.c_contiguous or start < 0 or start + out.nbytes > info.nbytes:
            raise ValueError(
                f"out: expected up to {info.nbytes - start} contiguous bytes for {name}, "
                f"got {out.nbytes}"
            )
        self._read_bytes(name, out.reshape(-1).view(np.uint8).data, start)

    def _read_bytes(self, name, view, start):
        """Fill `view` from byte `start` of a tensor on."""
        info = self._infos[name]
        done = 0
        while done < len(view):
            part = view[done : done + _ONE_READ]
            count = os.preadv(self._files[info.file], [part], info.start + start + done)
            if not count:
                raise CheckpointError([f"{quoted(info.file)} shrank while it was read"])
            done += count

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def __enter__(self) -> "Tensors":
        return self

    def __exit__(self, *error) -> None:
        self.close()


def open_tensors(folder: str | pathlib.Path) -> Tensors:
    """Open the safetensors files of a checkpoint folder and check all their headers.

    Args:
      folder: holds ``model.safetensors.index.json`` and the files that it names, or
        ``model.safetensors``.

    Raises:
      CheckpointError: lists all that is wrong with the index and every file.
    """
    folder = pathlib.Path(folder)
    problems: list[str] = []
    listed = _read_index(folder, problems) if exists(folder, INDEX) else None
    files = sorted(set(listed.values())) if listed is not None else [SINGLE_FILE]
    paths: dict[str, pathlib.Path] = {}
    headers: dict[str, Header] = {}
    for file in files:
        try:
            paths[file] = locate(folder, file)
        except CheckpointError as error:
            problems += error.problems
            continue
        header = read_header(paths[file], file, problems)
        if header is not None:
            headers[file] = header
    infos = _merge(headers, problems)
    for name, file in (listed or {}).items():
        if file in headers and name not in headers[file]:
            problems.append(f"{quoted(INDEX)}: {quoted(name)} is not in {quoted(file)}")
    if problems:
        raise CheckpointError(problems, str(folder))
    return Tensors(paths, infos)


def _merge(headers, problems) -> dict[str, TensorInfo]:
    """Return the sound entries of all files; a name in two of them is a problem."""
    infos: dict[str, TensorInfo] = {}
    for file, header in headers.items():
        for name, info in header.items():
            if name in infos:
                problems.append(
                    f"{quoted(name)} is in {quoted(infos[name].file)} and {quoted(file)}"
                )
            elif info is not None:
                infos[name] = info
    return infos


def read_header(path: pathlib.Path, file: str, problems: list[str]) -> Header | None:
    """Read and check the header of one file.

    Args:
      path: of the file.
      file: its name, for messages.
      problems: takes what is wrong.

    Returns:
      Name -> info, None for an entry that is not sound; None where there is no readable header.
      The bytes of each tensor lie in the file, and where no problem was added they cover it
      without overlap.
    """
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            header, start = _parse_header(stream, size)
    except (OSError, ValueError) as error:
        problems.append(f"{quoted(file)}: {error}")
        return None
    _check_metadata(header.pop(_METADATA, {}), file, problems)
    infos: Header = {}
    for name, entry in header.items():
        try:
            infos[name] = _parse_entry(name, entry, file, start, size)
        except ValueError as error:
            infos[name] = None
            problems.append(f"{quoted(file)}: {quoted(name)}: {error}")
    if None not in infos.values():  # else holes are only what the bad entries left
        _check_cover(infos, file, start, size, problems)
    return infos


def _parse_header(stream, size):
    raw = stream.read(_LENGTH_BYTES)
    if len(raw) < _LENGTH_BYTES:
        raise ValueError(f"truncated: {size} bytes, shorter than the length of a header")
    length = int.from_bytes(raw, "little")
    if length > JSON_BYTES:
        raise ValueError(f"header of {length} bytes, at most {JSON_BYTES} are allowed")
    if length > size - _LENGTH_BYTES:
        raise ValueError(f"truncated: header of {length} bytes in a file of {size} bytes")
    return parse_object(stream.read(length)), _LENGTH_BYTES + length


def _check_metadata(metadata, file, problems):
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        problems.append(f"{quoted(file)}: {_METADATA}: expected an object of strings")


def _parse_entry(name, entry, file, start, size):
    """Return the `TensorInfo` of one entry of a header; ValueError says what is wrong."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        keys = quoted(sorted(entry)) if isinstance(entry, dict) else type(entry).__name__
        raise ValueError(f"expected an object of dtype, shape and data_offsets, got {keys}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in STORED_TYPES:
        raise ValueError(f"unknown dtype {quoted(dtype)}; known: {', '.join(STORED_TYPES)}")
    if not _are_sizes(shape) or len(shape) > _MOST_AXES:
        raise ValueError(f"shape: expected up to {_MOST_AXES} sizes, got {quoted(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets: expected [begin, end], got {quoted(offsets)}")
    begin, end = offsets
    if start + end > size:
        raise ValueError(f"truncated: ends at byte {start + end} of a file of {size} bytes")
    bits = math.prod(shape) * STORED_TYPES[dtype].bits
    if bits != 8 * (end - begin):
        raise ValueError(f"{dtype} {quoted(shape)} does not fill {end - begin} bytes")
    return TensorInfo(name, file, dtype, tuple(shape), start + begin, end - begin)


def _are_sizes(value):
    # type() and not isinstance: True is an int
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _check_cover(infos, file, start, size, problems):
    """Add a problem where tensors overlap, leave a hole, or leave bytes at the end."""
    end, before = start, "the header"
    for info in sorted(infos.values(), key=lambda info: (info.start, info.nbytes)):
        if info.start != end:
            relation = "overlaps" if info.start < end else "leaves a hole after"
            problems.append(f"{quoted(file)}: {quoted(info.name)} {relation} {before}")
        end, before = max(end, info.start + info.nbytes), quoted(info.name)
    if end < size:
        problems.append(f"{quoted(file)}: {size - end} bytes after the last tensor")


def _read_index(folder, problems):
    """Return name -> file of the index; what is wrong goes to `problems`."""
    try:
        weight_map = read_json(folder, INDEX).get("weight_map")
    except CheckpointError as error:
        problems += error.problems
        return {}
    if not isinstance(weight_map, dict):
        problems.append(
            f"{quoted(INDEX)}: weight_map: expected an object, got {quoted(weight_map)}"
        )
        return {}
    listed = {}
    for name, file in weight_map.items():
        if isinstance(file, str) and file:
            listed[name] = file
        else:
            problems.append(f"{quoted(INDEX)}: {quoted(name)}: expected a file, got {quoted(file)}")
    return listed
