"""Post-training quantization: an unquantized checkpoint becomes one in NVFP4.

First, where activations are to be rounded, a text runs through the model layer by layer and gives
the largest input of each product (`calibration`). Then every tensor of the source becomes one or
some of the destination, one at a time: memory holds a layer in the first part, and two tensors in
the second.
"""

import contextlib
import functools
import importlib.metadata
import logging
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_nvfp4_moe.checkpoint import compressed_tensors, modelopt
from jax_nvfp4_moe.checkpoint.compressed_tensors import COMPRESSED_TENSORS
from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.checkpoint.export import SHARD_BYTES, LazyTensor, Writable, write_folder
from jax_nvfp4_moe.checkpoint.folder import CONFIG, expand_home, locate
from jax_nvfp4_moe.checkpoint.formats import CheckpointFormat
from jax_nvfp4_moe.checkpoint.modelopt import MODELOPT, QUANT_FILE
from jax_nvfp4_moe.checkpoint.opening import Checkpoint, open_checkpoint
from jax_nvfp4_moe.checkpoint.progress import log_layers
from jax_nvfp4_moe.checkpoint.progress import progress as draw_progress
from jax_nvfp4_moe.checkpoint.safetensors import INDEX, Tensors
from jax_nvfp4_moe.checkpoint.writing import copy_file, is_free, staged_folder
from jax_nvfp4_moe.inference.evaluation import split_windows
from jax_nvfp4_moe.models.loading import find_dtype, plan_unquantized, read_model_config
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK, SCALE_RANGE
from jax_nvfp4_moe.numerics.rounding import find_algorithm, quantize_weight
from jax_nvfp4_moe.quantization.calibration import Calibration, Inputs, calibrate
from jax_nvfp4_moe.quantization.selection import MODULES, Matrix, Modules, Plan, plan_matrices
from jax_nvfp4_moe.scheme import Scheme

log = logging.getLogger("jax_nvfp4_moe")

FORMATS: Mapping[str, CheckpointFormat] = {
    "modelopt": MODELOPT,
    "compressed-tensors": COMPRESSED_TENSORS,
}
SCHEMES = (Scheme.W4A16, Scheme.W4A4)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_F32 = np.dtype(np.float32)
_FIELDS = "0.19.0"  # the version of compressed-tensors whose fields are written
# Files beside the weights that go with a model: its tokenizer, templates, other configs, licences.
_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
_LICENCES = ("LICENSE", "LICENCE", "NOTICE")


