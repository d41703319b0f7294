"""Give a model its weights: a first pass checks all headers, a second reads layer by layer.

A model is built by a function that asks a `Weights` for what it needs, by name and shape. `load`
runs that function twice: first with placeholders, so that every missing, misshapen or surplus
tensor is known before the first byte is read, then with the arrays.
"""

import copy
import dataclasses
import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

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
from jax_nvfp4_moe.checkpoint.folder import merge_text_config, read_config
from jax_nvfp4_moe.checkpoint.formats import Decision
from jax_nvfp4_moe.checkpoint.key_mapping import KeyMapping, canonical_names, find_spelling
from jax_nvfp4_moe.checkpoint.options import LoadOptions, Place
from jax_nvfp4_moe.checkpoint.plan import (
    Buffer,
    FP8Matrices,
    LinearPlan,
    Matrices,
    Planner,
)
from jax_nvfp4_moe.checkpoint.progress import progress
from jax_nvfp4_moe.checkpoint.quantization import QuantConfig, read_quant_config
from jax_nvfp4_moe.checkpoint.reading import Reader
from jax_nvfp4_moe.checkpoint.safetensors import Tensors, open_tensors
from jax_nvfp4_moe.checkpoint.unexpected_keys import find_unexpected_keys
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams, NVFP4Tensor
from jax_nvfp4_moe.scheme import CheckpointScheme

