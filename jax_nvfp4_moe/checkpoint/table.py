"""The table of a load: which tensors of the files fill which values of a model.

A `WeightTable` is asked for a value by name and size. It answers with a `Source`, which holds the
shapes of the value and reads it later. Only the headers are read to build the table.
`WeightTable.check` then raises everything that is missing, misshapen or unexpected in one error. A
checkpoint that does not fit is therefore refused before any tensor is read.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.checkpoint.errors import Problems, printable, quoted
from jax_nvfp4_moe.checkpoint.experts.finding import find_experts
from jax_nvfp4_moe.checkpoint.experts.forms import has_experts, settle_experts, unknown_experts
from jax_nvfp4_moe.checkpoint.folder import read_num_layers
from jax_nvfp4_moe.checkpoint.formats.kv_cache import NVFP4
from jax_nvfp4_moe.checkpoint.formats.rules import Decision
from jax_nvfp4_moe.checkpoint.opening import Checkpoint
from jax_nvfp4_moe.checkpoint.options import LoadOptions
from jax_nvfp4_moe.checkpoint.progress import progress
from jax_nvfp4_moe.checkpoint.reading.reader import Reader
from jax_nvfp4_moe.checkpoint.reading.same_tensor import same_tensor
from jax_nvfp4_moe.checkpoint.reading.unread import Unread
from jax_nvfp4_moe.checkpoint.values import CacheScales
from jax_nvfp4_moe.checkpoint.weights.by_format import find_linear
from jax_nvfp4_moe.checkpoint.weights.cache_scales import CacheScaleFinder
from jax_nvfp4_moe.checkpoint.weights.finder import Finder
from jax_nvfp4_moe.checkpoint.weights.held_counts import refuse_experts
from jax_nvfp4_moe.checkpoint.weights.requests import ExpertSizes, Requests
from jax_nvfp4_moe.checkpoint.weights.unexpected_keys import (
    count_drafting_layers,
    find_unexpected_keys,
)
from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8
from jax_nvfp4_moe.scheme import CheckpointScheme

log = logging.getLogger("jax_nvfp4_moe")


@dataclasses.dataclass(frozen=True)
class Source:
    """What fills one value of a model.

    Attributes:
      name: the tensor or the module in the file, for messages.
      value: the value, with an `Unread` in place of each array.
      checkpoint_scheme: the scheme that the file declares for the module. None if it is not
        quantized.
    """

    name: str
    value: Any
    checkpoint_scheme: CheckpointScheme = None

    def read(self, reader: Any) -> Any:
        """Return the value. Its arrays are `LazyArray` or numpy arrays, which `reader` reads."""
        return jax.tree.map(reader.open, self.value)


class WeightTable:
    """Finds the tensors of each value that a model asks for, by the value's name in the file.

    Attributes:
      requests: the linears and the experts that were asked for.
    """

    def __init__(self, checkpoint: Checkpoint, options: LoadOptions | None = None):
        """Make an empty table.

        Args:
          checkpoint: the open checkpoint.
          options: how to read it. None takes the defaults of `LoadOptions`.
        """
        self._checkpoint, self._options = checkpoint, options or LoadOptions()
        self._finder = Finder(
            checkpoint.tensors, checkpoint.quant, checkpoint.key_mapping, self._options.input_scales
        )
        self._cache_scales = CacheScaleFinder(self._finder, printable(checkpoint.folder))
        self.requests = Requests()
        self._unknown_experts: list[str] = []

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor called `name`."""
        return name in self._finder.tensors

    def has_under(self, prefix: str) -> bool:
        """Return whether the checkpoint has a tensor whose name begins with `prefix`."""
        return next(self._finder.tensors.under(prefix), None) is not None

    def checkpoint_scheme(self, module: str) -> CheckpointScheme:
        """Return the scheme that the file declares for `module`, or None if it is dense.

        FP8 weights with scales of blocks that are stored as floats, or that are decoded while they
        are read, count as dense.
        """
        declared = self._finder.checkpoint_scheme(module)
        return None if declared is BlockFP8.MX else declared

    @property
    def decisions(self) -> Mapping[str, Decision]:
        """How the file quantizes each module that was asked for, and what decided that.

        The experts of a layer are one entry, ``PREFIX.experts.*``.
        """
        return self._finder.decisions

    def problem(self, sentence: str) -> None:
        """Note a problem with the file, which `check` and `raise_problems` raise."""
        self._finder.problems.append(sentence)

    def claim(self, prefix: str) -> None:
        """Declare that the drafting layers below `prefix` are loaded; see `Finder.claimed`."""
        self._finder.claimed.append(prefix)

    def ignore(self, prefix: str, reason: str) -> None:
        """Leave out the tensors whose names begin with `prefix`, and log the reason."""
        self._finder.ignore(list(self._finder.tensors.under(prefix)), reason)

    def stored(self, prefix: str) -> str:
        """Return the name of the first tensor whose name begins with `prefix`, as in the file."""
        tensors = self._finder.tensors
        return quoted(tensors.info(next(tensors.under(prefix))).name)

    def same(self, module: str, name: str) -> bool:
        """Return whether the only weight of `module` is stored equal to the tensor `name`.

        Input scales of `module` do not count. The bytes are compared a few at a time, up to the
        first that differ.
        """
        tensors, weight = self._finder.tensors, f"{module}.weight"
        known = {weight, f"{module}.{self._finder.names.input_global}"}
        if weight not in tensors or name not in tensors:
            return False
        return known.issuperset(tensors.under(f"{module}.")) and same_tensor(tensors, weight, name)

    def warn(self, fact: str) -> None:
        """Note `fact` for a warning, which `check` writes to the log."""
        self._finder.warn(fact, fact, fact)

    def array(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: Any = None,
        stored: tuple[int, ...] | None = None,
        keeps_bfloat16: bool = False,
    ) -> Source:
        """Find the tensor `name`, which modules keep in a float dtype, such as a router's weight.

        A matrix that the file stores quantized is dequantized while it is read. Its inputs are not
        rounded, under any scheme.

        Args:
          name: the full name, such as "model.norm.weight".
          shape: the shape of the result.
          dtype: the dtype of the result. An integer dtype expects integers in the file, and any
            other dtype expects floats. None takes `LoadOptions.dtype`.
          stored: the shape that the tensor must have, if it has further axes of length 1. None
            takes `shape`.
          keeps_bfloat16: whether the result is bfloat16 if the file stores bfloat16, whatever
            `dtype` is. False by default.
        """
        dtype = dtype or self._options.dtype
        info = self._finder.find(name)
        if keeps_bfloat16 and info is not None and info.dtype == "BF16":
            dtype = jnp.bfloat16
        module = name.removesuffix(".weight")
        packed = f"{module}.{self._finder.names.packed}" in self._finder.tensors
        quantized = info.dtype in ("U8", "F8_E4M3") if info else packed
        if quantized and module != name:
            return self._dequantized(module, tuple(shape), dtype)
        return Source(name, self._finder.array(name, tuple(shape), dtype, stored))

    def _dequantized(self, module, shape, dtype) -> Source:
        """Find the quantized matrix of `module`, and dequantize it to `dtype` when it is read."""
        n, k = shape
        weight = find_linear(self._finder, module, n, k, False, dtype, decodes=True).weight
        if isinstance(weight, Unread):
            return Source(module, weight)
        dtype = np.dtype(dtype or np.float32)

        def decode(reader):
            opened = jax.tree.map(reader.open, weight)
            whole = jax.tree.map(lambda leaf: jnp.asarray(leaf[()]), opened)
            return np.asarray(whole.dequantize(dtype))

        return Source(module, Unread(shape, dtype, decode=decode))

    def linear(
        self, prefix: str, n: int, k: int, *, bias: bool | None = False, dtype: Any = None
    ) -> Source:
        """Find the linear `prefix`, in the format in which the file stores it.

        Args:
          prefix: the module, such as "model.layers.0.self_attn.q_proj".
          n: the number of outputs.
          k: the number of inputs, a multiple of 16 if the linear is NVFP4.
          bias: whether the linear has a bias. None takes a bias if the file has one.
          dtype: the dtype of dense arrays. None takes `LoadOptions.dtype`.

        Returns:
          A source of `LinearWeights`.
        """
        self.requests.linears[prefix] = n, k
        found = find_linear(self._finder, prefix, n, k, bias, dtype or self._options.dtype)
        return Source(prefix, found, found.checkpoint_scheme)

    def experts(
        self,
        prefix: str,
        num_experts: int,
        hidden: int,
        intermediate: int,
        *,
        gated: bool = True,
        bias: bool = False,
        interleaved: bool = False,
        inputs_first: bool | None = None,
    ) -> Source:
        """Find the experts of one layer, in the format in which the file stores them.

        `names.SPELLINGS` lists the names that experts may have. Stacked experts are found
        too. The value has the gate rows before the up rows, whatever the order in the file.

        Args:
          prefix: the module, such as "model.layers.0.mlp.experts".
          num_experts: e.
          hidden: h, a multiple of 16 if the experts are NVFP4.
          intermediate: i, a multiple of 16 if the experts are NVFP4.
          gated: whether experts have a gate projection.
          bias: whether both products add a bias.
          interleaved: whether gate and up rows alternate if one tensor holds both.
          inputs_first: whether stacked matrices that are not NVFP4 are ``[e, k, n]``, as in Llama 4
            and gpt-oss, or ``[e, n, k]``. None decides by the shapes, and reports square matrices
            as a problem.

        Returns:
          A source of canonical `MoEParams` if the experts are NVFP4, else of `DenseExperts`.
        """
        sizes = ExpertSizes(
            num_experts, hidden, intermediate, gated, bias, interleaved, inputs_first
        )
        few = refuse_experts(self._finder.tensors, prefix, num_experts)
        if few is not None:
            self._finder.problems.append(few[0])
            sizes = dataclasses.replace(sizes, num_experts=few[1])  # to find further problems
        self.requests.experts[prefix] = sizes
        settle_experts(self._finder, prefix, sizes)
        before = len(self._finder.problems)
        found = find_experts(self._finder, prefix, sizes, self._options.dtype)
        if not has_experts(self._finder, prefix, sizes):
            del self._finder.problems[before:]  # one sentence for all such layers says more
            self._unknown_experts.append(prefix)
        return Source(prefix, *found)

    def cache_scales(self, prefix: str, **heads: int) -> Source | None:
        """Find the scales with which an attention module stores keys and values in FP8.

        A scale that the file lacks, or that is not a positive finite number of normal size, is 1.

        Args:
          prefix: the attention module, such as "model.layers.0.self_attn".
          heads: "k" or "v" -> the number of heads.

        Returns:
          A source of `CacheScales`. None if the file does not declare an FP8 KV cache. A cache
          that it declares NVFP4 keeps the model's dtype, which holds more.
        """
        cache = self._finder.quant.kv_cache
        if cache is None:
            return None
        if cache.algorithm == NVFP4:
            self._finder.warn(
                "KV cache in NVFP4",
                prefix,
                f"{quoted(prefix)}: the KV cache is declared NVFP4 ({cache.source}), and no module "
                "here rounds keys and values to that: they keep the model's dtype",
            )
            return None
        if cache.algorithm != "FP8":
            self._finder.problems.append(
                f"{cache.source}: {quoted(cache.algorithm)} is not supported for the KV cache; "
                "supported: FP8. Load with scheme='w4a16', which keeps keys and values in the "
                "model's dtype"
            )
            return None
        scales = self._cache_scales.find(prefix, heads)
        return Source(f"{prefix} cache scales", CacheScales(scales, cache.multiply_by_reciprocal))

    def check(self, only: Sequence[str] = ()) -> int:
        """Raise everything that is wrong with the tensors that were asked for.

        Args:
          only: modules such as "model.layers.3.mlp". Tensors elsewhere are not reported as
            unexpected. An empty sequence takes `LoadOptions.only`.

        Returns:
          The bytes that reading all sources would read.

        Raises:
          CheckpointError: lists all tensors that are missing, misshapen or unexpected.
        """
        finder, checkpoint, options = self._finder, self._checkpoint, self._options
        num_layers = options.num_layers or read_num_layers(checkpoint.config)
        scopes = only or ((options.only,) if options.only else ())
        problems = Problems(
            [
                *finder.problems,
                *unknown_experts(finder, self._unknown_experts),
                *find_unexpected_keys(
                    finder,
                    checkpoint.key_mapping,
                    scopes,
                    num_layers,
                    count_drafting_layers(checkpoint.config),
                ),
            ]
        )
        cache = checkpoint.quant.kv_cache
        self._cache_scales.report(cache and cache.source, scopes, num_layers)
        for modules, sentence in finder.warnings.values():
            others = f", and so for {len(modules) - 1} other modules" if len(modules) > 1 else ""
            log.warning("%s: %s%s", printable(checkpoint.folder), sentence, others)
        problems.finish(str(checkpoint.folder))
        for fact, count in finder.notes.items():
            log.info("%s: %s (%d)", printable(checkpoint.folder), fact, count)
        return finder.nbytes

    def raise_problems(self) -> None:
        """Raise what is wrong with the tensors asked for so far, if anything is.

        Raises:
          CheckpointError: lists all tensors that are missing or misshapen.
        """
        finder = self._finder
        unknown = unknown_experts(finder, self._unknown_experts)
        Problems([*finder.problems, *unknown]).finish(str(self._checkpoint.folder))

    @contextlib.contextmanager
    def open_reader(
        self, show: bool | None = None, label: str = "loading", reused_bytes: int = 0
    ) -> Iterator[Reader]:
        """Yield a reader for all sources.

        Args:
          show: whether to draw a progress bar on standard error. None draws it on a terminal.
          label: the text before the bar.
          reused_bytes: as for `Reader`.
        """
        checkpoint = self._checkpoint
        with progress(show, self._finder.nbytes, label) as advance:
            yield Reader(checkpoint.tensors, advance, str(checkpoint.folder), reused_bytes)


def read_source(source: Source, reader: Reader) -> Any:
    """Read a source into numpy arrays, and check their values.

    Raises:
      CheckpointError: a scale is NaN or infinite.
    """
    value = jax.tree.map(lambda leaf: np.asarray(leaf[()]), source.read(reader))
    reader.raise_problems()
    return value
