"""Read safetensors files. All headers are checked first, and tensors are read on demand.

A file has three parts:

* 8 bytes, the length of the header as a little-endian integer,
* the header, a JSON object that maps each name to its dtype, shape and offsets,
* the tensors, row-major and little-endian, with no holes between them.

A folder holds either one such file, or several and an index that tells which file holds which
tensor.

Source: https://github.com/huggingface/safetensors, README and ``safetensors/src/tensor.rs``.
"""

import bisect
import dataclasses
import errno
import itertools
import math
import operator
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jax_nvfp4_moe.checkpoint import mistral_format
from jax_nvfp4_moe.checkpoint.errors import CheckpointError, Problems, quoted
from jax_nvfp4_moe.checkpoint.folder import (
    JSON_BYTES,
    exists,
    locate,
    parse_object,
    read_json,
)
from jax_nvfp4_moe.checkpoint.reading.byte_runs import Index, Run, find_runs, index_shape
from jax_nvfp4_moe.checkpoint.reading.memory import aligned_empty

INDEX, SINGLE_FILE = mistral_format.OTHER_FILES
# A file of drafting layers, which the index of GLM-4.7 does not name.
DRAFTS_FILE = "mtp.safetensors"
_METADATA = "__metadata__"
_KEYS = frozenset({"dtype", "shape", "data_offsets"})  # of an entry of a header
_LENGTH_BYTES = 8
_MOST_AXES = 32  # bounds the cost of multiplying the sizes of a hostile shape; no model has more
# Far above what models have: Kimi-K2 has 276,480 tensors, in 61 files. Without limits, a hostile
# folder of a few megabytes would keep the loader busy for minutes.
_MOST_FILES = 2000
_MOST_TENSORS_IN_A_FILE = 300_000
_ONE_READ = 1 << 30  # bytes; one read on Linux returns at most 2 GiB - 4096 bytes


@dataclasses.dataclass(frozen=True)
class StoredType:
    """A dtype of the file format.

    Attributes:
      bits: the bits of one element in the file.
      numpy: the dtype of the array that is read. Elements smaller than a byte are read as raw
        bytes.
    """

    bits: int
    numpy: np.dtype


