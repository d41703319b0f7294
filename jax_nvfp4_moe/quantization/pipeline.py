"""Post-training quantization: turn an unquantized checkpoint into an NVFP4 checkpoint.

The work has two steps:

1. If activations are quantized, a text runs through the model layer by layer, and `calibration`
   records the largest input of each product. Memory holds one layer.
2. Each tensor of the source is read, quantized or copied, and written. Memory holds two tensors.
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

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, printable
from jax_nvfp4_moe.checkpoint.export import SHARD_BYTES, LazyTensor, Writable, write_folder
from jax_nvfp4_moe.checkpoint.folder import CONFIG, expand_home, locate
from jax_nvfp4_moe.checkpoint.formats import compressed_tensors, modelopt
from jax_nvfp4_moe.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from jax_nvfp4_moe.checkpoint.formats.modelopt import MODELOPT, QUANT_FILE
from jax_nvfp4_moe.checkpoint.formats.rules import CheckpointFormat
from jax_nvfp4_moe.checkpoint.hub import TEMPLATES
from jax_nvfp4_moe.checkpoint.opening import Checkpoint, open_checkpoint
from jax_nvfp4_moe.checkpoint.progress import log_layers
from jax_nvfp4_moe.checkpoint.progress import progress as draw_progress
from jax_nvfp4_moe.checkpoint.safetensors import INDEX, Tensors
from jax_nvfp4_moe.checkpoint.writing.files import copy_file, is_free, staged_folder
from jax_nvfp4_moe.inference.evaluation import split_windows
from jax_nvfp4_moe.inference.not_finite import NotFiniteError
from jax_nvfp4_moe.models.loading import (
    UnreadModel,
    find_dtype,
    find_unquantized,
    read_model_config,
)
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK, SCALE_RANGE
from jax_nvfp4_moe.numerics.rounding import find_algorithm, quantize_weight
from jax_nvfp4_moe.quantization.calibration import Calibration, Inputs, calibrate
from jax_nvfp4_moe.quantization.selection import (
    MODULES,
    Matrix,
    Modules,
    Selection,
    select_matrices,
)
from jax_nvfp4_moe.scheme import Scheme

log = logging.getLogger("jax_nvfp4_moe")

FORMATS: Mapping[str, CheckpointFormat] = {
    "modelopt": MODELOPT,
    "compressed-tensors": COMPRESSED_TENSORS,
}
SCHEMES = (Scheme.W4A16, Scheme.W4A4)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_F32 = np.dtype(np.float32)
_FIELDS = "0.19.0"  # the version of compressed-tensors that defines the fields of its config
# The files beside the weights that are copied: tokenizer, chat template, other configs, licenses.
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

    Scales follow from amax, the largest magnitude of the values that they scale:

    * The global scale of a matrix is ``amax / 2688`` of its weights with algorithm "max", and
      ``amax / 1536`` with any other. Matrices that runtimes merge share one global scale: q, k and
      v of an attention, and gate and up of an expert.
    * With ``scheme="w4a4"``, an input scale is ``amax / 2688`` of the activations that enter the
      product. The calibration text runs through the model in float32 to find them.

    Routers, embeddings, norms, convolutions and the head are not quantized. Tokenizer files, chat
    templates and licenses are copied.

    Args:
      source: str or path, a folder with ``config.json`` and safetensors files in float32, float16
        or bfloat16. It may also be the name of a model on the Hugging Face Hub.
      destination: str or path, the folder to write. It must be empty or not exist.
      token_ids: int ``[n]``, the token ids of the calibration text. The model reads it in windows
        that do not see each other; tokens after the last full window are not used. None, the
        default, means that there is no text.
      scheme: "w4a16" to quantize weights alone, or "w4a4" to quantize activations too, which needs
        `token_ids`. None, the default, means "w4a4" if `token_ids` are given and "w4a16" if not.
      format: "modelopt", the default, or "compressed-tensors".
      modules: "all" linears and experts, the default, or "experts" alone.
      exclude: modules that are not quantized, by name or with wildcards such as "*self_attn*".
        Everything inside them is excluded too. By default no modules are added to those above.
      algorithm: how to choose the scale of each block of 16 weights: "max" (the default, which
        gives ModelOpt's bytes), "four_or_six", "search", or "weighted_search", which needs
        `token_ids`.
      window: the number of tokens in a window, 512 by default.
      dtype: bfloat16, float16 or float32, the dtype of tensors that are not quantized. None, the
        default, keeps the dtype of the source.
      shard_bytes: the most bytes in one file, 5e9 by default. A larger tensor gets a file of its
        own.
      progress: whether to draw progress bars on standard error. None, the default, draws them on a
        terminal, and logs a line for each layer if standard error is no terminal.

    Returns:
      A dict with these entries:

      * "quantized_matrices": the number of matrices that were quantized.
      * "scheme" and "format": str, those that were written.
      * "source_bytes" and "bytes": the bytes of all tensors before and after.
      * "tokens": the number of tokens that the model read.
      * "experts_without_tokens": the experts' module -> a list of the experts that no token
        reached. With "w4a4" they take the largest input scale of their layer.

    Raises:
      ValueError: an argument is wrong, `destination` is not empty, or another process is writing to
        it.
      CheckpointError: lists everything that is wrong with the source. It is also raised if the
        source is quantized already, or if a weight is not finite. It is a `NotFiniteError` if
        activations are not finite during calibration.
      OSError: a file cannot be written, for example because the disk is full. The message names the
        file and its device.

    After any error `destination` is as it was before, so that you can run the same call again.

    Example:
      The source here is the example model of this package, dequantized. Yours is the folder of a
      model in bfloat16.

      >>> import importlib.resources, pathlib, shutil, tempfile
      >>> import numpy as np
      >>> import jax_nvfp4_moe as nvfp4
      >>> from jax_nvfp4_moe.checkpoint import read_config
      >>> from jax_nvfp4_moe.checkpoint.export import write_checkpoint
      >>> from jax_nvfp4_moe.checkpoint.safetensors import open_tensors
      >>> example = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
      >>> weights = {}
      >>> with open_tensors(example) as tensors:
      ...     for name in tensors.names():
      ...         if f"{name}_scale" in tensors:
      ...             parts = [tensors.read(name + part) for part in ("", "_scale", "_scale_2")]
      ...             weights[name] = np.asarray(nvfp4.NVFP4Tensor.from_packed(*parts).dequantize())
      ...         elif not name.endswith(("_scale", "_scale_2")):
      ...             weights[name] = tensors.read(name)
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> write_checkpoint(folder / "source", weights, read_config(example))
      >>> report = nvfp4.quantize_model(folder / "source", folder / "nvfp4", progress=False)
      >>> report["scheme"], report["quantized_matrices"]
      ('w4a16', 260)
      >>> model = nvfp4.load_model(folder / "nvfp4")
      >>> shutil.rmtree(folder)

    Source: https://github.com/NVIDIA/Model-Optimizer for "max", arXiv:2512.02010 for "four_or_six".
    """
    chosen = _check_arguments(scheme, format, modules, algorithm, token_ids)
    _check_lists(exclude, shard_bytes)
    kept_dtype = None if dtype is None else np.dtype(find_dtype(dtype))
    destination = expand_home(destination)
    check_destination(destination)
    with open_checkpoint(source) as checkpoint, staged_folder(destination, last=CONFIG) as stage:
        if checkpoint.quant.rules:
            raise CheckpointError(
                f"the checkpoint is quantized already ({checkpoint.quant.rules[0].source}); "
                "expected one in float32, float16 or bfloat16",
                str(source),
            )
        load = find_unquantized(checkpoint)
        selection = select_matrices(checkpoint, load.table.requests, modules, exclude)
        weighs = find_algorithm(algorithm).needs_importance
        windows, seen = np.zeros((0, 0), np.int32), None
        if chosen is Scheme.W4A4 or weighs:
            windows = split_windows(read_model_config(checkpoint), token_ids, window)
            seen = calibrate(load, windows, squares=weighs, progress=progress)
            _check_finite(selection, seen)
        unseen = _report_unseen(selection, seen)
        writer = _Writer(checkpoint.tensors, selection, seen, FORMATS[format], chosen, algorithm)
        tensors = writer.quantized() | writer.kept(kept_dtype, _router_corrections(load))
        total = sum(tensor.nbytes for tensor in tensors.values())
        config, quant_file = _configs(checkpoint, selection, chosen, format, kept_dtype)
        writer.note = log_layers(progress, "quantizing")
        with draw_progress(progress, total, "quantizing") as writer.advance:
            copy_beside(checkpoint, stage)
            write_folder(stage, tensors, config, quant_file=quant_file, shard_bytes=shard_bytes)
        source_bytes = sum(
            checkpoint.tensors.info(name).nbytes for name in checkpoint.tensors.names()
        )
    return {
        "quantized_matrices": len(selection.matrices),
        "scheme": str(chosen),
        "format": format,
        "source_bytes": source_bytes,
        "bytes": total,
        "tokens": windows.size,
        "experts_without_tokens": unseen,
    }


