"""Cast a checkpoint whose experts are MXFP4 to NVFP4 without loss: no weight changes its value."""

import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.checkpoint.export import SHARD_BYTES, LazyTensor, Writable, write_folder
from jax_nvfp4_moe.checkpoint.folder import CONFIG, expand_home
from jax_nvfp4_moe.checkpoint.formats.fp8_blocks import EXPERT_ALGORITHM, FP8_BLOCKS
from jax_nvfp4_moe.checkpoint.formats.modelopt import MIXED, MODELOPT, declaration
from jax_nvfp4_moe.checkpoint.formats.mxfp4 import MXFP4
from jax_nvfp4_moe.checkpoint.opening import Checkpoint, open_checkpoint
from jax_nvfp4_moe.checkpoint.progress import log_layers
from jax_nvfp4_moe.checkpoint.progress import progress as draw_progress
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES
from jax_nvfp4_moe.checkpoint.table import Source
from jax_nvfp4_moe.checkpoint.weights.requests import ExpertSizes
from jax_nvfp4_moe.checkpoint.writing.files import staged_folder
from jax_nvfp4_moe.models.loading import UnreadModel, find_unquantized
from jax_nvfp4_moe.numerics.tensor import MoEParams, NVFP4Tensor
from jax_nvfp4_moe.quantization.pipeline import check_destination, copy_beside, writer_version
from jax_nvfp4_moe.quantization.selection import find_excluded
from jax_nvfp4_moe.scheme import Scheme

_ALGORITHM = "W4A16_NVFP4"
_SECTION = "quantization_config"