def quantize_model(
    source: str | pathlib.Path,
    destination: str | pathlib.Path,
    *,
    token_ids: Any = None,
    scheme: Scheme | str | None = None,
    format: str = "modelopt",
    modules: Modules = "all",
    exclude: Sequence[str] = (),
    algorithm: str = "max",
    window: int = 512,
    dtype: Any = None,
    shard_bytes: int = SHARD_BYTES,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Quantize an unquantized checkpoint of a supported architecture to NVFP4.

    A global scale is ``amax / 2688`` of a matrix, of all those that runtimes multiply at once (gate
    and up of an expert; q, k, v); an input scale is ``amax / 2688`` of what enters while the text
    runs. Routers, embeddings, norms, convolutions and the head stay as they are.

    Args:
      source: folder with ``config.json`` and float32, float16 or bfloat16 safetensors.
      destination: folder to write; new or empty.
      token_ids: integers ``[n]`` of the calibration text; windows of it run each on its own, a rest
        shorter than a window is left out.
      scheme: "w4a4", which needs `token_ids`, or "w4a16"; None takes w4a4 where there are
        `token_ids`.
      format: "modelopt" or "compressed-tensors".
      modules: "all" linears and experts, or "experts" alone.
      exclude: modules to leave alone, by name or with wildcards; what is inside them too.
      algorithm: a key of `rounding.ALGORITHMS`: how weights are rounded.
      window: tokens in a window.
      dtype: of float tensors that are not quantized; as they are where None.
      shard_bytes: of one file, at most, unless one tensor is larger.
      progress: whether to draw bars on standard error; None draws them on a terminal, and logs a
        line for each layer elsewhere.

    Returns:
      ``quantized_matrices``, ``scheme``, ``format``, ``source_bytes``, ``bytes``, ``tokens``, and
      ``experts_without_tokens``: the experts' module -> indices.

    Raises:
      ValueError: an argument is wrong, or `destination` is not empty.
      CheckpointError: lists all that is wrong with the source, or a weight is not finite.
      OSError: the disk is full or a file cannot be written; names the file and its device. After
        any error `destination` is as it was, so the same call can run again.
    """
    chosen = _check_arguments(scheme, format, modules, algorithm, token_ids)
    _check_lists(exclude, shard_bytes)
    kept_dtype = None if dtype is None else np.dtype(find_dtype(dtype))
    destination = expand_home(destination)
    _check_destination(destination)
    with open_checkpoint(source) as checkpoint:
        if checkpoint.quant.rules:
            raise CheckpointError(
                [f"is quantized already ({checkpoint.quant.rules[0].source}); expected BF16 or so"],
                str(source),
            )
        load = plan_unquantized(checkpoint)
        plan = plan_matrices(checkpoint, load.table.requests, modules, exclude)
        weighs = find_algorithm(algorithm).needs_importance
        windows, seen = np.zeros((0, 0), np.int32), None
        if chosen is Scheme.W4A4 or weighs:
            windows = split_windows(read_model_config(checkpoint), token_ids, window)
            seen = calibrate(load, windows, squares=weighs, progress=progress)
        unseen = _report_unseen(plan, seen)
        writer = _Writer(checkpoint.tensors, plan, seen, FORMATS[format], chosen, algorithm)
        tensors = writer.quantized() | writer.kept(kept_dtype)
        total = sum(tensor.nbytes for tensor in tensors.values())
        config, quant_file = _configs(checkpoint, plan, chosen, format, kept_dtype)
        writer.note = log_layers(progress, "quantizing")
        with (
            staged_folder(destination, last=CONFIG) as stage,
            draw_progress(progress, total, "quantizing") as writer.advance,
        ):
            _copy_beside(checkpoint, stage)
            write_folder(stage, tensors, config, quant_file=quant_file, shard_bytes=shard_bytes)
        source_bytes = sum(
            checkpoint.tensors.info(name).nbytes for name in checkpoint.tensors.names()
        )
    return {
        "quantized_matrices": len(plan.matrices),
        "scheme": str(chosen),
        "format": format,
        "source_bytes": source_bytes,
        "bytes": total,
        "tokens": windows.size,
        "experts_without_tokens": unseen,
    }


class _Writer:
    """Makes the tensors of a destination when their turn comes.

    Attributes:
      note: is told the name of each tensor that is about to be made.
      advance: is told the bytes of each tensor made.
    """

    def __init__(
        self,
        tensors: Tensors,
        plan: Plan,
        seen: Calibration | None,
        format: CheckpointFormat,
        scheme: Scheme,
        algorithm: str,
    ):
        self.note: Callable[[str], None] = lambda name: None
        self.advance: Callable[[int], None] = lambda nbytes: None
        self._tensors, self._plan, self._seen = tensors, plan, seen
        self._format, self._scheme, self._algorithm = format, scheme, algorithm
        self._groups: dict[str, list[Matrix]] = {}
        for matrix in plan.matrices:
            self._groups.setdefault(matrix.group, []).append(matrix)
        self._scales: dict[str, np.float32] = {}
        self._last: tuple[Matrix | None, tuple[np.ndarray, ...]] = None, ()

    def quantized(self) -> dict[str, Writable]:
        """Return the tensors that the plan's matrices become, in the order of the source."""
        made: dict[str, Writable] = {}
        for matrix in sorted(self._plan.matrices, key=self._position):
            for part, shape, dtype, make in self._parts(matrix):
                name = f"{matrix.module}.{part}"
                made[name] = self._lazy(name, shape, dtype, functools.partial(make, matrix))
        return made

    def _parts(self, matrix: Matrix):
        """Return name, shape, dtype and maker of each tensor that a matrix becomes."""
        names, (n, k) = self._format.names, matrix.shape
        codes, scale = self._codes, self._stored_scale
        shape = (1,) if names.divides else ()
        yield names.packed, (n, k // 2), np.dtype(np.uint8), functools.partial(codes, part=0)
        yield names.block_scale, (n, k // BLOCK), _E4M3, functools.partial(codes, part=1)
        of_weight = functools.partial(scale, scale=self._global_scale)
        yield names.weight_global, shape, _F32, of_weight
        if self._scheme is Scheme.W4A4:
            yield names.input_global, shape, _F32, functools.partial(scale, scale=self._input_scale)

    def kept(self, dtype: np.dtype | None) -> dict[str, Writable]:
        """Return the tensors that stay as they are, floats in `dtype` where it is not None."""
        made: dict[str, Writable] = {}
        for name, part in self._plan.kept.items():
            target = part.dtype(self._tensors)
            # A correction bias moves the choice of experts: tools keep it in float32.
            if dtype is not None and _is_float(target) and "correction_bias" not in name:
                target = dtype
            read = functools.partial(_read_as, part, self._tensors, target)
            made[name] = self._lazy(name, part.shape(self._tensors), target, read)
        return made

    def _lazy(self, name, shape, dtype, make) -> LazyTensor:
        def make_and_count():
            self.note(name)
            made = make()
            self.advance(made.nbytes)
            return made

        return LazyTensor(tuple(shape), dtype, make_and_count)

    def _position(self, matrix):
        info = self._tensors.info(matrix.source.tensor)
        return info.file, info.start, matrix.expert or 0, matrix.module

    def _codes(self, matrix: Matrix, part: int) -> np.ndarray:
        """Return codes (0) or block scales (1); they are asked for one behind the other."""
        if self._last[0] is not matrix:
            *found, _ = quantize_weight(
                matrix.source.read(self._tensors),
                self._global_scale(matrix),
                algorithm=self._algorithm,
                importance=self._importance(matrix),
            )
            self._last = matrix, tuple(map(np.asarray, found))
        return self._last[1][part]

    def _stored_scale(self, matrix: Matrix, scale) -> np.ndarray:
        """Return a scalar as the format stores it."""
        value = scale(matrix)
        if self._format.names.divides:
            return np.array([np.float32(1) / value], np.float32)
        return np.array(value, np.float32)

    def _global_scale(self, matrix: Matrix) -> np.float32:
        """Return that of the largest magnitude of the group's matrices; 1 where they are zero."""
        if matrix.group not in self._scales:
            largest = max(
                _largest(other, other.source.read(self._tensors))
                for other in self._groups[matrix.group]
            )
            row = find_algorithm(self._algorithm)
            scale = np.float32(row.global_scale(jnp.asarray(largest)))
            self._scales[matrix.group] = scale if scale > 0 else np.float32(1)
        return self._scales[matrix.group]

    def _inputs(self, matrix: Matrix) -> Inputs:
        assert self._seen is not None
        if matrix.expert is None:
            return self._seen.linears[matrix.owner]
        return self._seen.experts[matrix.owner][matrix.product]

    def _importance(self, matrix: Matrix) -> np.ndarray | None:
        if not find_algorithm(self._algorithm).needs_importance:
            return None
        found = self._inputs(matrix).importance()
        if found is None:  # no token came by: all channels alike
            return np.ones(matrix.shape[1], np.float32)
        return found if matrix.expert is None else found[matrix.expert]

    def _input_scale(self, matrix: Matrix) -> np.float32:
        """Return ``amax / 2688`` of what enters.

        One of a layer's experts for each product as ModelOpt has it; in compressed-tensors' format
        the second product of each expert has its own, an expert without tokens the layer's largest.
        """
        amax = self._inputs(matrix).amax
        largest = np.float32(amax.max())
        if matrix.expert is not None and matrix.product and self._format.names.divides:
            largest = amax[matrix.expert] or largest
        if not np.isfinite(largest):
            raise CheckpointError([f"{matrix.owner}: its calibrated inputs are not finite"])
        return largest / np.float32(SCALE_RANGE) if largest > 0 else np.float32(1)


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16


def _read_as(part, tensors, dtype) -> np.ndarray:
    stored = part.read(tensors)
    with np.errstate(over="ignore"):
        cast = stored.astype(dtype, copy=False)
    if dtype == np.float16 and np.isinf(cast).sum() > np.isinf(stored).sum():
        raise CheckpointError([f"{part.tensor}: a value is beyond float16; take another dtype"])
    return cast


def _largest(matrix: Matrix, weight: np.ndarray) -> np.float32:
    """Return the largest magnitude.

    Magnitudes of one float dtype order as the integers of their bits, NaN and infinity on top.

    Raises:
      CheckpointError: it is not finite.
    """
    bits = weight.view(f"u{weight.dtype.itemsize}")
    half = 1 << (8 * weight.dtype.itemsize - 1)
    found = np.array((bits & bits.dtype.type(half - 1)).max()).view(weight.dtype)
    largest = np.float32(found)
    if not np.isfinite(largest):
        raise CheckpointError([f"{matrix.module}: a weight is {largest}; nothing can round that"])
    return largest


def _check_arguments(scheme, format, modules, algorithm, token_ids) -> Scheme:
    for name, value, known in (
        ("format", format, tuple(FORMATS)),
        ("modules", modules, MODULES),
        ("scheme", scheme, (*map(str, SCHEMES), None)),
    ):
        if value not in known:
            raise ValueError(
                f"{name}: expected {' or '.join(str(one) for one in known if one)}, got {value!r}"
            )
    if scheme is None:
        scheme = Scheme.W4A16 if token_ids is None else Scheme.W4A4
    scheme = Scheme(scheme)
    weighs = find_algorithm(algorithm).needs_importance
    if token_ids is None and (scheme is Scheme.W4A4 or weighs):
        raise ValueError(
            f"token_ids: expected a calibration text, which scheme {scheme} with algorithm "
            f"{algorithm} needs (`quantize --text FILE`); got None"
        )
    if token_ids is not None and scheme is Scheme.W4A16 and not weighs:
        raise ValueError(
            f"token_ids: scheme {scheme} with algorithm {algorithm} reads no text; leave it out, "
            "or take scheme w4a4 or algorithm weighted_search"
        )
    return scheme


def _check_lists(exclude, shard_bytes):
    if isinstance(exclude, str):
        raise ValueError(f"exclude: expected a sequence of names, got the string {exclude!r}")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes: expected at least 1, got {shard_bytes}")


def _check_destination(destination: pathlib.Path) -> None:
    if not is_free(destination):
        raise ValueError(f"destination: expected a new or an empty folder, got {destination}")


def _report_unseen(plan: Plan, seen: Calibration | None) -> dict[str, list[int]]:
    """Return which experts saw no token, and say so in the log."""
    unseen: dict[str, list[int]] = {}
    owners = {matrix.owner for matrix in plan.matrices if matrix.expert is not None}
    for owner, (first, _) in (seen.experts if seen else {}).items():
        absent = np.flatnonzero(first.count == 0).tolist()
        if absent and owner in owners:
            unseen[owner] = absent
            log.warning(
                "%s: %d of %d experts saw no token of the calibration text (%s) and take the "
                "layer's largest input scale; a longer text may reach them",
                owner,
                len(absent),
                len(first.count),
                ", ".join(map(str, absent)),
            )
    return unseen


def _configs(checkpoint: Checkpoint, plan: Plan, scheme: Scheme, format: str, dtype):
    """Return the contents of ``config.json`` and of ModelOpt's own file, None for no such file."""
    config = {
        key: value for key, value in checkpoint.config.items() if key != "quantization_config"
    }
    if dtype is not None:
        for holder in (config, *(part for part in config.values() if isinstance(part, dict))):
            for key in {"dtype", "torch_dtype"} & holder.keys():
                holder[key] = dtype.name
    if format == "modelopt":
        algorithm = "NVFP4" if scheme is Scheme.W4A4 else "W4A16_NVFP4"
        file, config["quantization_config"] = modelopt.declaration(
            algorithm, plan.excluded, _version()
        )
        return config, file
    rounds = scheme is Scheme.W4A4
    config["quantization_config"] = compressed_tensors.declaration(rounds, plan.dense, _FIELDS)
    return config, None


def _version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("jax-nvfp4-moe")
    return "0"


def _copy_beside(checkpoint: Checkpoint, destination: pathlib.Path) -> None:
    """Copy the files that go with the weights; none is opened but to copy it."""
    for path in _beside(checkpoint.folder):
        copy_file(locate(checkpoint.folder, path.name), destination / path.name)


def _beside(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    for path in sorted(folder.iterdir()):
        known = path.suffix in _BESIDE or path.name.startswith(_LICENCES)
        own = path.name in (CONFIG, QUANT_FILE, INDEX) or path.name.endswith(".index.json")
        if known and not own and path.is_file():
            yield path