log = logging.getLogger("jax_nvfp4_moe")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint folder; a context manager.

    Attributes:
      folder: where it is.
      config: the parsed ``config.json``; its values are not checked.
      tensors: with headers checked, under the names by which models ask for them.
      quant: what is quantized, and how.
      key_mapping: how the file spells the names of the language model.
    """

    folder: pathlib.Path
    config: dict[str, Any]
    tensors: Tensors
    quant: QuantConfig
    key_mapping: KeyMapping

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error) -> None:
        self.tensors.close()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearWeights:
    """One linear layer ``y = W x + bias``.

    Attributes:
      weight: `NVFP4Tensor` ``[n, k]`` with a scalar global scale, `FP8Tensor` or a dense array
        ``[n, k]``.
      bias: ``[n]`` or None.
      input_scale: float32 scalar where the file declares W4A4 or static FP8, else None.
      checkpoint_scheme: the scheme in the file; None where the weight is dense.
      multiply_by_reciprocal: how activations are rounded to FP8; see `numerics.fp8.round_fp8`.
    """

    weight: Any
    bias: Any = None
    input_scale: Any = None
    checkpoint_scheme: CheckpointScheme = dataclasses.field(default=None, metadata={"static": True})
    multiply_by_reciprocal: bool = dataclasses.field(default=False, metadata={"static": True})


class ExpertWeights(NamedTuple):
    """The experts of one layer, and the scheme that the file declares for them."""

    params: MoEParams | DenseExperts
    checkpoint_scheme: CheckpointScheme


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheScales:
    """How one layer's keys and values are rounded to FP8.

    Attributes:
      scales: name -> float32 ``[heads]``.
      multiply_by_reciprocal: static; see `numerics.fp8.round_fp8`.
    """

    scales: Mapping[str, Any]
    multiply_by_reciprocal: bool = dataclasses.field(metadata={"static": True})


def open_checkpoint(folder: str | pathlib.Path) -> Checkpoint:
    """Open a checkpoint folder: config, quantization config and the headers of all its files.

    Raises:
      CheckpointError: lists everything that is wrong with any of them.
    """
    folder = pathlib.Path(folder)
    config = read_config(folder)
    problems: list[str] = []
    renamed: dict[str, str] = {}
    key_mapping = KeyMapping()
    quant = tensors = None
    try:
        quant = read_quant_config(folder, config)
    except CheckpointError as error:
        problems += error.problems
    try:
        tensors = open_tensors(folder)
        key_mapping = find_spelling(tensors.names(), problems)
        renamed = canonical_names(tensors.names(), key_mapping, problems)
    except CheckpointError as error:
        problems += error.problems
    if problems or quant is None or tensors is None:
        if tensors is not None:
            tensors.close()
        raise CheckpointError(problems, str(folder))
    tensors.rename(renamed)
    return Checkpoint(folder, config, tensors, quant, key_mapping)


class Weights:
    """What a model asks for its weights; see `load`.

    In the first pass the methods return `jax.ShapeDtypeStruct` in place of arrays and remember
    what is wrong; in the second, arrays where `LoadOptions.place` put them.
    """

    def __init__(self, checkpoint: Checkpoint, options: LoadOptions, reader: Reader | None):
        self.config = checkpoint.config
        self._where = str(checkpoint.folder)
        self._options = options
        self._reader = reader
        self._planner = Planner(checkpoint.tensors, checkpoint.quant, options.input_scales)
        self.requests = Requests()

    @property
    def reads(self) -> bool:
        """Whether this is the second pass, whose arrays have values."""
        return self._reader is not None

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

    def placing(self, place: Place) -> "Weights":
        """Return the same source with another `LoadOptions.place`."""
        other = copy.copy(self)
        other._options = dataclasses.replace(self._options, place=place)
        return other

    def ignore(self, prefix: str, reason: str) -> None:
        """Say that tensors whose names begin with `prefix` are knowingly left out, and why."""
        self._planner.ignore(list(self._planner.tensors.under(prefix)), reason)

    def array(
        self, name: str, shape: tuple[int, ...], *, dtype: Any = None, optional: bool = False
    ) -> Any:
        """Return the dense tensor `name`.

        Args:
          name: whole name, such as "model.norm.weight".
          shape: that it must have.
          dtype: of the result, `LoadOptions.dtype` where it is None. An integer dtype expects
            integers in the file, any other floats.
          optional: whether it may be missing; the result is None then.
        """
        if optional and name not in self._planner.tensors:
            return None
        buffer = self._planner.array(name, tuple(shape), dtype or self._options.dtype)
        return self._placed(name, self._array(buffer), None)

    def linear(
        self, prefix: str, n: int, k: int, *, bias: bool | None = False, dtype: Any = None
    ) -> LinearWeights:
        """Return the linear `prefix`, quantized or dense as the file has it.

        Args:
          prefix: module, such as "model.layers.0.self_attn.q_proj".
          n: outputs.
          k: inputs; a multiple of 16 where it is quantized.
          bias: whether it has one; None: if the file does.
          dtype: of dense arrays, `LoadOptions.dtype` where it is None.
        """
        self.requests.linears[prefix] = n, k
        plan = self._planner.linear(prefix, n, k, bias, dtype or self._options.dtype)
        value = self._linear(plan)
        return self._placed(prefix, value, plan.checkpoint_scheme)

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
    ) -> ExpertWeights:
        """Return the experts below `prefix` as the file has them, canonical or as placed.

        `MoEParams` where they are NVFP4, else `DenseExperts`.

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

        Names and layouts are those of `experts.PER_EXPERT` and the stacked forms. The rows come
        out as gate rows, then up rows, whatever the file has.
        """
        sizes = ExpertSizes(
            num_experts, hidden, intermediate, gated, bias, interleaved, inputs_first
        )
        self.requests.experts[prefix] = sizes
        plan = plan_experts(self._planner, prefix, sizes, self._options.dtype)
        if isinstance(plan, ExpertPlan):
            params = MoEParams(
                gate_up=self._weight(plan.gate_up),
                down=self._weight(plan.down),
                gate_up_input_scale=self._input_scale(plan.gate_up),
                down_input_scale=self._input_scale(plan.down),
                gate_up_bias=self._optional(plan.gate_up.bias),
                down_bias=self._optional(plan.down.bias),
            )
            return ExpertWeights(
                self._placed(prefix, params, plan.checkpoint_scheme), plan.checkpoint_scheme
            )
        checkpoint_scheme = plan.checkpoint_scheme if isinstance(plan, FP8ExpertPlan) else None
        return ExpertWeights(
            self._placed(prefix, self._dense_experts(plan), checkpoint_scheme), checkpoint_scheme
        )

    def dense_experts(
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
        dtype: Any = None,
    ) -> DenseExperts:
        """Return experts that are not quantized, as a quantizer needs them; else as `experts`.

        Args:
          prefix, num_experts, hidden, intermediate, gated, bias, interleaved: as for `experts`.
          inputs_first: whether stacked matrices are ``[e, k, n]`` (Llama 4, gpt-oss) or
            ``[e, n, k]``; None tells by the shapes, and refuses square ones.
          dtype: as for `array`.
        """
        sizes = ExpertSizes(
            num_experts, hidden, intermediate, gated, bias, interleaved, inputs_first
        )
        plan = plan_dense_experts(self._planner, prefix, sizes, dtype or self._options.dtype)
        return self._placed(prefix, self._dense_experts(plan), None)

    def cache_scales(self, prefix: str, **heads: int) -> CacheScales | None:
        """Return how the file rounds keys and values of an attention to FP8, None if it does not.

        Args:
          prefix: module, such as "model.layers.0.self_attn".
          heads: number of heads of what is kept, under "k" and "v".

        Scales that the file lacks are 1; those that are not positive and finite become 1.
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
        scales = {name: self._cache_scale(prefix, name, count) for name, count in heads.items()}
        return CacheScales(
            self._placed(f"{prefix} cache scales", scales, None), cache.multiply_by_reciprocal
        )

    def _cache_scale(self, prefix, name, heads):
        buffer = self._planner.cache_scale(prefix, name, heads)
        if self._reader is None:
            return self._array(buffer)
        scale = self._reader.read(buffer)
        if not buffer.pieces:
            scale[...] = 1
        valid = np.isfinite(scale) & (scale > 0)
        if not valid.all():
            log.warning("%s: a scale of %s is not a positive number and becomes 1", prefix, name)
        return np.where(valid, scale, np.float32(1))

    def _dense_experts(self, plan: DenseExpertPlan | FP8ExpertPlan) -> DenseExperts:
        if isinstance(plan, DenseExpertPlan):
            matrices = self._array(plan.gate_up), self._array(plan.down)
            scales = None, None
        else:
            matrices = self._fp8(plan.gate_up), self._fp8(plan.down)
            scales = self._input_scale(plan.gate_up), self._input_scale(plan.down)
        return DenseExperts(
            *matrices,
            self._optional(plan.gate_up_bias),
            self._optional(plan.down_bias),
            *scales,
            multiply_by_reciprocal=self._planner.names.fp8_by_factor,
        )

    def _linear(self, plan: LinearPlan) -> LinearWeights:
        bias = self._optional(plan.bias)
        quantized = plan.matrices or plan.fp8
        if quantized is None:
            assert plan.dense is not None
            return LinearWeights(self._array(plan.dense), bias)
        scale = self._input_scale(quantized)
        if isinstance(scale, jax.ShapeDtypeStruct):
            scale = jax.ShapeDtypeStruct((), scale.dtype)
        elif scale is not None:
            scale = scale.reshape(())
        weight = (
            self._fp8(quantized) if isinstance(quantized, FP8Matrices) else self._weight(quantized)
        )
        multiply_by_reciprocal = self._planner.names.fp8_by_factor
        return LinearWeights(weight, bias, scale, plan.checkpoint_scheme, multiply_by_reciprocal)

    def _array(self, buffer: Buffer) -> Any:
        if self._reader is None:
            return jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)
        return self._reader.array(buffer)

    def _optional(self, buffer: Buffer | None) -> Any:
        return None if buffer is None else self._array(buffer)

    def _weight(self, matrices: Matrices) -> NVFP4Tensor:
        if self._reader is not None:
            return self._reader.weight(matrices)
        scale = self._array(matrices.weight_global)
        return NVFP4Tensor(
            self._array(matrices.packed),
            self._array(matrices.block_scale),
            scale,
            scale if self._planner.names.divides else None,
        )

    def _fp8(self, matrices: FP8Matrices) -> FP8Tensor:
        if self._reader is not None:
            return self._reader.fp8(matrices)
        return FP8Tensor(self._array(matrices.values), self._array(matrices.scale))

    def _input_scale(self, matrices: Matrices | FP8Matrices) -> Any:
        if matrices.input_global is None:
            return None
        if self._reader is not None:
            return self._reader.input_scale(matrices, self._options.input_scales == "required")
        return jax.ShapeDtypeStruct(matrices.input_global.shape[:1], matrices.input_global.dtype)

    def _placed(self, name, value, checkpoint_scheme):
        if self._reader is None:
            return value
        self._reader.raise_problems(self._where)
        if self._options.place is None:
            return jax.device_put(value)
        placed = self._options.place(name, value, checkpoint_scheme)
        self._reader.raise_problems(self._where)  # of what was deferred
        return placed