def cast_model(
    source: str | pathlib.Path,
    destination: str | pathlib.Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Cast a checkpoint whose experts are MXFP4 to NVFP4 without loss: gpt-oss and DeepSeek-V4.

    ``code * 2^e`` becomes ``code * (2^(e - g) * 2^g)``: a block scale and a global scale. Each
    matrix has one g. Gate and up of an expert share it if it is exact for both. No weight changes
    its value, and tensors outside the experts are copied.

    `load_model` reads the source too, with the same weights. Cast it for runtimes that read NVFP4
    alone.

    Args:
      source: str or path, a folder with ``quant_method: mxfp4`` in its ``config.json``, or "fp8"
        beside experts in MXFP4, and a supported architecture. It may also be the name of a model on
        the Hugging Face Hub.
      destination: str or path, the folder to write, in ModelOpt's format. It must be empty or not
        exist. Linears in FP8 stay as they are, in the form of NVIDIA's DeepSeek-V4.
      shard_bytes: the most bytes in one file, 5e9 by default. A larger tensor gets a file of its
        own.
      progress: whether to draw a progress bar on standard error. None, the default, draws one on a
        terminal, and logs a line for each layer if standard error is no terminal.

    Returns:
      A dict with these entries:

      * "cast_matrices": the number of matrices that were cast.
      * "scheme" and "format": str, "w4a16", and "modelopt" or "fp8".
      * "source_bytes" and "bytes": the bytes of all tensors before and after.

    Raises:
      ValueError: `shard_bytes` is not positive, `destination` is not empty, or another process is
        writing to it.
      CheckpointError: lists everything that is wrong with the source. It is also raised if the
        source holds no MXFP4, or if the scales of a matrix span more than 18 powers of two.
      OSError: a file cannot be written, for example because the disk is full. The message names the
        file and its device.

    After any error `destination` is as it was before, so that you can run the same call again.

    Example:
      The source here is the example model of this package, whose experts keep their codes and take
      the scale 2^-9 of MXFP4. Yours is the folder of gpt-oss.

      >>> import importlib.resources, pathlib, tempfile
      >>> import numpy as np
      >>> import jax_nvfp4_moe as nvfp4
      >>> from jax_nvfp4_moe.checkpoint import read_config
      >>> from jax_nvfp4_moe.checkpoint.export import write_folder
      >>> from jax_nvfp4_moe.checkpoint.safetensors import open_tensors
      >>> example = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
      >>> weights = {}
      >>> with open_tensors(example) as tensors:
      ...     for name in tensors.names():
      ...         if f"{name}_scale" in tensors and ".experts." in name:
      ...             weights[name] = tensors.read(name)
      ...             rows, half = weights[name].shape
      ...             weights[f"{name}_scale"] = np.full((rows, half // 16), 127 - 9, np.uint8)
      ...         elif f"{name}_scale" in tensors:
      ...             parts = [tensors.read(name + part) for part in ("", "_scale", "_scale_2")]
      ...             weights[name] = np.asarray(nvfp4.NVFP4Tensor.from_packed(*parts).dequantize())
      ...         elif not name.endswith("_scale") and not name.endswith("_scale_2"):
      ...             weights[name] = tensors.read(name)
      >>> config = read_config(example) | {"quantization_config": {"quant_method": "mxfp4"}}
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> write_folder(folder / "source", weights, config)
      >>> report = nvfp4.cast_model(folder / "source", folder / "nvfp4", progress=False)
      >>> report["scheme"], report["cast_matrices"]
      ('w4a16', 240)
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes: expected at least 1, got {shard_bytes}")
    destination = expand_home(destination)
    check_destination(destination)
    with open_checkpoint(source) as checkpoint, staged_folder(destination, last=CONFIG) as stage:
        if checkpoint.quant.format not in (MXFP4, FP8_BLOCKS):
            raise _without_mxfp4(checkpoint)
        load = find_unquantized(checkpoint)
        with load.open_reader(progress=False) as reader:
            writer = _Writer(checkpoint, load, reader)
            tensors = writer.tensors()
            if not writer.modules:
                raise _without_mxfp4(checkpoint)
            total = sum(tensor.nbytes for tensor in tensors.values())
            writer.note = log_layers(progress, "casting")
            with draw_progress(progress, total, "casting") as writer.advance:
                copy_beside(checkpoint, stage)
                file, section = _declare(checkpoint, writer)
                config = checkpoint.config | {_SECTION: section}
                write_folder(stage, tensors, config, quant_file=file, shard_bytes=shard_bytes)
        infos = map(checkpoint.tensors.info, checkpoint.tensors.names())
        return {
            "cast_matrices": len(writer.modules),
            "scheme": str(Scheme.W4A16),
            "format": section["quant_method"],
            "source_bytes": sum(info.nbytes for info in infos),
            "bytes": total,
        }


def _without_mxfp4(checkpoint) -> CheckpointError:
    """Return the error for a checkpoint whose experts are not MXFP4."""
    said = [rules.source for rules in checkpoint.quant.rules] or ["nothing is quantized"]
    expected = "expected quant_method mxfp4, or fp8 with experts in MXFP4"
    return CheckpointError(f"holds no MXFP4 ({said[0]}); {expected}", str(checkpoint.folder))


def _declare(checkpoint, writer):
    """Return the contents of ``hf_quant_config.json``, and the section of ``config.json``."""
    version = writer_version()
    if checkpoint.quant.format is MXFP4:
        exclude = find_excluded(checkpoint, writer.consumed, writer.modules)
        return declaration(_ALGORITHM, exclude, version)
    experts = sorted({module.rsplit(".", 2)[0] for module in writer.modules})
    file, _ = declaration(MIXED, (), version, layers=dict.fromkeys(experts, _ALGORITHM))
    return file, checkpoint.config[_SECTION] | {EXPERT_ALGORITHM: _ALGORITHM}


class _Writer:
    """Makes the tensors of a destination when their turn comes.

    Attributes:
      modules: linears that are written in NVFP4.
      consumed: tensors of the source that are not written as they are.
      note: is told the name of each tensor that is about to be made.
      advance: is told the bytes of each tensor made.
    """

    def __init__(self, checkpoint: Checkpoint, load: UnreadModel, reader: Any):
        self.modules: list[str] = []
        self.consumed: set[str] = set()
        self.note: Callable[[str], None] = lambda name: None
        self.advance: Callable[[int], None] = lambda nbytes: None
        self._checkpoint, self._load, self._reader = checkpoint, load, reader

    def tensors(self) -> dict[str, Writable]:
        """Return what is written: experts one by one, and all other tensors as they are."""
        made: dict[str, Writable] = {}
        for part in self._load.parts:
            if part.experts is not None and isinstance(part.experts.value, MoEParams):
                made |= dict(self._experts(part.experts))
        tensors = self._checkpoint.tensors
        for name in tensors.names():
            if name not in self.consumed:
                info = tensors.info(name)
                stored = STORED_TYPES[info.dtype].numpy
                read = functools.partial(tensors.read, name)
                made[info.name] = self._lazy(info.name, info.array_shape, stored, read)
        return made

    def _experts(self, experts: Source) -> Iterator[tuple[str, Writable]]:
        prefix = experts.name
        sizes = self._load.table.requests.experts[prefix]
        names = list(self._checkpoint.tensors.under(f"{prefix}."))
        self.consumed |= set(names)
        info = self._checkpoint.tensors.info(names[0])
        spell = self._checkpoint.key_mapping.spell
        owner = info.name.removesuffix(spell(names[0]).removeprefix(prefix))
        params = experts.read(self._reader)
        spelled = self._checkpoint.key_mapping.projections
        for expert in range(sizes.num_experts):
            for name, weight, bias, index, rows in _projections(params, sizes, spelled):
                module = f"{owner}.{expert}.{name}"
                self.modules.append(module)
                yield from self._matrix(module, weight, (expert, rows), index)
                if bias is not None:
                    dtype = self._bias_dtype(names)
                    yield self._named(f"{module}.bias", bias, (expert, rows), dtype)

    def _matrix(self, module, weight: NVFP4Tensor, part, index):
        """Yield the tensors of one projection, the part `part` of the experts' `weight`."""
        names = MODELOPT.names
        yield self._named(f"{module}.{names.packed}", weight.packed, part)
        yield self._named(f"{module}.{names.block_scale}", weight.block_scale, part)
        apart = len(weight.global_scale.shape) > 1
        scale = (part[0], index) if apart else part[:1]
        yield self._named(f"{module}.{names.weight_global}", weight.global_scale, scale)

    def _named(self, name, array, part, dtype=None) -> tuple[str, LazyTensor]:
        dtype = np.dtype(dtype or array.dtype)
        shape = (
            tuple(one.stop - one.start for one in part if isinstance(one, slice))
            + array.shape[len(part) :]
        )

        def make():
            found = array[part]
            self._reader.raise_problems()
            return np.ascontiguousarray(found).astype(dtype, copy=False).reshape(shape)

        return name, self._lazy(name, shape, dtype, make)

    def _bias_dtype(self, names) -> np.dtype:
        """Return the dtype of the experts' biases in the source, to which float32 goes back."""
        found = next(name for name in names if name.endswith("bias"))
        return STORED_TYPES[self._checkpoint.tensors.info(found).dtype].numpy

    def _lazy(self, name, shape, dtype, make) -> LazyTensor:
        def make_and_count():
            self.note(name)
            made = make()
            self.advance(made.nbytes)
            return made

        return LazyTensor(tuple(shape), dtype, make_and_count)


def _projections(params: MoEParams, sizes: ExpertSizes, spelled: Sequence[str]):
    """Yield name, matrices, biases, index and rows of each projection of an expert.

    Args:
      params: the experts.
      sizes: their sizes.
      spelled: the names of the gate, up and down projection in the file.
    """
    i, (*ups, down) = sizes.intermediate, spelled[-len(sizes.projections) :]
    for index, name in enumerate(ups):
        rows = slice(index * i, (index + 1) * i)
        yield name, params.gate_up, params.gate_up_bias, index, rows
    yield down, params.down, params.down_bias, 0, slice(0, sizes.hidden)
