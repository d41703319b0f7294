"""Plan, from headers alone, which tensors fill which arrays; nothing is read here.

Both passes of a load make the same plans: the first only looks at what they found wrong, the
second fills their buffers.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import ml_dtypes
import numpy as np

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.formats import FP8_INPUT_SCALE, FP8_SCALE, Decision, TensorNames
from jax_nvfp4_moe.checkpoint.quantization import QuantConfig
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES, TensorInfo, Tensors
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Scheme

FLOATS = ("BF16", "F16", "F32", "F64")
INTEGERS = ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "BOOL")
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_F32 = np.dtype(np.float32)

# Declared schemes that round activations with scales in the file, and the dtypes of those.
_CALIBRATED = (Scheme.W4A4, FP8ActivationScaling.STATIC)
_SCALE_TYPES = {Scheme: ["F32"], FP8ActivationScaling: FLOATS}

# Of modules that declare such a scheme: there must be one, there may be one, none is read.
InputScales = Literal["required", "optional", "ignored"]
Shape = tuple[int, ...]
Index = tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True)
class TensorSlice:
    """One stored tensor, or a part of it, and its place: ``buffer[at] = tensor[part]``, broadcast.

    Attributes:
      name: of the tensor.
      at: index into the buffer.
      shape: that the tensor takes first, None for its own.
      part: index into the tensor, all of it where it is empty.
      swapped: whether the part's last two axes are exchanged.
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
      shape: of the array.
      dtype: of the array; slices stored in another are converted.
      slices: what fills it; elements that no slice covers are NaN.
    """

    shape: Shape
    dtype: np.dtype
    slices: list[TensorSlice] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Matrices:
    """Buffers of one NVFP4 weight ``[..., n, k]``.

    Attributes:
      label: its module, for messages.
      packed: uint8 ``[..., n, k/2]``.
      block_scale: float8_e4m3fn ``[..., n, k/16]``.
      weight_global: float32 ``[...]`` or ``[..., 2]`` as stored: it may divide.
      input_global: float32 ``[e, parts]`` as stored, or None where it is not wanted.
      bias: float32 ``[..., n]`` or None.
    """

    label: str
    packed: Buffer
    block_scale: Buffer
    weight_global: Buffer
    input_global: Buffer | None = None
    bias: Buffer | None = None


@dataclasses.dataclass
class FP8Matrices:
    """Buffers of one FP8 weight ``[..., n, k]``.

    Attributes:
      label: its module, for messages.
      values: float8_e4m3fn ``[..., n, k]``.
      scale: float32 ``[..., n]``.
      input_global: float32 ``[e, parts]``, or None where it is not wanted.
    """

    label: str
    values: Buffer
    scale: Buffer
    input_global: Buffer | None = None


@dataclasses.dataclass
class LinearPlan:
    """Buffers of one linear: one of `matrices`, `fp8` and `dense` is set.

    Attributes:
      checkpoint_scheme: scheme of the module, None where it is dense.
      matrices: of an NVFP4 weight; its bias is the plan's.
      fp8: of an FP8 weight.
      dense: ``[n, k]`` in a float dtype.
      bias: ``[n]`` or None.
    """

    checkpoint_scheme: CheckpointScheme
    matrices: Matrices | None = None
    fp8: FP8Matrices | None = None
    dense: Buffer | None = None
    bias: Buffer | None = None


class Planner:
    """Looks tensors up, and remembers which were taken and what was wrong.

    Attributes:
      tensors: of the checkpoint.
      quant: its quantization config.
      input_scales: whether modules that declare W4A4 must have them; see `InputScales`.
      problems: sentences for a `CheckpointError`.
      notes: fact -> how often; for the log.
      taken: names of the tensors that a plan uses or knowingly ignores.
      decisions: module -> how it is quantized and what said so, of all that a plan asked about;
        the experts of a layer as one, ``PREFIX.experts.*``.
    """

    def __init__(
        self, tensors: Tensors, quant: QuantConfig, input_scales: InputScales = "required"
    ):
        self.tensors = tensors
        self.quant = quant
        self.input_scales = input_scales
        self.problems: list[str] = []
        self.notes: dict[str, int] = {}
        self.taken: set[str] = set()
        self.decisions: dict[str, Decision] = {}
        self.nbytes = 0  # of the tensors that plans read

    @property
    def names(self) -> TensorNames:
        """Names of the tensors of a quantized linear."""
        return self.quant.names

    def note(self, fact: str) -> None:
        """Count `fact` for the log."""
        self.notes[fact] = self.notes.get(fact, 0) + 1

    def find(self, name: str) -> TensorInfo | None:
        """Return what the header says of `name`, None if there is no such tensor."""
        return self.tensors.info(name) if name in self.tensors else None

    def take(self, name: str, dtypes: Sequence[str], *shapes: Shape) -> TensorInfo | None:
        """Take the tensor `name`, which must have one of `dtypes` and one of `shapes`.

        Returns:
          Its info; None where it is missing or differs, which is then one of the problems.
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
        """Leave out the tensors `names`, those that exist, and note why."""
        for name in names:
            if name in self.tensors and name not in self.taken:
                self.taken.add(name)
                self.note(reason)

    def decide(self, module: str) -> Decision:
        """Return how `module` is quantized; what is wrong with it becomes a problem."""
        try:
            return self.quant.decide(module)
        except CheckpointError as error:
            self.problems += error.problems
            return Decision(None, str(error))

    def checkpoint_scheme(self, module: str) -> CheckpointScheme:
        """Return the scheme of `module`, and enter it into the table of decisions."""
        self.decisions[module] = self.decide(module)
        return self.decisions[module].scheme

    def check_blocks(self, module: str, **sizes: int) -> None:
        """Add a problem for each of `sizes` that blocks of 16 do not divide."""
        for name, size in sizes.items():
            if size % BLOCK:
                self.problems.append(f"{module}: {name} = {size} is not a multiple of {BLOCK}")

    def needs_input_scale(self, checkpoint_scheme: CheckpointScheme) -> bool:
        """Whether the input scales of a module with this scheme are read."""
        return self.input_scales != "ignored" and checkpoint_scheme in _CALIBRATED

    def take_packed(self, name: str, n: int, k: int) -> None:
        """Take the codes of one matrix ``[n, k]``, as bytes or as 4-bit elements."""
        info = self.find(name)
        if info is not None and info.dtype == "F4":
            self.take(name, ["F4"], (n, k))
        else:
            self.take(name, ["U8"], (n, k // 2))

    def array(self, name: str, shape: Shape, dtype: np.dtype | None) -> Buffer:
        """Plan one dense array; `dtype` None keeps that of the file."""
        integer = dtype is not None and np.dtype(dtype).kind in "iub"
        info = self.take(name, INTEGERS if integer else FLOATS, shape)
        stored = STORED_TYPES[info.dtype].numpy if info else _F32
        return Buffer(shape, np.dtype(dtype or stored), [TensorSlice(name)])

    def linear(
        self, prefix: str, n: int, k: int, bias: bool | None, dtype: np.dtype | None
    ) -> LinearPlan:
        """Plan one linear with weight ``[n, k]``; `bias` None takes one if there is one."""
        checkpoint_scheme = self.checkpoint_scheme(prefix)
        if checkpoint_scheme is not None and self._is_dense(prefix):
            self.note("modules declared quantized are stored dense and stay dense")
            source = f"stored dense, though declared ({self.decisions[prefix].source})"
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
        name = f"{prefix}.bias"
        if bias or (bias is None and name in self.tensors):
            plan.bias = self.array(name, (n,), dtype)
        return plan

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
          module: holds ``weight``, and ``weight_scale``: one number, or one of each row.
          matrices: takes the slices.
          checkpoint_scheme: how activations enter the product.
          shape: n and k.
          at: index of the rows.
          place: of the input scale.
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
        """Plan the scale of what `prefix` keeps as `name`, "k" or "v"; no slice if there is none.

        Returns:
          float32 ``[heads]``.
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
        name = f"{prefix}.weight"
        info = self.find(name)
        if self._is_quantized(prefix):
            self.taken.update(self.tensors.under(f"{prefix}."))
            return Buffer((n, k), np.dtype(dtype or _F32))
        if info is not None:
            self.ignore([f"{prefix}.{self.names.input_global}"], "input scales of dense modules")
        return self.array(name, (n, k), dtype)

    def _is_quantized(self, prefix) -> bool:
        """Whether `prefix`, declared dense, is stored quantized, which is then a problem."""
        stored = self.find(f"{prefix}.{self.names.packed}") or self.find(f"{prefix}.weight")
        scaled = f"{prefix}.{self.names.block_scale}" in self.tensors
        held = {"U8": "NVFP4 codes", "F8_E4M3": "FP8 values"}.get(stored.dtype if stored else "")
        if held is None or not scaled:
            return False
        source = self.decisions[prefix].source
        self.problems.append(f"{quoted(prefix)} holds {held} but is declared dense ({source})")
        return True

    def _is_dense(self, prefix):
        info = self.find(f"{prefix}.weight")
        scaled = f"{prefix}.{self.names.block_scale}" in self.tensors
        return info is not None and info.dtype in FLOATS and not scaled

    def _matrices(self, prefix, n, k, checkpoint_scheme):
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
        """Plan the input scale `name`, which may be missing, at `tensor_slice`.

        Args:
          matrices: takes the slice; without a buffer where the scale is not wanted.
          name: of the tensor.
          tensor_slice: its place.
          checkpoint_scheme: scheme of the module.
          shapes: allowed ones; one number where none is given.
        """
        if not self.needs_input_scale(checkpoint_scheme):
            matrices.input_global = None
            reason = "this load does not round activations"
            if checkpoint_scheme not in _CALIBRATED:
                weights = checkpoint_scheme in (Scheme.W4A16, FP8ActivationScaling.WEIGHTS)
                reason = f"the checkpoint declares {'weights only' if weights else 'dynamic ones'}"
            self.ignore([name], f"input scales are ignored: {reason}")
        elif name in self.tensors and self.take(
            name, _SCALE_TYPES[type(checkpoint_scheme)], *(shapes or ((), (1,), (1, 1)))
        ):
            assert matrices.input_global is not None
            matrices.input_global.slices.append(dataclasses.replace(tensor_slice, name=name))

    def check_calibrated(
        self, matrices: Matrices | FP8Matrices, checkpoint_scheme: CheckpointScheme
    ) -> None:
        """Drop the buffer of input scales where there is none at all; a problem if required."""
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
                f"{quoted(matrices.label)}: declared {checkpoint_scheme} but has no input scales "
                f"({name})"
            )


def empty_fp8_matrices(label: str, lead: Shape, n: int, k: int, parts: int) -> FP8Matrices:
    """Return buffers without slices for ``[*lead, n, k]``; arguments as for `empty_matrices`."""
    return FP8Matrices(
        label,
        Buffer((*lead, n, k), _E4M3),
        Buffer((*lead, n), _F32),
        Buffer((*(lead or (1,)), parts), _F32),
    )


def empty_matrices(label: str, lead: Shape, n: int, k: int, parts: int) -> Matrices:
    """Return buffers without slices for ``[*lead, n, k]``.

    Args:
      label: the module, for messages.
      lead: ``()`` or ``(e,)``.
      n: rows.
      k: columns; rounded up to whole blocks, a problem reported elsewhere.
      parts: 2 where gate and up have global scales of their own, else 1.
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