def load(
    checkpoint: Checkpoint, build: Callable[[Weights], T], options: LoadOptions | None = None
) -> T:
    """Build a model from a checkpoint.

    Args:
      checkpoint: open.
      build: asks for its weights; called twice, with the same questions both times. Placeholders
        of the first call have a shape and a dtype, and no values.
      options: how to load.

    Returns:
      What the second call of `build` returns.

    Raises:
      CheckpointError: the first pass found tensors missing, misshapen or surplus, all of which
        are listed, or the second met a scale that is NaN or infinite.
    """
    options = options or LoadOptions()
    nbytes = check(checkpoint, build, options)
    with progress(options.progress, nbytes, options.label) as advance:
        reader = Reader(checkpoint.tensors, checkpoint.quant.names, advance, options.deferred)
        return build(Weights(checkpoint, options, reader))


def check(
    checkpoint: Checkpoint, build: Callable[[Weights], Any], options: LoadOptions | None = None
) -> int:
    """Run the first pass of `load` alone: read no tensor, raise all problems.

    Returns:
      Bytes that the second pass would read.

    Raises:
      CheckpointError: as `load`.
    """
    options = options or LoadOptions()
    weights = Weights(checkpoint, options, None)
    planner = weights._planner
    failure = None
    try:
        build(weights)
    except CheckpointError as error:
        planner.problems += error.problems
    except Exception as error:
        # A placeholder of a tensor that is wrong may break the model's own code.
        if not planner.problems:
            raise
        failure = error
    else:
        num_layers = options.num_layers or _num_layers(checkpoint.config)
        planner.problems += find_unexpected_keys(
            planner, checkpoint.key_mapping, options.only, num_layers
        )
    if planner.problems:
        raise CheckpointError(planner.problems, str(checkpoint.folder)) from failure
    for fact, count in planner.notes.items():
        log.info("%s: %s (%d)", checkpoint.folder, fact, count)
    return planner.nbytes


def _num_layers(config) -> int | None:
    value = merge_text_config(config).get("num_hidden_layers")
    return value if type(value) is int and value > 0 else None