STORED_TYPES: Mapping[str, StoredType] = {
    name: StoredType(bits, np.dtype(dtype))
    for name, bits, dtype in (
        ("F4", 4, np.uint8),  # two E2M1 codes in a byte; the low nibble holds the even element
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


class TensorInfo(NamedTuple):
    """What the header says about one tensor.

    Attributes:
      name: the name of the tensor in the file.
      file: the name of its file in the folder.
      dtype: a key of `STORED_TYPES`.
      shape: the shape in elements, as written in the header.
      start: the offset of its first byte from the start of the file.
      nbytes: the number of its bytes.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of the array that is read.

        It equals `shape`, unless elements are smaller than a byte. Then the last axis counts bytes,
        or the array is flat if a row does not end at a whole byte.
        """
        bits = STORED_TYPES[self.dtype].bits
        if bits >= 8 or not self.shape:
            return self.shape
        if self.shape[-1] * bits % 8:
            return (self.nbytes,)
        return (*self.shape[:-1], self.shape[-1] * bits // 8)

    def __str__(self) -> str:
        """Return the dtype and the shape, such as "F8_E4M3 [256, 16]"."""
        return f"{self.dtype} {list(self.shape)}"


# The tensors that a file's header lists, by name. An entry that is not valid is None.
Header = dict[str, TensorInfo | None]


class Tensors:
    """The tensors of a checkpoint folder, which are read on demand.

    As a context manager, it closes its files at the end of the block. Arrays that `read` returned
    stay valid after that.
    """

    def __init__(self, paths: Mapping[str, pathlib.Path], infos: Mapping[str, TensorInfo]):
        self._infos = dict(infos)
        self._sorted = sorted(infos)
        self._files: dict[str, int] = {}
        try:
            for file, path in paths.items():
                self._files[file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.close()
            if error.errno != errno.EMFILE:
                raise
            raise OSError(
                errno.EMFILE,
                f"the checkpoint has {len(paths)} files, and this process may not open so many at "
                "once. Raise its limit, for example with `ulimit -n 4096`",
            ) from None

    def rename(self, names: Mapping[str, str]) -> None:
        """Give the tensors other names, by which all methods find them from now on.

        `TensorInfo.name` keeps the name of the file.

        Args:
          names: the present name of every tensor -> its new name. The new names must be distinct.
        """
        if any(map(operator.ne, names.keys(), names.values())):
            self._infos = {names[name]: info for name, info in self._infos.items()}
            self._sorted = sorted(self._infos)

    def reform(self, changes: Mapping[str, Sequence[tuple[str, TensorInfo]]]) -> None:
        """Replace tensors by others that lie in the same bytes.

        Args:
          changes: the name of a tensor -> name and header of each tensor that takes its place.
        """
        for name in changes:
            del self._infos[name]
        for made in changes.values():
            self._infos.update(made)
        if changes:
            self._sorted = sorted(self._infos)

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return list(self._sorted)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def __len__(self) -> int:
        return len(self._infos)

    def find(self, name: str) -> TensorInfo | None:
        """Return what the header says about the tensor `name`, or None if there is none."""
        return self._infos.get(name)

    def info(self, name: str) -> TensorInfo:
        """Return what the header says about the tensor `name`.

        Raises:
          KeyError: there is no such tensor.
        """
        return self._infos[name]

    def under(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with `prefix`, sorted."""
        first = bisect.bisect_left(self._sorted, prefix)
        # Cut to the length of the prefix, the sorted names stay sorted.
        end = bisect.bisect_right(self._sorted, prefix, first, key=lambda n: n[: len(prefix)])
        return iter(self._sorted[first:end])

    def runs(self, name: str, index: Index = (), *, bounded: bool = False) -> Iterator[Run]:
        """Yield the runs that hold ``tensor[index]``; see `byte_runs.find_runs`."""
        info = self._infos[name]
        itemsize = STORED_TYPES[info.dtype].numpy.itemsize
        return find_runs(info.array_shape, itemsize, index, bounded=bounded)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Return ``tensor[index]`` as an array with its own memory.

        The file is not memory-mapped: if a mapped file shrinks, reading it ends the process with
        SIGBUS.

        Args:
          name: the name of the tensor.
          index: nonnegative integers, and slices with a positive step, for the first axes.

        Raises:
          CheckpointError: the file has become shorter since its header was read.
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
        """Return the elements of one run of the tensor; raises the errors of `read`."""
        raw = aligned_empty((run.nbytes,), np.dtype(np.uint8))
        self.read_bytes(name, raw.data, run.start)
        return run.pick(raw, STORED_TYPES[self._infos[name].dtype].numpy)

    def read_into(self, name: str, out: np.ndarray, start: int = 0) -> None:
        """Read bytes of the tensor into an array.

        Args:
          name: the name of the tensor.
          out: a C-contiguous array with the dtype of the tensor. It is filled.
          start: the offset of the first byte, from the first byte of the tensor.

        Raises:
          ValueError: the tensor has fewer bytes than `out`, or `out` is not contiguous.
          CheckpointError: the file has become shorter since its header was read.
        """
        info = self._infos[name]
        if not out.flags.c_contiguous or start < 0 or start + out.nbytes > info.nbytes:
            raise ValueError(
                f"out: expected a C-contiguous array of at most {info.nbytes - start} bytes for "
                f"{name}, got {out.nbytes} bytes"
            )
        self.read_bytes(name, out.reshape(-1).view(np.uint8).data, start)

    def read_bytes(self, name: str, view: memoryview, start: int) -> None:
        """Read bytes of the tensor into a view, which must not be longer than the tensor.

        Args:
          name: the name of the tensor.
          view: single bytes. It is filled.
          start: the offset of the first byte, from the first byte of the tensor.

        Raises:
          CheckpointError: the file has become shorter since its header was read.
        """
        info = self._infos[name]
        done = 0
        while done < len(view):
            part = view[done : done + _ONE_READ]
            count = os.preadv(self._files[info.file], [part], info.start + start + done)
            if not count:
                raise CheckpointError(f"{quoted(info.file)} shrank while it was read")
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
    """Open the safetensors files of a checkpoint folder, and check all their headers.

    Args:
      folder: contains ``model.safetensors.index.json`` and the files that it names, or
        ``model.safetensors`` alone. In Mistral's own format, these names begin with
        "consolidated", and tensors get the names that transformers gives them. Tensors that are
        only in ``mtp.safetensors`` are found too, if that file exists.

    Raises:
      CheckpointError: lists everything that is wrong with the index and the headers.
    """
    folder = pathlib.Path(folder)
    problems = Problems()
    of_mistral = mistral_format.is_mistral_format(folder)
    index, single = mistral_format.FILES if of_mistral else (INDEX, SINGLE_FILE)
    listed = _read_index(folder, index, problems) if exists(folder, index) else None
    files = sorted(set(listed.values())) if listed is not None else [single]
    if len(files) > _MOST_FILES:
        problem = f"{quoted(index)}: names {len(files)} files; expected at most {_MOST_FILES}"
        raise CheckpointError([*problems, problem], str(folder))
    paths: dict[str, pathlib.Path] = {}
    headers: dict[str, Header] = {}
    for file in files:
        with problems.collected():
            paths[file] = locate(folder, file)
            header = read_header(paths[file], file, problems)
            if header is not None:
                headers[file] = header
    if DRAFTS_FILE not in paths and exists(folder, DRAFTS_FILE):
        with problems.collected():
            paths[DRAFTS_FILE] = locate(folder, DRAFTS_FILE)
            header = read_header(paths[DRAFTS_FILE], DRAFTS_FILE, problems) or {}
            known = {name for one in headers.values() for name in one}
            headers[DRAFTS_FILE] = {n: info for n, info in header.items() if n not in known}
    infos = _merge(headers, problems)
    for name, file in (listed or {}).items():
        if file in headers and name not in headers[file]:
            problems.append(f"{quoted(index)}: {quoted(name)} is not in {quoted(file)}")
    if of_mistral:
        names = mistral_format.to_names(infos, problems)
        # What is written from these tensors has the names of transformers, too.
        infos = {new: infos[name]._replace(name=new) for name, new in names.items()}
    problems.finish(str(folder))
    return Tensors(paths, infos)


def _merge(headers, problems) -> dict[str, TensorInfo]:
    """Return the valid entries of all files; a name that two files contain is a problem."""
    infos: dict[str, TensorInfo] = {}
    for file, header in headers.items():
        for name, info in header.items():
            if name in infos:
                problems.append(
                    f"{quoted(name)} is stored twice, in {quoted(infos[name].file)} and "
                    f"{quoted(file)}"
                )
            elif info is not None:
                infos[name] = info
    return infos


def read_header(path: pathlib.Path, file: str, problems: list[str]) -> Header | None:
    """Read and check the header of one file.

    If the header adds no problem, the tensors cover the rest of the file without holes or overlap.

    Args:
      path: the path of the file.
      file: the name of the file, for messages.
      problems: receives a sentence for everything that is wrong.

    Returns:
      Name -> info. An entry that is not valid is None. The bytes of every other entry lie inside
      the file. The whole result is None if there is no readable header.
    """
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            header, start = _parse_header(stream, size)
    except (OSError, ValueError) as error:
        problems.append(f"{quoted(file)}: {error}")
        return None
    _check_metadata(header.pop(_METADATA, {}), file, problems)
    valid = _parse_valid(header, file, start, size)
    if valid is not None:
        return valid
    infos: Header = {}  # something is wrong: find the entries, and say what is wrong with each
    for name, entry in header.items():
        try:
            infos[name] = _parse_entry(name, entry, file, start, size)
        except ValueError as error:
            infos[name] = None
            problems.append(f"{quoted(file)}: {quoted(name)}: {error}")
    if None not in infos.values():  # an entry that is not valid would show up as a hole, too
        _check_cover(infos, file, start, size, problems)
    return infos


def _parse_header(stream, size):
    """Return the JSON object of a header, and the offset of the first byte behind it."""
    raw = stream.read(_LENGTH_BYTES)
    if len(raw) < _LENGTH_BYTES:
        raise ValueError(
            f"truncated: {size} bytes; expected at least {_LENGTH_BYTES}, which hold the length of "
            "the header"
        )
    length = int.from_bytes(raw, "little")
    if length > JSON_BYTES:
        raise ValueError(f"the header has {length} bytes; expected at most {JSON_BYTES}")
    if length > size - _LENGTH_BYTES:
        raise ValueError(f"truncated: header of {length} bytes in a file of {size} bytes")
    raw = stream.read(length)
    count = raw.count(b'"data_offsets"')
    if count > _MOST_TENSORS_IN_A_FILE:
        raise ValueError(
            f"the header lists {count} tensors; expected at most {_MOST_TENSORS_IN_A_FILE} in a "
            "file"
        )
    return parse_object(raw), _LENGTH_BYTES + length


def _check_metadata(metadata, file, problems):
    """Add a problem if the metadata of a header are not strings."""
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        problems.append(f"{quoted(file)}: {_METADATA}: expected an object of strings")


def _parse_valid(header: dict[str, Any], file: str, start: int, size: int) -> Header | None:
    """Return the entries of a header, or None if anything is wrong with them.

    All entries are checked at once, for everything that `_parse_entry` and `_check_cover` check. A
    file has up to 100,000 tensors, and checking one after the other takes three times as long.

    Args:
      header: the entries by name.
      file: the name of the file.
      start: the offset of the first byte behind the header.
      size: the bytes of the file.
    """
    columns = _split_entries(header)
    if columns is None:
        return None
    dtypes, shapes, offsets = columns
    forms = list(zip(dtypes, map(tuple, shapes), strict=True))
    bits = {}
    for dtype, shape in set(forms):  # the experts of a model share a few forms
        if not _are_sizes(list(shape)) or len(shape) > _MOST_AXES:
            return None
        bits[dtype, shape] = math.prod(shape) * STORED_TYPES[dtype].bits
    if [8 * (end - begin) for begin, end in offsets] != [bits[form] for form in forms]:
        return None
    # In order, each tensor begins where the one before it ends, and the last one ends the file.
    spans = sorted(offsets)
    if [0, *(end for _, end in spans)] != [*(begin for begin, _ in spans), size - start]:
        return None
    return {
        name: TensorInfo(name, file, dtype, shape, start + begin, end - begin)
        for name, (dtype, shape), (begin, end) in zip(header, forms, offsets, strict=True)
    }


def _split_entries(header):
    """Return the dtypes, shapes and offsets of a header's entries; None if one has a wrong type."""
    entries = header.values()
    if not all(type(entry) is dict and entry.keys() == _KEYS for entry in entries):
        return None
    dtypes = [entry["dtype"] for entry in entries]
    shapes = [entry["shape"] for entry in entries]
    offsets = [entry["data_offsets"] for entry in entries]
    # `int` is not `bool` here, though True equals 1 in later comparisons.
    numbers = itertools.chain.from_iterable(itertools.chain(shapes, offsets))
    for kind, values in ((str, dtypes), (list, [*shapes, *offsets]), (int, numbers)):
        if set(map(type, values)) - {kind}:
            return None
    if set(dtypes) - STORED_TYPES.keys() or set(map(len, offsets)) - {2}:
        return None
    return dtypes, shapes, offsets


def _parse_entry(name, entry, file, start, size):
    """Return the `TensorInfo` of one entry of a header.

    Raises:
      ValueError: the entry is not valid; the message says why.
    """
    if not isinstance(entry, dict) or set(entry) != _KEYS:
        keys = quoted(sorted(entry)) if isinstance(entry, dict) else type(entry).__name__
        raise ValueError(f"expected an object with dtype, shape and data_offsets, got {keys}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in STORED_TYPES:
        raise ValueError(f"unknown dtype {quoted(dtype)}; known: {', '.join(STORED_TYPES)}")
    if not _are_sizes(shape) or len(shape) > _MOST_AXES:
        raise ValueError(f"shape: expected at most {_MOST_AXES} sizes, got {quoted(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets: expected [begin, end], got {quoted(offsets)}")
    begin, end = offsets
    if start + end > size:
        raise ValueError(
            f"truncated: the tensor ends at byte {start + end}, but the file has {size} bytes"
        )
    bits = math.prod(shape) * STORED_TYPES[dtype].bits
    if bits != 8 * (end - begin):
        raise ValueError(f"{dtype} {quoted(shape)} does not fill {end - begin} bytes")
    return TensorInfo(name, file, dtype, tuple(shape), start + begin, end - begin)


def _are_sizes(value):
    # `isinstance` would accept True and False, which are integers in Python.
    """Return whether a value from a header is a list of nonnegative 64-bit integers."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _check_cover(infos, file, start, size, problems):
    """Add a problem for each overlap, for each hole, and for bytes after the last tensor."""
    end, before = start, "the header"
    for info in sorted(infos.values(), key=lambda info: (info.start, info.nbytes)):
        if info.start != end:
            relation = "overlaps" if info.start < end else "leaves a hole after"
            problems.append(f"{quoted(file)}: {quoted(info.name)} {relation} {before}")
        end, before = max(end, info.start + info.nbytes), quoted(info.name)
    if end < size:
        problems.append(
            f"{quoted(file)}: expected the file to end with its last tensor, got {size - end} more "
            "bytes"
        )


def _read_index(folder, index, problems):
    """Return the index as name -> file, and add everything that is wrong with it to `problems`."""
    try:
        weight_map = read_json(folder, index).get("weight_map")
    except CheckpointError as error:
        problems += error.problems
        return {}
    if not isinstance(weight_map, dict):
        problems.append(
            f"{quoted(index)}: weight_map: expected an object, got {quoted(weight_map)}"
        )
        return {}
    listed = {}
    for name, file in weight_map.items():
        if isinstance(file, str) and file:
            listed[name] = file
        else:
            problems.append(
                f"{quoted(index)}: {quoted(name)}: expected a file's name, got {quoted(file)}"
            )
    return listed