class _Writer:
    """Makes the tensors of the destination, each when its turn to be written comes.

    Attributes:
      note: called with the name of each tensor before it is made.
      advance: called with the bytes of each tensor after it is made.
    """

    def __init__(
        self,
        tensors: Tensors,
        selection: Selection,
        seen: Calibration | None,
        format: CheckpointFormat,
        scheme: Scheme,
        algorithm: str,
    ):
        self.note: Callable[[str], None] = lambda name: None
        self.advance: Callable[[int], None] = lambda nbytes: None
        self._tensors, self._selection, self._seen = tensors, selection, seen
        self._format, self._scheme, self._algorithm = format, scheme, algorithm
        self._groups: dict[str, list[Matrix]] = {}
        for matrix in selection.matrices:
            self._groups.setdefault(matrix.group, []).append(matrix)
        self._scales: dict[str, np.float32] = {}
        self._last: tuple[Matrix | None, tuple[np.ndarray, ...]] = None, ()

    def quantized(self) -> dict[str, Writable]:
        """Return the tensors that the matrices become, in the order of the source."""
        made: dict[str, Writable] = {}
        for matrix in sorted(self._selection.matrices, key=self._position):
            for part, shape, dtype, make in self._parts(matrix):
                name = f"{matrix.module}.{part}"
                made[name] = self._lazy(name, shape, dtype, functools.partial(make, matrix))
        return made

    def _parts(self, matrix: Matrix):
        """Yield the name, shape, dtype and maker of each tensor that a matrix becomes."""
        names, (n, k) = self._format.names, matrix.shape
        codes, scale = self._codes, self._stored_scale
        shape = (1,) if names.divides else ()
        yield names.packed, (n, k // 2), np.dtype(np.uint8), functools.partial(codes, part=0)
        yield names.block_scale, (n, k // BLOCK), _E4M3, functools.partial(codes, part=1)
        of_weight = functools.partial(scale, scale=self._global_scale)
        yield names.weight_global, shape, _F32, of_weight
        if self._scheme is Scheme.W4A4:
            yield names.input_global, shape, _F32, functools.partial(scale, scale=self._input_scale)

    def kept(self, dtype: np.dtype | None, unchanged: frozenset[str]) -> dict[str, Writable]:
        """Return the tensors that are copied.

        Args:
          dtype: the dtype of floats; None keeps the dtype of each.
          unchanged: the tensors that keep their dtype in any case.
        """
        made: dict[str, Writable] = {}
        for name, part in self._selection.kept.items():
            target = part.dtype(self._tensors)
            if dtype is not None and _is_float(target) and part.tensor not in unchanged:
                target = dtype
            read = functools.partial(_read_as, part, self._tensors, target)
            made[name] = self._lazy(name, part.shape(self._tensors), target, read)
        return made

    def _lazy(self, name, shape, dtype, make) -> LazyTensor:
        """Return a tensor whose making is reported to `note` and `advance`."""

        def make_and_count():
            self.note(name)
            made = make()
            self.advance(made.nbytes)
            return made

        return LazyTensor(tuple(shape), dtype, make_and_count)

    def _position(self, matrix):
        """Return the sort key that orders matrices as the source stores them."""
        info = self._tensors.info(matrix.source.tensor)
        return info.file, info.start, matrix.expert or 0, matrix.module

    def _codes(self, matrix: Matrix, part: int) -> np.ndarray:
        """Return the codes (part 0) or the block scales (part 1) of a matrix.

        The two are asked for one after the other, so that the last matrix is kept for the second
        one.
        """
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
        """Return a global scale or an input scale as the format stores it."""
        value = scale(matrix)
        if self._format.names.divides:
            return np.array([np.float32(1) / value], np.float32)
        return np.array(value, np.float32)

    def _global_scale(self, matrix: Matrix) -> np.float32:
        """Return the global scale of the matrix's group.

        It follows from the largest magnitude of all matrices in the group. It is 1 if they are all
        zero.
        """
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
        """Return the calibration statistics of what enters the matrix."""
        assert self._seen is not None
        if matrix.expert is None:
            return self._seen.linears[matrix.owner]
        return self._seen.experts[matrix.owner][matrix.product]

    def _importance(self, matrix: Matrix) -> np.ndarray | None:
        """Return the weight of each input in the algorithm's error; None if it uses none."""
        if not find_algorithm(self._algorithm).needs_importance:
            return None
        found = self._inputs(matrix).importance()
        if found is None:  # without statistics, all channels are equally important
            return np.ones(matrix.shape[1], np.float32)
        return found if matrix.expert is None else found[matrix.expert]

    def _input_scale(self, matrix: Matrix) -> np.float32:
        """Return the input scale ``amax / 2688`` of a matrix.

        As in ModelOpt, all experts of a layer share one input scale per product. The
        compressed-tensors format is the exception for the second product, where each expert has its
        own scale. An expert without tokens takes the largest of the layer there.
        """
        amax = self._inputs(matrix).amax
        largest = np.float32(amax.max())
        if matrix.expert is not None and matrix.product and self._format.names.divides:
            largest = amax[matrix.expert] or largest
        return largest / np.float32(SCALE_RANGE) if largest > 0 else np.float32(1)


def _router_corrections(load: UnreadModel) -> frozenset[str]:
    """Return the names of the tensors that correct the scores of routers.

    They decide which experts are chosen. Tools keep them in float32, because their rounding would
    change the choice.
    """
    parts = (part for part in load.parts if part.path.endswith(".token_router.correction_bias"))
    return frozenset(source.name for part in parts for source in part.sources.values())


def _check_finite(selection: Selection, seen: Calibration) -> None:
    """Check that the activations are finite that enter the matrices during calibration.

    Raises:
      NotFiniteError: some are not.
    """
    found = [
        *((name, [inputs]) for name, inputs in seen.linears.items()),
        *((name, inputs) for name, inputs in seen.experts.items()),
    ]
    wanted = {matrix.owner for matrix in selection.matrices}
    wrong = [
        name
        for name, parts in found
        if name in wanted and not all(np.isfinite(part.amax).all() for part in parts)
    ]
    if wrong:
        raise NotFiniteError(
            [
                f"the activations that enter {wrong[0]} during calibration are not finite"
                + (f", and neither are those of {len(wrong) - 1} more modules" if wrong[1:] else "")
                + "; check the weights of the source, and its config.json"
            ]
        )


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16


def _read_as(part, tensors, dtype) -> np.ndarray:
    """Read a part of the source in another dtype."""
    stored = part.read(tensors)
    with np.errstate(over="ignore"):
        cast = stored.astype(dtype, copy=False)
    if dtype == np.float16 and np.isinf(cast).sum() > np.isinf(stored).sum():
        raise CheckpointError(
            f"{part.tensor}: a value is too large for float16; pass dtype='bfloat16' or 'float32'"
        )
    return cast


def _largest(matrix: Matrix, weight: np.ndarray) -> np.float32:
    """Return the largest magnitude of a weight.

    The bits of the magnitudes, read as integers, have the same order as the magnitudes, with
    infinity and NaN at the top. A NaN is therefore found, which a maximum of floats could miss.

    Raises:
      CheckpointError: the largest magnitude is not finite.
    """
    bits = weight.view(f"u{weight.dtype.itemsize}")
    half = 1 << (8 * weight.dtype.itemsize - 1)
    found = np.array((bits & bits.dtype.type(half - 1)).max()).view(weight.dtype)
    largest = np.float32(found)
    if not np.isfinite(largest):
        raise CheckpointError(f"{matrix.module}: expected finite weights, got {largest}")
    return largest


def _check_arguments(scheme, format, modules, algorithm, token_ids) -> Scheme:
    """Check the arguments of `quantize_model`, and return the scheme."""
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
            f"token_ids: scheme {scheme} with algorithm {algorithm} needs a calibration text, got "
            "None. Pass token_ids, or --text FILE on the command line"
        )
    if token_ids is not None and scheme is Scheme.W4A16 and not weighs:
        raise ValueError(
            f"token_ids: scheme {scheme} with algorithm {algorithm} uses no calibration text; "
            "leave the text out, or choose scheme w4a4 or algorithm weighted_search"
        )
    return scheme


def _check_lists(exclude, shard_bytes):
    if isinstance(exclude, str):
        raise ValueError(
            f"exclude: expected a sequence of names, got the string {exclude!r}; pass [{exclude!r}]"
        )
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes: expected at least 1, got {shard_bytes}")


def check_destination(destination: pathlib.Path) -> None:
    """Raise ValueError if something stands at `destination`."""
    if not is_free(destination):
        raise ValueError(
            "destination: expected a folder that is empty or does not exist, got "
            f"{printable(destination)}"
        )


def _report_unseen(selection: Selection, seen: Calibration | None) -> dict[str, list[int]]:
    """Return the experts that no token of the text reached, and log them."""
    unseen: dict[str, list[int]] = {}
    owners = {matrix.owner for matrix in selection.matrices if matrix.expert is not None}
    for owner, (first, _) in (seen.experts if seen else {}).items():
        absent = np.flatnonzero(first.count == 0).tolist()
        if absent and owner in owners:
            unseen[owner] = absent
            log.warning(
                "%s: %d of %d experts received no token of the calibration text (%s). They take "
                "the layer's largest input scale; a longer text may reach them",
                owner,
                len(absent),
                len(first.count),
                ", ".join(map(str, absent)),
            )
    return unseen


def _configs(checkpoint: Checkpoint, selection: Selection, scheme: Scheme, format: str, dtype):
    """Return the contents of ``config.json`` and of ``hf_quant_config.json``.

    The second is None in compressed-tensors' format, which has no such file.
    """
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
            algorithm, selection.excluded, writer_version()
        )
        return config, file
    rounds = scheme is Scheme.W4A4
    config["quantization_config"] = compressed_tensors.declaration(rounds, selection.dense, _FIELDS)
    return config, None


def writer_version() -> str:
    """Return the version of this package, or "0" if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("jax-nvfp4-moe")
    return "0"


def copy_beside(checkpoint: Checkpoint, destination: pathlib.Path) -> None:
    """Copy the files that go with the weights, without reading what they mean."""
    for path in _beside(checkpoint.folder):
        name = path.relative_to(checkpoint.folder)
        (destination / name).parent.mkdir(exist_ok=True)
        copy_file(locate(checkpoint.folder, str(name)), destination / name)


def _beside(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the files of a checkpoint that go with the weights."""
    for path in sorted([*folder.iterdir(), *(folder / TEMPLATES).glob("*.jinja")]):
        known = path.suffix in _BESIDE or path.name.startswith(_LICENCES)
        own = path.name in (CONFIG, QUANT_FILE, INDEX) or path.name.endswith(".index.json")
        if known and not own and path.is_file():
            yield path
