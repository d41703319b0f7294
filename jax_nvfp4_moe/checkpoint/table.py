"""The table of a load: which tensors of the files fill which values of a model.

A `WeightTable` is asked for a value by name and size. It answers with a `Source`, which holds the
shapes of the value and reads it later. Only the headers are read to build the table.
`WeightTable.check` then raises everything that is missing, misshapen or unexpected in one error. A
checkpoint that does not fit is therefore refused before any tensor is read.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.checkpoint.cache_scales import CacheScalePlanner
from jax_nvfp4_moe.checkpoint.dense_experts import (
    DenseExpertPlan,
    FP8ExpertPlan,
    plan_dense_experts,
)
from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.expert_forms import (
    has_experts,
    settle_experts,
    unknown_experts,
)
from jax_nvfp4_moe.checkpoint.expert_names import ExpertSizes, Requests
from jax_nvfp4_moe.checkpoint.experts import ExpertPlan, plan_experts
from jax_nvfp4_moe.checkpoint.folder import read_num_layers
from jax_nvfp4_moe.checkpoint.formats import Decision
from jax_nvfp4_moe.checkpoint.fp8_block_weights import find_block_scheme, plan_block_linear
from jax_nvfp4_moe.checkpoint.held_counts import refuse_experts
from jax_nvfp4_moe.checkpoint.mxfp4_experts import MXFP4Matrices
from jax_nvfp4_moe.checkpoint.opening import Checkpoint
from jax_nvfp4_moe.checkpoint.options import LoadOptions
from jax_nvfp4_moe.checkpoint.plan import Buffer, FP8Matrices, LinearPlan, Matrices, Planner
from jax_nvfp4_moe.checkpoint.progress import progress
from jax_nvfp4_moe.checkpoint.reading import Check, Reader, bad_channel_scales
from jax_nvfp4_moe.checkpoint.same_tensor import same_tensor
from jax_nvfp4_moe.checkpoint.unexpected_keys import (
    count_drafting_layers,
    find_unexpected_keys,
)
from jax_nvfp4_moe.checkpoint.values import CacheScales, LinearWeights
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams, NVFP4Tensor
from jax_nvfp4_moe.scheme import CheckpointScheme, Scheme

log = logging.getLogger("jax_nvfp4_moe")


@dataclasses.dataclass(frozen=True)
class Source:
    """What fills one value of a model.

    Attributes:
      name: the tensor or the module in the file, for messages.
      value: the value, with a `jax.ShapeDtypeStruct` in place of each array.
      read: takes a reader and returns the value. Its arrays are `LazyArray` or numpy arrays.
      checkpoint_scheme: the scheme that the file declares for the module. None if it is not
        quantized.
    """

    name: str
    value: Any
    read: Callable[[Any], Any]
    checkpoint_scheme: CheckpointScheme = None


class Headers:
    """Answers the questions that a `Reader` answers, with shapes and dtypes in place of arrays."""

    def __init__(self, divides: bool):
        """Make the answers.

        Args:
          divides: whether the file stores the reciprocals of global scales.
        """
        self._divides = divides

    def array(self, buffer: Buffer, check: Check | None = None) -> jax.ShapeDtypeStruct:
        """Return the shape and the dtype of `Reader.array`."""
        del check
        return jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)

    def weight(self, matrices: Matrices | MXFP4Matrices) -> NVFP4Tensor:
        """Return the shapes and the dtypes of `Reader.weight`."""
        if isinstance(matrices, MXFP4Matrices):
            return matrices.map_arrays(lambda _, *array: jax.ShapeDtypeStruct(*array))
        scale: Any = self.array(matrices.weight_global)
        packed: Any = self.array(matrices.packed)
        block_scale: Any = self.array(matrices.block_scale)
        return NVFP4Tensor(packed, block_scale, scale, scale if self._divides else None)

    def fp8(self, matrices: FP8Matrices) -> FP8Tensor:
        """Return the shapes and the dtypes of `Reader.fp8`."""
        values: Any = self.array(matrices.values)
        scale: Any = self.array(matrices.scale)
        return FP8Tensor(values, scale)

    def input_scale(self, matrices: Matrices | FP8Matrices | MXFP4Matrices, required: bool) -> Any:
        """Return the shape and the dtype of `Reader.input_scale`."""
        del required
        if matrices.input_global is None:
            return None
        return jax.ShapeDtypeStruct(matrices.input_global.shape[:1], matrices.input_global.dtype)

    def cache_scale(self, prefix: str, name: str, buffer: Buffer) -> jax.ShapeDtypeStruct:
        """Return the shape and the dtype of `Reader.cache_scale`."""
        del prefix, name
        return self.array(buffer)


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
        self._planner = Planner(checkpoint.tensors, checkpoint.quant, self._options.input_scales)
        self._headers = Headers(self._planner.names.divides)
        self._cache_scales = CacheScalePlanner(self._planner, str(checkpoint.folder))
        self.requests = Requests()
        self._unknown_experts: list[str] = []

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor called `name`."""
        return name in self._planner.tensors

    def has_under(self, prefix: str) -> bool:
        """Return whether the checkpoint has a tensor whose name begins with `prefix`."""
        return next(self._planner.tensors.under(prefix), None) is not None

    def checkpoint_scheme(self, module: str) -> CheckpointScheme:
        """Return the scheme that the file declares for `module`, or None if it is dense.

        FP8 weights with scales of blocks that are stored as floats, or that are decoded while they
        are read, count as dense.
        """
        declared = self._planner.checkpoint_scheme(module)
        if not isinstance(declared, BlockFP8):
            return declared
        kept = find_block_scheme(self._planner, module) is BlockFP8.SQUARE
        return BlockFP8.SQUARE if kept else None

    @property
    def decisions(self) -> Mapping[str, Decision]:
        """How the file quantizes each module that was asked for, and what decided that.

        The experts of a layer are one entry, ``PREFIX.experts.*``.
        """
        return self._planner.decisions

    def ignore(self, prefix: str, reason: str) -> None:
        """Leave out the tensors whose names begin with `prefix`, and log the reason."""
        self._planner.ignore(list(self._planner.tensors.under(prefix)), reason)

    def stored(self, prefix: str) -> str:
        """Return the name of the first tensor whose name begins with `prefix`, as in the file."""
        tensors = self._planner.tensors
        return quoted(tensors.info(next(tensors.under(prefix))).name)

    def same(self, module: str, name: str) -> bool:
        """Return whether the only weight of `module` is stored equal to the tensor `name`.

        Input scales of `module` do not count. The bytes are compared a few at a time, up to the
        first that differ.
        """
        tensors, weight = self._planner.tensors, f"{module}.weight"
        known = {weight, f"{module}.{self._planner.names.input_global}"}
        if weight not in tensors or name not in tensors:
            return False
        return known.issuperset(tensors.under(f"{module}.")) and same_tensor(tensors, weight, name)

    def warn(self, fact: str) -> None:
        """Note `fact` for a warning, which `check` writes to the log."""
        self._planner.warn(fact, fact, fact)

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
        info = self._planner.find(name)
        if keeps_bfloat16 and info is not None and info.dtype == "BF16":
            dtype = jnp.bfloat16
        module = name.removesuffix(".weight")
        packed = f"{module}.{self._planner.names.packed}" in self._planner.tensors
        quantized = info.dtype in ("U8", "F8_E4M3") if info else packed
        if quantized and module != name:
            return self._dequantized(module, tuple(shape), dtype)
        buffer = self._planner.array(name, tuple(shape), dtype, stored)
        return self._source(name, lambda reader: reader.array(buffer))

    def _dequantized(self, module, shape, dtype) -> Source:
        """Find the quantized matrix of `module`, and dequantize it to `dtype` when it is read."""
        n, k = shape
        asked = module, n, k, False, dtype
        decoded = plan_block_linear(self._planner, *asked, decodes=True)
        plan = decoded or self._planner.linear(*asked)

        def read(reader):
            weight = self._linear(reader, plan).weight
            if not isinstance(weight, (NVFP4Tensor, FP8Tensor)):
                return weight
            if isinstance(reader, Headers):
                return jax.ShapeDtypeStruct(shape, np.dtype(dtype or np.float32))
            whole = jax.tree.map(lambda leaf: jnp.asarray(leaf[()]), weight)
            return np.asarray(whole.dequantize(dtype or np.float32))

        return self._source(module, read)

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
        asked = prefix, n, k, bias, dtype or self._options.dtype
        plan = plan_block_linear(self._planner, *asked) or self._planner.linear(*asked)
        return self._source(
            prefix, lambda reader: self._linear(reader, plan), plan.checkpoint_scheme
        )

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

        `expert_names.PER_EXPERT` lists the names that experts may have. Stacked experts are found
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
        few = refuse_experts(self._planner.tensors, prefix, num_experts)
        if few is not None:
            self._planner.problems.append(few[0])
            sizes = dataclasses.replace(sizes, num_experts=few[1])  # to find further problems
        self.requests.experts[prefix] = sizes
        settle_experts(self._planner, prefix, sizes)
        before = len(self._planner.problems)
        plan = plan_experts(self._planner, prefix, sizes, self._options.dtype)
        if not has_experts(self._planner, prefix, sizes):
            del self._planner.problems[before:]  # one sentence for all such layers says more
            self._unknown_experts.append(prefix)
            if isinstance(plan, ExpertPlan):  # the model is built on, to find further problems
                plan.checkpoint_scheme = plan.checkpoint_scheme or Scheme.W4A16
        if not isinstance(plan, ExpertPlan):
            return self._dense_source(prefix, plan)
        return self._source(
            prefix, lambda reader: self._moe_params(reader, plan), plan.checkpoint_scheme
        )

    def dense_experts(self, prefix: str, sizes: ExpertSizes, *, dtype: Any = None) -> Source:
        """Find experts that are not quantized, for a quantizer to read.

        Args:
          prefix: the module of the experts.
          sizes: the sizes of the layer.
          dtype: as for `array`.

        Returns:
          A source of `DenseExperts`.
        """
        plan = plan_dense_experts(self._planner, prefix, sizes, dtype or self._options.dtype)
        return self._dense_source(prefix, plan)

    def cache_scales(self, prefix: str, **heads: int) -> Source | None:
        """Find the scales with which an attention module stores keys and values in FP8.

        A scale that the file lacks, or that is not a positive finite number of normal size, is 1.

        Args:
          prefix: the attention module, such as "model.layers.0.self_attn".
          heads: "k" or "v" -> the number of heads.

        Returns:
          A source of `CacheScales`. None if the file does not declare an FP8 KV cache.
        """
        cache = self._planner.quant.kv_cache
        if cache is None:
            return None
        if cache.algorithm != "FP8":
            self._planner.problems.append(
                f"{cache.source}: {quoted(cache.algorithm)} is not supported for the KV cache; "
                "supported: FP8. Load with scheme='w4a16', which keeps keys and values in the "
                "model's dtype"
            )
            return None
        buffers = self._cache_scales.plan(prefix, heads)

        def read(reader):
            scales = {name: reader.cache_scale(prefix, name, b) for name, b in buffers.items()}
            return CacheScales(scales, cache.multiply_by_reciprocal)

        return self._source(f"{prefix} cache scales", read)

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
        planner, checkpoint, options = self._planner, self._checkpoint, self._options
        num_layers = options.num_layers or read_num_layers(checkpoint.config)
        scopes = only or ((options.only,) if options.only else ())
        problems = [
            *planner.problems,
            *unknown_experts(planner, self._unknown_experts),
            *find_unexpected_keys(
                planner,
                checkpoint.key_mapping,
                scopes,
                num_layers,
                count_drafting_layers(checkpoint.config),
            ),
        ]
        cache = checkpoint.quant.kv_cache
        self._cache_scales.report(cache and cache.source, scopes, num_layers)
        for modules, sentence in planner.warnings.values():
            others = f", and so for {len(modules) - 1} other modules" if len(modules) > 1 else ""
            log.warning("%s: %s%s", checkpoint.folder, sentence, others)
        if problems:
            raise CheckpointError(problems, str(checkpoint.folder))
        for fact, count in planner.notes.items():
            log.info("%s: %s (%d)", checkpoint.folder, fact, count)
        return planner.nbytes

    def raise_problems(self) -> None:
        """Raise what is wrong with the tensors asked for so far, if anything is.

        Raises:
          CheckpointError: lists all tensors that are missing or misshapen.
        """
        planner = self._planner
        problems = [*planner.problems, *unknown_experts(planner, self._unknown_experts)]
        if problems:
            raise CheckpointError(problems, str(self._checkpoint.folder))

    @contextlib.contextmanager
    def open_reader(self, show: bool | None = None, label: str = "loading") -> Iterator[Reader]:
        """Yield a reader for all sources.

        Args:
          show: whether to draw a progress bar on standard error. None draws it on a terminal.
          label: the text before the bar.
        """
        checkpoint = self._checkpoint
        with progress(show, self._planner.nbytes, label) as advance:
            yield Reader(checkpoint.tensors, self._planner.names, advance, str(checkpoint.folder))

    def _source(self, name, read, checkpoint_scheme=None) -> Source:
        """Return a source whose value has the shapes from the headers."""
        return Source(name, read(self._headers), read, checkpoint_scheme)

    def _dense_source(self, prefix, plan: DenseExpertPlan | FP8ExpertPlan) -> Source:
        checkpoint_scheme = plan.checkpoint_scheme if isinstance(plan, FP8ExpertPlan) else None
        return self._source(
            prefix, lambda reader: self._dense_experts(reader, plan), checkpoint_scheme
        )

    def _moe_params(self, reader, plan: ExpertPlan) -> MoEParams:
        """Return NVFP4 experts, read by a `Reader` or, as shapes alone, by `Headers`."""
        return MoEParams(
            gate_up=reader.weight(plan.gate_up),
            down=reader.weight(plan.down),
            gate_up_input_scale=reader.input_scale(plan.gate_up, self._requires_scales),
            down_input_scale=reader.input_scale(plan.down, self._requires_scales),
            gate_up_bias=_optional(reader, plan.gate_up.bias),
            down_bias=_optional(reader, plan.down.bias),
        )

    def _dense_experts(self, reader, plan: DenseExpertPlan | FP8ExpertPlan) -> DenseExperts:
        """Return experts in FP8 or a float dtype, read as in `_moe_params`."""
        if isinstance(plan, DenseExpertPlan):
            matrices = reader.array(plan.gate_up), reader.array(plan.down)
            scales = None, None
        else:
            matrices = reader.fp8(plan.gate_up), reader.fp8(plan.down)
            scales = tuple(
                reader.input_scale(one, self._requires_scales) for one in (plan.gate_up, plan.down)
            )
        return DenseExperts(
            *matrices,
            _optional(reader, plan.gate_up_bias),
            _optional(reader, plan.down_bias),
            *scales,
            multiply_by_reciprocal=self._planner.names.fp8_by_factor,
        )

    def _linear(self, reader, plan: LinearPlan) -> LinearWeights:
        """Return a linear in the format in which the file stores it, read as in `_moe_params`."""
        bias = _optional(reader, plan.bias)
        quantized = plan.matrices or plan.fp8
        if quantized is None:
            assert plan.dense is not None
            return LinearWeights(reader.array(plan.dense), bias)
        scale = reader.input_scale(quantized, self._requires_scales)
        if isinstance(scale, jax.ShapeDtypeStruct):
            scale = jax.ShapeDtypeStruct((), scale.dtype)
        elif scale is not None:
            scale = scale.reshape(())
        read = reader.fp8 if isinstance(quantized, FP8Matrices) else reader.weight
        multiply_by_reciprocal = self._planner.names.fp8_by_factor
        return LinearWeights(
            read(quantized),
            bias,
            scale,
            plan.checkpoint_scheme,
            multiply_by_reciprocal,
            _optional(reader, plan.channel_scale, bad_channel_scales),
        )

    @property
    def _requires_scales(self) -> bool:
        return self._options.input_scales == "required"


def read_source(source: Source, reader: Reader) -> Any:
    """Read a source into numpy arrays, and check their values.

    Raises:
      CheckpointError: a scale is NaN or infinite.
    """
    value = jax.tree.map(lambda leaf: np.asarray(leaf[()]), source.read(reader))
    reader.raise_problems()
    return value


def _optional(reader, buffer: Buffer | None, check: Check | None = None) -> Any:
    return None if buffer is None else reader.array(buffer, check)
