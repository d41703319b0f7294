"""Plan, from headers alone, which tensors fill which arrays; nothing is read here.

Both passes of a load make the same plans: the first only looks at what they found wrong, the
second fills their buffers.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

import ml_dtypes
import numpy as np

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.forms import TensorNames
from jax_nvfp4_moe.checkpoint.quantization import QuantConfig
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES, TensorInfo, Tensors
from jax_nvfp4_moe.formats import BLOCK
from jax_nvfp4_moe.scheme import Scheme

FLOATS = ("BF16", "F16", "F32", "F64")
INTEGERS = ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "BOOL")
_BLOCK_SCALE = np.dtype(ml_dtypes.float8_e4m3fn)
_F32 = np.dtype(np.float32)

# Of modules that declare W4A4: there must be one, there may be one, none is read.
InputScales = Literal["required", "optional", "ignored"]
Shape = tuple[int, ...]
Index = tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True)
class Piece:
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
      dtype: of the array; pieces stored in another are converted.
      pieces: what fills it; elements that no piece covers are NaN.
    """

    shape: Shape
    dtype: np.dtype
    pieces: list[Piece] = dataclasses.field(default_factory=list)


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
class LinearPlan:
    """Buffers of one linear: either `matrices` or `dense` is set.

    Attributes:
      declared: scheme of the module, None where it is dense.
      matrices: of an NVFP4 weight; its bias is the plan's.
      dense: ``[n, k]`` in a float dtype.
      bias: ``[n]`` or None.
    """

    declared: Scheme | None
    matrices: Matrices | None = None
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

    def declared(self, module: str) -> Scheme | None:
        """Return the scheme of `module`; what is wrong with it becomes a problem."""
        try:
            return self.quant.declared(module)
        except CheckpointError as error:
            self.problems += error.problems
            return None

    def check_blocks(self, module: str, **sizes: int) -> None:
        """Add a problem for each of `sizes` that blocks of 16 do not divide."""
        for name, size in sizes.items():
            if size % BLOCK:
                self.problems.append(f"{module}: {name} = {size} is not a multiple of {BLOCK}")

    def needs_input_scale(self, declared: Scheme | None) -> bool:
        """Whether the input scales of a module with this scheme are read."""
        return self.input_scales != "ignored" and declared is Scheme.W4A4

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
        return Buffer(shape, np.dtype(dtype or stored), [Piece(name)])

    def linear(
        self, prefix: str, n: int, k: int, bias: bool | None, dtype: np.dtype | None
    ) -> LinearPlan:
        """Plan one linear with weight ``[n, k]``; `bias` None takes one if there is one."""
        declared = self.declared(prefix)
        if declared is not None and self._is_dense(prefix):
            self.note("modules declared NVFP4 are stored dense and stay dense")
            declared = None
        plan = LinearPlan(declared)
        if declared is None:
            plan.dense = self._dense(prefix, n, k, dtype)
        else:
            plan.matrices = self._matrices(prefix, n, k, declared)
        name = f"{prefix}.bias"
        if bias or (bias is None and name in self.tensors):
            plan.bias = self.array(name, (n,), dtype)
        return plan

    def _dense(self, prefix, n, k, dtype):
        name = f"{prefix}.weight"
        info = self.find(name)
        stored = self.find(f"{prefix}.{self.names.packed}")
        scaled = f"{prefix}.{self.names.block_scale}" in self.tensors
        if stored is not None and stored.dtype == "U8" and scaled:
            self.problems.append(
                f"{quoted(prefix)} holds NVFP4 codes but is declared dense "
                f"({', '.join(rules.source for rules in self.quant.rules) or 'no quantization'})"
            )
            self.taken.update(self.tensors.under(f"{prefix}."))
            return Buffer((n, k), np.dtype(dtype or _F32))
        if info is not None:
            self.ignore([f"{prefix}.{self.names.input_global}"], "input scales of dense modules")
        return self.array(name, (n, k), dtype)

    def _is_dense(self, prefix):
        info = self.find(f"{prefix}.weight")
        scaled = f"{prefix}.{self.names.block_scale}" in self.tensors
        return info is not None and info.dtype in FLOATS and not scaled

    def _matrices(self, prefix, n, k, declared):
        names = self.names
        self.check_blocks(quoted(prefix), k=k)
        matrices = empty_matrices(prefix, (), n, k, parts=1)
        self.take_packed(f"{prefix}.{names.packed}", n, k)
        self.take(f"{prefix}.{names.block_scale}", ["F8_E4M3"], (n, k // BLOCK))
        self.take(f"{prefix}.{names.weight_global}", ["F32"], (), (1,))
        matrices.packed.pieces.append(Piece(f"{prefix}.{names.packed}"))
        matrices.block_scale.pieces.append(Piece(f"{prefix}.{names.block_scale}"))
        matrices.weight_global.pieces.append(Piece(f"{prefix}.{names.weight_global}", shape=()))
        self.input_scale(
            matrices, f"{prefix}.{names.input_global}", Piece("", (0, 0), ()), declared
        )
        self.check_calibrated(matrices, declared)
        return matrices

    def input_scale(
        self, matrices: Matrices, name: str, piece: Piece, declared: Scheme | None, *shapes: Shape
    ) -> None:
        """Plan the input scale `name`, which may be missing, at `piece`.

        Args:
          matrices: takes the piece; without a buffer where the scale is not wanted.
          name: of the tensor.
          piece: its place.
          declared: scheme of the module.
          shapes: allowed ones; one number where none is given.
        """
        if not self.needs_input_scale(declared):
            matrices.input_global = None
            reason = "this load does not round activations"
            if declared is Scheme.W4A16:
                reason = "the checkpoint declares weights only"
            self.ignore([name], f"input scales are ignored: {reason}")
        elif name in self.tensors and self.take(name, ["F32"], *(shapes or ((), (1,)))):
            assert matrices.input_global is not None
            matrices.input_global.pieces.append(dataclasses.replace(piece, name=name))

    def check_calibrated(self, matrices: Matrices, declared: Scheme | None) -> None:
        """Drop the buffer of input scales where there is none at all; a problem if required."""
        if matrices.input_global is None or matrices.input_global.pieces:
            return
        matrices.input_global = None
        if self.input_scales == "required" and declared is Scheme.W4A4:
            self.problems.append(
                f"{quoted(matrices.label)}: declared w4a4 but has no input scales "
                f"({self.names.input_global})"
            )


def empty_matrices(label: str, lead: Shape, n: int, k: int, parts: int) -> Matrices:
    """Return buffers without pieces for ``[*lead, n, k]``.

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
        block_scale=Buffer((*lead, n, k // BLOCK), _BLOCK_SCALE),
        weight_global=Buffer(globals_shape, _F32),
        input_global=Buffer((*(lead or (1,)), parts), _F32),
    )
