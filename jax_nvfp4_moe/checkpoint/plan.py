"""Plan from the headers alone which tensors fill which arrays.

A load has two steps. The first makes the plan, reads no values, and collects everything that is
wrong with the headers. The second reads the tensors into the buffers of the plan.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import ml_dtypes
import numpy as np

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.formats import (
    CHANNEL_SCALE,
    FP8_INPUT_SCALE,
    FP8_SCALE,
    Decision,
    TensorNames,
)
from jax_nvfp4_moe.checkpoint.quantization import QuantConfig
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES, TensorInfo, Tensors
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Scheme

FLOATS = ("BF16", "F16", "F32", "F64")
INTEGERS = ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "BOOL")
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_F32 = np.dtype(np.float32)

# The declared schemes that round activations with scales from the file, and the dtypes that those
# scales may have.
_CALIBRATED = (Scheme.W4A4, FP8ActivationScaling.STATIC)
_SCALE_TYPES = {Scheme: ["F32"], FP8ActivationScaling: FLOATS}

# Whether modules with a calibrated scheme must have input scales, may have them, or are read
# without them.
InputScales = Literal["required", "optional", "ignored"]
Shape = tuple[int, ...]
Index = tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True)
class TensorSlice:
    """A stored tensor, or a part of it, and its place: ``buffer[at] = tensor[part]``, broadcast.

    Attributes:
      name: the name of the tensor.
      at: the index into the buffer.
      shape: the shape to which the tensor is reshaped first. None keeps its own shape.
      part: the index into the tensor. An empty index takes the whole tensor.
      swapped: whether the last two axes of the part are exchanged.
    """

    name: str
    at: Index = ()
    shape: Shape | None = None
    part: Index = ()
    swapped: bool = False


@dataclasses.dataclass
class Buffer:
    """An array to fill.

    Attributes:
      shape: the shape of the array.
      dtype: the dtype of the array. Slices that are stored in another dtype are converted.
      slices: the slices that fill the array. In a float32 array, elements without a slice are NaN.
    """

    shape: Shape
    dtype: np.dtype
    slices: list[TensorSlice] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Matrices:
    """The buffers of one NVFP4 weight ``[..., n, k]``.

    Attributes:
      label: the module of the weight, for messages.
      packed: uint8 ``[..., n, k/2]``.
      block_scale: float8_e4m3fn ``[..., n, k/16]``.
      weight_global: float32 ``[...]`` or ``[..., 2]``, as the file stores it. In some formats it is
        a divisor.
      input_global: float32 ``[e, parts]``, as the file stores it. None if input scales are not
        read.
      bias: float32 ``[..., n]``, or None.
    """

    label: str
    packed: Buffer
    block_scale: Buffer
    weight_global: Buffer
    input_global: Buffer | None = None
    bias: Buffer | None = None


@dataclasses.dataclass
class FP8Matrices:
    """The buffers of one FP8 weight ``[..., n, k]``.

    Attributes:
      label: the module of the weight, for messages.
      values: float8_e4m3fn ``[..., n, k]``.
      scale: float32 ``[..., n]``, or ``[..., n, ceil(k / 128)]`` if the file has scales of blocks.
      input_global: float32 ``[e, parts]``. None if input scales are not read.
    """

    label: str
    values: Buffer
    scale: Buffer
    input_global: Buffer | None = None


@dataclasses.dataclass
class LinearPlan:
    """The buffers of one linear. Exactly one of `matrices`, `fp8` and `dense` is set.

    Attributes:
      checkpoint_scheme: the scheme of the module. None if it is dense.
      matrices: the buffers of an NVFP4 weight. Its own `bias` is not used.
      fp8: the buffers of an FP8 weight.
      dense: ``[n, k]`` in a float dtype.
      bias: ``[n]``, or None.
      channel_scale: ``[k]``, factors of the inputs of an NVFP4 weight, or None.
    """

    checkpoint_scheme: CheckpointScheme
    matrices: Matrices | None = None
    fp8: FP8Matrices | None = None
    dense: Buffer | None = None
    bias: Buffer | None = None
    channel_scale: Buffer | None = None


class Planner:
    """Looks up tensors, and keeps a record of the tensors taken and the problems found.

    Attributes:
      tensors: the tensors of the checkpoint.
      quant: the quantization config of the checkpoint.
      input_scales: whether modules with a calibrated scheme must have input scales; see
        `options.LoadOptions`.
      problems: sentences for a `CheckpointError`.
      notes: a fact for the log -> how often it was noted.
      warnings: as `notes`, for facts that the user should know: the file and its configuration
        differ.
      taken: the names of the tensors that a plan uses or ignores on purpose.
      decisions: module -> how it is quantized and what decided that, for every module that a plan
        asked for. The experts of a layer are one entry, ``PREFIX.experts.*``.
      nbytes: the bytes of all tensors that the plans read.
    """

    def __init__(
        self, tensors: Tensors, quant: QuantConfig, input_scales: InputScales = "required"
    ):
        self.tensors = tensors
        self.quant = quant
        self.input_scales = input_scales
        self.problems: list[str] = []
        self.notes: dict[str, int] = {}
        self.warnings: dict[str, int] = {}
        self.taken: set[str] = set()
        self.decisions: dict[str, Decision] = {}
        self.nbytes = 0

    @property
    def names(self) -> TensorNames:
        """The names of a quantized linear's tensors."""
        return self.quant.names

    def note(self, fact: str) -> None:
        """Count `fact` for the log."""
        self.notes[fact] = self.notes.get(fact, 0) + 1

    def warn(self, fact: str) -> None:
        """Count `fact` for a warning."""
        self.warnings[fact] = self.warnings.get(fact, 0) + 1

    def find(self, name: str) -> TensorInfo | None:
        """Return what the header says about the tensor `name`, or None if it does not exist."""
        return self.tensors.info(name) if name in self.tensors else None

    def take(self, name: str, dtypes: Sequence[str], *shapes: Shape) -> TensorInfo | None:
        """Take the tensor `name`, which must have one of `dtypes` and one of `shapes`.

        Returns:
          What the header says about the tensor. None if it is missing or differs, which is added to
          the problems.
        """
        info = self.find(name)
        if info is not None:
            self.taken.add(name)
            if info.dtype in dtypes and info.shape in shapes:
                self.nbytes += info.nbytes
                return info
        expected = f"{' or '.join(dtypes)} {' or '.join(str(list(shape)) for shape in shapes)}"
        if info is None:
            self.problems.append(f"{quoted(name)} is missing: expected {expected}")
        else:
            self.problems.append(
                f"{quoted(info.name)} ({quoted(info.file)}): expected {expected}, got {info}"
            )
        return None

    def ignore(self, names: Iterable[str], reason: str) -> None:
        """Leave out those of the tensors `names` that exist, and note the reason."""
        for name in names:
            if name in self.tensors and name not in self.taken:
                self.taken.add(name)
                self.note(reason)

    def decide(self, module: str) -> Decision:
        """Return how `module` is quantized. Errors of the config are added to the problems."""
        try:
            return self.quant.decide(module)
        except CheckpointError as error:
            self.problems += error.problems
            return Decision(None, str(error))

    def checkpoint_scheme(self, module: str) -> CheckpointScheme:
        """Return the scheme of `module`, and record the decision in `decisions`."""
        self.decisions[module] = self.decide(module)
        return self.decisions[module].scheme

    def check_blocks(self, module: str, **sizes: int) -> None:
        """Add a problem for each of `sizes` that is not a multiple of 16."""
        for name, size in sizes.items():
            if size % BLOCK:
                self.problems.append(f"{module}: {name} = {size} is not a multiple of {BLOCK}")

    def needs_input_scale(self, checkpoint_scheme: CheckpointScheme) -> bool:
        """Return whether the load reads the input scales of a module with this scheme."""
        return self.input_scales != "ignored" and checkpoint_scheme in _CALIBRATED

    def take_packed(self, name: str, n: int, k: int) -> None:
        """Take the codes of one matrix ``[n, k]``, stored as bytes or as 4-bit elements."""
        info = self.find(name)
        if info is not None and info.dtype == "F4":
            self.take(name, ["F4"], (n, k))
        else:
            self.take(name, ["U8"], (n, k // 2))

    def array(
        self, name: str, shape: Shape, dtype: np.dtype | None, stored_shape: Shape | None = None
    ) -> Buffer:
        """Plan one dense array.

        If `dtype` is None, the array keeps the dtype of the file. If `stored_shape` is None, the
        tensor has the shape of the array.
        """
        integer = dtype is not None and np.dtype(dtype).kind in "iub"
        info = self.take(name, INTEGERS if integer else FLOATS, stored_shape or shape)
        stored = STORED_TYPES[info.dtype].numpy if info else _F32
        taken = TensorSlice(name, shape=shape if stored_shape else None)
        return Buffer(shape, np.dtype(dtype or stored), [taken])

    def linear(
        self, prefix: str, n: int, k: int, bias: bool | None, dtype: np.dtype | None
    ) -> LinearPlan:
        """Plan one linear, in the format in which the file stores it.

        Args:
          prefix: the module.
          n: the number of outputs.
          k: the number of inputs.
          bias: whether the linear has a bias. None takes a bias if the file has one.
          dtype: the dtype of dense arrays. None keeps the dtype of the file.
        """
        checkpoint_scheme = self.checkpoint_scheme(prefix)
        if checkpoint_scheme is not None and self._is_dense(prefix):
            self.note("modules declared quantized are stored dense and stay dense")
            source = f"stored dense, but declared quantized ({self.decisions[prefix].source})"
            self.decisions[prefix] = Decision(None, source)
            checkpoint_scheme = None
        plan = LinearPlan(checkpoint_scheme)
        if checkpoint_scheme is None:
            plan.dense = self._dense(prefix, n, k, dtype)
        elif isinstance(checkpoint_scheme, FP8ActivationScaling):
            plan.fp8 = empty_fp8_matrices(prefix, (), n, k, parts=1)
            self.take_fp8(prefix, plan.fp8, checkpoint_scheme, (n, k), (), (0, 0))
            self.check_calibrated(plan.fp8, checkpoint_scheme)
        else:
            plan.matrices = self._matrices(prefix, n, k, checkpoint_scheme)
            plan.channel_scale = self._optional_array(f"{prefix}.{CHANNEL_SCALE}", (k,), dtype)
        name = f"{prefix}.bias"
        if bias or (bias is None and name in self.tensors):
            plan.bias = self.array(name, (n,), dtype)
        return plan

    def _optional_array(self, name, shape, dtype) -> Buffer | None:
        """Plan one dense array, or return None if the file does not have it."""
        return self.array(name, shape, dtype) if name in self.tensors else None

    def take_fp8(
        self,
        module: str,
        matrices: FP8Matrices,
        checkpoint_scheme: FP8ActivationScaling,
        shape: tuple[int, int],
        at: Index,
        place: tuple[int, int],
    ) -> None:
        """Plan the FP8 matrix `module` ``[n, k]`` as the rows `at` of `matrices`.

        Args:
          module: the module, with the tensors ``weight`` and ``weight_scale``. The scale is one
            number or has one element per row.
          matrices: receives the slices.
          checkpoint_scheme: how activations are scaled before they are multiplied.
          shape: n and k.
          at: the index of the rows.
          place: the index of the input scale.
        """
        n, _ = shape
        scale = f"{module}.{FP8_SCALE}"
        self.take(f"{module}.weight", ["F8_E4M3"], shape)
        info = self.take(scale, FLOATS, (), (1,), (1, 1), (n,), (n, 1))
        single = info is None or math.prod(info.shape) == 1
        matrices.values.slices.append(TensorSlice(f"{module}.weight", at))
        matrices.scale.slices.append(TensorSlice(scale, at, () if single else (n,)))
        tensor_slice = TensorSlice("", place, ())
        self.input_scale(matrices, f"{module}.{FP8_INPUT_SCALE}", tensor_slice, checkpoint_scheme)

    def cache_scale(self, prefix: str, name: str, heads: int) -> Buffer:
        """Plan the scales with which an attention module stores its keys or values in FP8.

        Args:
          prefix: the attention module.
          name: "k" or "v".
          heads: the number of key and value heads.

        Returns:
          A buffer float32 ``[heads]``. It has no slice if the file has no such scale.
        """
        buffer = Buffer((heads,), _F32)
        for place in (f"{name}_proj.{name}_scale", f"{name}_scale", f"attn.{name}_scale"):
            found = f"{prefix}.{place}"
            if found in self.tensors:
                lengths = [(1,) * axes for axes in range(4)]
                lengths += [(heads, *(1,) * axes) for axes in range(3)]
                info = self.take(found, FLOATS, *lengths)
                single = info is None or math.prod(info.shape) == 1
                buffer.slices.append(TensorSlice(found, shape=() if single else (heads,)))
                break
        return buffer

    def _dense(self, prefix, n, k, dtype):
        """Plan the weight of a linear that is declared dense."""
        name = f"{prefix}.weight"
        info = self.find(name)
        if self._is_quantized(prefix):
            self.taken.update(self.tensors.under(f"{prefix}."))
            return Buffer((n, k), np.dtype(dtype or _F32))
        if info is not None:
            self.ignore(
                [f"{prefix}.{self.names.input_global}"], "input scales of dense modules are ignored"
            )
        return self.array(name, (n, k), dtype)

    def _is_quantized(self, prefix) -> bool:
        """Return whether `prefix`, which is declared dense, is stored quantized.

        If it is, a problem is added.
        """
        stored = self.find(f"{prefix}.{self.names.packed}") or self.find(f"{prefix}.weight")
        scaled = f"{prefix}.{self.names.block_scale}" in self.tensors
        held = {"U8": "NVFP4 codes", "F8_E4M3": "FP8 values"}.get(stored.dtype if stored else "")
        if held is None or not scaled:
            return False
        source = self.decisions[prefix].source
        self.problems.append(f"{quoted(prefix)} holds {held} but is declared dense ({source})")
        return True

    def _is_dense(self, prefix):
        """Return whether the weight of `prefix` is stored in a float dtype without block scales."""
        info = self.find(f"{prefix}.weight")
        scaled = f"{prefix}.{self.names.block_scale}" in self.tensors
        return info is not None and info.dtype in FLOATS and not scaled

    def _matrices(self, prefix, n, k, checkpoint_scheme):
        """Plan the weight of a linear in NVFP4."""
        names = self.names
        self.check_blocks(quoted(prefix), k=k)
        matrices = empty_matrices(prefix, (), n, k, parts=1)
        self.take_packed(f"{prefix}.{names.packed}", n, k)
        self.take(f"{prefix}.{names.block_scale}", ["F8_E4M3"], (n, k // BLOCK))
        self.take(f"{prefix}.{names.weight_global}", ["F32"], (), (1,))
        matrices.packed.slices.append(TensorSlice(f"{prefix}.{names.packed}"))
        matrices.block_scale.slices.append(TensorSlice(f"{prefix}.{names.block_scale}"))
        matrices.weight_global.slices.append(
            TensorSlice(f"{prefix}.{names.weight_global}", shape=())
        )
        self.input_scale(
            matrices,
            f"{prefix}.{names.input_global}",
            TensorSlice("", (0, 0), ()),
            checkpoint_scheme,
        )
        self.check_calibrated(matrices, checkpoint_scheme)
        return matrices

    def input_scale(
        self,
        matrices: Matrices | FP8Matrices,
        name: str,
        tensor_slice: TensorSlice,
        checkpoint_scheme: CheckpointScheme,
        *shapes: Shape,
    ) -> None:
        """Plan the input scale `name`, which may be missing in the file.

        Args:
          matrices: receives the slice. Its buffer of input scales is removed if the load reads
            none.
          name: the name of the tensor.
          tensor_slice: the place of the scale; its name is ignored.
          checkpoint_scheme: the scheme of the module.
          shapes: the shapes that the tensor may have. Without any, it must hold one number.
        """
        if not self.needs_input_scale(checkpoint_scheme):
            matrices.input_global = None
            reason = "this load does not round activations"
            if checkpoint_scheme not in _CALIBRATED:
                weights = checkpoint_scheme in (Scheme.W4A16, FP8ActivationScaling.WEIGHTS)
                declared = "quantized weights only" if weights else "dynamic input scales"
                reason = f"the checkpoint declares {declared}"
            self.ignore([name], f"input scales are ignored: {reason}")
        elif name in self.tensors and self.take(
            name, _SCALE_TYPES[type(checkpoint_scheme)], *(shapes or ((), (1,), (1, 1)))
        ):
            assert matrices.input_global is not None
            matrices.input_global.slices.append(dataclasses.replace(tensor_slice, name=name))

    def check_calibrated(
        self, matrices: Matrices | FP8Matrices, checkpoint_scheme: CheckpointScheme
    ) -> None:
        """Remove the buffer of input scales if the file has none, which may be a problem.

        It is a problem if the module has a calibrated scheme and `input_scales` is "required".
        """
        if matrices.input_global is None or matrices.input_global.slices:
            return
        matrices.input_global = None
        if self.input_scales == "required" and checkpoint_scheme in _CALIBRATED:
            name = (
                FP8_INPUT_SCALE
                if isinstance(checkpoint_scheme, FP8ActivationScaling)
                else self.names.input_global
            )
            self.problems.append(
                f"{quoted(matrices.label)} is declared {checkpoint_scheme}, but the file has no "
                f"input scales for it; expected tensors named {name}"
            )


def empty_fp8_matrices(label: str, lead: Shape, n: int, k: int, parts: int) -> FP8Matrices:
    """Return the buffers of an FP8 weight ``[*lead, n, k]`` without the slices that fill them.

    The arguments are those of `empty_matrices`.
    """
    return FP8Matrices(
        label,
        Buffer((*lead, n, k), _E4M3),
        Buffer((*lead, n), _F32),
        Buffer((*(lead or (1,)), parts), _F32),
    )


def empty_matrices(label: str, lead: Shape, n: int, k: int, parts: int) -> Matrices:
    """Return the buffers of an NVFP4 weight ``[*lead, n, k]`` without the slices that fill them.

    Args:
      label: the module of the weight, for messages.
      lead: ``()`` for one matrix, ``(e,)`` for those of e experts.
      n: the number of rows.
      k: the number of columns. It is rounded up to whole blocks here; `Planner.check_blocks`
        reports the problem.
      parts: 2 if gate and up have separate global scales, else 1.
    """
    k = -(-k // BLOCK) * BLOCK
    globals_shape = (*lead, parts) if parts > 1 else lead
    return Matrices(
        label=label,
        packed=Buffer((*lead, n, k // 2), np.dtype(np.uint8)),
        block_scale=Buffer((*lead, n, k // BLOCK), _E4M3),
        weight_global=Buffer(globals_shape, _F32),
        input_global=Buffer((*(lead or (1,)), parts), _F32),
    )
