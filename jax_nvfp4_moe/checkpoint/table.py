"""The table of a load: which tensors of the files fill which value of a model.

A `WeightTable` answers by name and size with a `Source`: the value's shapes, and how to read it.
Headers alone are looked at. `WeightTable.check` then raises everything that is missing, misshapen
or unexpected at once, so that no byte is read of a checkpoint that does not fit.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jax_nvfp4_moe.checkpoint.dense_experts import (
    DenseExpertPlan,
    FP8ExpertPlan,
    plan_dense_experts,
)
from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.expert_names import ExpertSizes, Requests
from jax_nvfp4_moe.checkpoint.experts import ExpertPlan, plan_experts
from jax_nvfp4_moe.checkpoint.folder import merge_text_config
from jax_nvfp4_moe.checkpoint.formats import Decision
from jax_nvfp4_moe.checkpoint.opening import Checkpoint
from jax_nvfp4_moe.checkpoint.options import LoadOptions
from jax_nvfp4_moe.checkpoint.plan import Buffer, FP8Matrices, LinearPlan, Matrices, Planner
from jax_nvfp4_moe.checkpoint.progress import progress
from jax_nvfp4_moe.checkpoint.reading import Reader
from jax_nvfp4_moe.checkpoint.unexpected_keys import find_unexpected_keys
from jax_nvfp4_moe.checkpoint.values import CacheScales, LinearWeights
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams, NVFP4Tensor
from jax_nvfp4_moe.scheme import CheckpointScheme

log = logging.getLogger("jax_nvfp4_moe")


@dataclasses.dataclass(frozen=True)
class Source:
    """What fills one value of a model.

    Attributes:
      name: of the tensor or the module in the file, for messages.
      value: the value, with a `jax.ShapeDtypeStruct` for each array.
      read: reader -> the value. Its arrays are `LazyArray` or numpy arrays.
      checkpoint_scheme: what the file declares for the module; None where it is not quantized.
    """

    name: str
    value: Any
    read: Callable[[Any], Any]
    checkpoint_scheme: CheckpointScheme = None


class Headers:
    """Answers as a `Reader` does, with shapes alone."""

    def __init__(self, divides: bool):
        """Answer for a file whose weight global scales divide, or multiply."""
        self._divides = divides

    def array(self, buffer: Buffer) -> jax.ShapeDtypeStruct:
        """As `Reader.array`."""
        return jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)

    def weight(self, matrices: Matrices) -> NVFP4Tensor:
        """As `Reader.weight`."""
        scale: Any = self.array(matrices.weight_global)
        packed: Any = self.array(matrices.packed)
        block_scale: Any = self.array(matrices.block_scale)
        return NVFP4Tensor(packed, block_scale, scale, scale if self._divides else None)

    def fp8(self, matrices: FP8Matrices) -> FP8Tensor:
        """As `Reader.fp8`."""
        values: Any = self.array(matrices.values)
        scale: Any = self.array(matrices.scale)
        return FP8Tensor(values, scale)

    def input_scale(self, matrices: Matrices | FP8Matrices, required: bool) -> Any:
        """As `Reader.input_scale`."""
        del required
        if matrices.input_global is None:
            return None
        return jax.ShapeDtypeStruct(matrices.input_global.shape[:1], matrices.input_global.dtype)

    def cache_scale(self, prefix: str, name: str, buffer: Buffer) -> jax.ShapeDtypeStruct:
        """As `Reader.cache_scale`."""
        del prefix, name
        return self.array(buffer)


class WeightTable:
    """Finds the tensors of each value that a model asks for, by its name in the file."""

    def __init__(self, checkpoint: Checkpoint, options: LoadOptions | None = None):
        """Make an empty table of an open checkpoint."""
        self._checkpoint, self._options = checkpoint, options or LoadOptions()
        self._planner = Planner(checkpoint.tensors, checkpoint.quant, self._options.input_scales)
        self._headers = Headers(self._planner.names.divides)
        self.requests = Requests()

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor called `name`."""
        return name in self._planner.tensors

    def has_under(self, prefix: str) -> bool:
        """Whether the checkpoint has a tensor whose name begins with `prefix`."""
        return next(self._planner.tensors.under(prefix), None) is not None

    def checkpoint_scheme(self, module: str) -> CheckpointScheme:
        """Return the scheme that the file declares for `module`, None for dense."""
        return self._planner.checkpoint_scheme(module)

    @property
    def decisions(self) -> Mapping[str, Decision]:
        """Module -> how the file quantizes it and what said so, of all that was asked for.

        The experts of a layer are one row, ``PREFIX.experts.*``.
        """
        return self._planner.decisions

    def ignore(self, prefix: str, reason: str) -> None:
        """Say that tensors whose names begin with `prefix` are knowingly left out, and why."""
        self._planner.ignore(list(self._planner.tensors.under(prefix)), reason)

    def array(self, name: str, shape: tuple[int, ...], *, dtype: Any = None) -> Source:
        """Find the dense tensor `name`.

        Args:
          name: whole name, such as "model.norm.weight".
          shape: that it must have.
          dtype: of the result, `LoadOptions.dtype` where it is None. An integer dtype expects
            integers in the file, any other floats.
        """
        buffer = self._planner.array(name, tuple(shape), dtype or self._options.dtype)
        return self._source(name, lambda reader: reader.array(buffer))

    def linear(
        self, prefix: str, n: int, k: int, *, bias: bool | None = False, dtype: Any = None
    ) -> Source:
        """Find the linear `prefix`, quantized or dense as the file has it: a `LinearWeights`.

        Args:
          prefix: module, such as "model.layers.0.self_attn.q_proj".
          n: outputs.
          k: inputs; a multiple of 16 where it is quantized.
          bias: whether it has one; None: if the file does.
          dtype: of dense arrays, `LoadOptions.dtype` where it is None.
        """
        self.requests.linears[prefix] = n, k
        plan = self._planner.linear(prefix, n, k, bias, dtype or self._options.dtype)
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
        """Find the experts below `prefix` as the file has them, canonical.

        The value is `MoEParams` where they are NVFP4, else `DenseExperts`.

        Args:
          prefix: module, such as "model.layers.0.mlp.experts".
          num_experts: e.
          hidden: h, a multiple of 16.
          intermediate: i, a multiple of 16.
          gated: whether there are gate rows.
          bias: whether both products have a bias.
          interleaved: whether gate and up rows alternate where one tensor holds both.
          inputs_first: whether stacked matrices that are not NVFP4 are ``[e, k, n]`` (Llama 4,
            gpt-oss) or ``[e, n, k]``; None tells by the shapes, and refuses square ones.

        Names and layouts are those of `expert_names.PER_EXPERT` and the stacked formats. The rows
        come out as gate rows, then up rows, whatever the file has.
        """
        sizes = ExpertSizes(
            num_experts, hidden, intermediate, gated, bias, interleaved, inputs_first
        )
        self.requests.experts[prefix] = sizes
        plan = plan_experts(self._planner, prefix, sizes, self._options.dtype)
        if not isinstance(plan, ExpertPlan):
            return self._dense_source(prefix, plan)
        return self._source(
            prefix, lambda reader: self._moe_params(reader, plan), plan.checkpoint_scheme
        )

    def dense_experts(self, prefix: str, sizes: ExpertSizes, *, dtype: Any = None) -> Source:
        """Find experts that are not quantized, as a quantizer needs them: `DenseExperts`.

        Args:
          prefix: module.
          sizes: of the layer.
          dtype: as for `array`.
        """
        plan = plan_dense_experts(self._planner, prefix, sizes, dtype or self._options.dtype)
        return self._dense_source(prefix, plan)

    def cache_scales(self, prefix: str, **heads: int) -> Source | None:
        """Find how the file rounds keys and values of an attention to FP8: `CacheScales`.

        Args:
          prefix: module, such as "model.layers.0.self_attn".
          heads: number of heads of what is kept, under "k" and "v".

        Returns:
          None if the file does not round them. Scales that the file lacks are 1; those that are
          not positive and finite become 1.
        """
        cache = self._planner.quant.kv_cache
        if cache is None:
            return None
        if cache.algorithm != "FP8":
            self._planner.problems.append(
                f"{cache.source}: {quoted(cache.algorithm)} is not supported; supported: FP8. "
                "Load with scheme='w4a16', which keeps keys and values in the model's dtype"
            )
            return None
        buffers = {
            name: self._planner.cache_scale(prefix, name, count) for name, count in heads.items()
        }

        def read(reader):
            scales = {name: reader.cache_scale(prefix, name, b) for name, b in buffers.items()}
            return CacheScales(scales, cache.multiply_by_reciprocal)

        return self._source(f"{prefix} cache scales", read)

    def check(self, only: str | None = None) -> int:
        """Raise everything that is wrong with the tensors that were asked for.

        Args:
          only: module such as "model.layers.3.mlp"; tensors elsewhere are not unexpected.
            `LoadOptions.only` where None.

        Returns:
          Bytes of the tensors that reading all sources reads.

        Raises:
          CheckpointError: tensors are missing, misshapen or unexpected; lists all of them.
        """
        planner, checkpoint, options = self._planner, self._checkpoint, self._options
        num_layers = options.num_layers or _num_layers(checkpoint.config)
        problems = [
            *planner.problems,
            *find_unexpected_keys(
                planner, checkpoint.key_mapping, only or options.only, num_layers
            ),
        ]
        if problems:
            raise CheckpointError(problems, str(checkpoint.folder))
        for fact, count in planner.notes.items():
            log.info("%s: %s (%d)", checkpoint.folder, fact, count)
        return planner.nbytes

    def raise_problems(self) -> None:
        """Raise what is wrong with the tensors asked for so far, if anything is.

        Raises:
          CheckpointError: tensors are missing or misshapen.
        """
        if self._planner.problems:
            raise CheckpointError(self._planner.problems, str(self._checkpoint.folder))

    @contextlib.contextmanager
    def open_reader(self, show: bool | None = None, label: str = "loading") -> Iterator[Reader]:
        """Yield a reader of all sources.

        Args:
          show: whether to draw a bar on standard error; None draws one on a terminal.
          label: of the bar.
        """
        checkpoint = self._checkpoint
        with progress(show, self._planner.nbytes, label) as advance:
            yield Reader(
                checkpoint.tensors, checkpoint.quant.names, advance, str(checkpoint.folder)
            )

    def _source(self, name, read, checkpoint_scheme=None) -> Source:
        return Source(name, read(self._headers), read, checkpoint_scheme)

    def _dense_source(self, prefix, plan: DenseExpertPlan | FP8ExpertPlan) -> Source:
        checkpoint_scheme = plan.checkpoint_scheme if isinstance(plan, FP8ExpertPlan) else None
        return self._source(
            prefix, lambda reader: self._dense_experts(reader, plan), checkpoint_scheme
        )

    def _moe_params(self, reader, plan: ExpertPlan) -> MoEParams:
        return MoEParams(
            gate_up=reader.weight(plan.gate_up),
            down=reader.weight(plan.down),
            gate_up_input_scale=reader.input_scale(plan.gate_up, self._requires_scales),
            down_input_scale=reader.input_scale(plan.down, self._requires_scales),
            gate_up_bias=_optional(reader, plan.gate_up.bias),
            down_bias=_optional(reader, plan.down.bias),
        )

    def _dense_experts(self, reader, plan: DenseExpertPlan | FP8ExpertPlan) -> DenseExperts:
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
            read(quantized), bias, scale, plan.checkpoint_scheme, multiply_by_reciprocal
        )

    @property
    def _requires_scales(self) -> bool:
        return self._options.input_scales == "required"


def read_source(source: Source, reader: Reader) -> Any:
    """Read a source: numpy arrays alone, their values checked.

    Raises:
      CheckpointError: a scale is NaN or infinite.
    """
    value = jax.tree.map(lambda leaf: np.asarray(leaf[()]), source.read(reader))
    reader.raise_problems()
    return value


def _optional(reader, buffer: Buffer | None) -> Any:
    return None if buffer is None else reader.array(buffer)


def _num_layers(config) -> int | None:
    value = merge_text_config(config).get("num_hidden_layers")
    return value if type(value) is int and value > 0 else None
