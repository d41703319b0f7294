"""Plan from the headers alone which tensors fill which arrays.

A load has two steps. The first makes the plan, reads no values, and collects everything that is
wrong with the headers. The second reads the tensors into the buffers of the plan.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import ml_dtypes
import numpy as np

from jax_nvfp4_moe.checkpoint.compressed_tensors import COMPRESSED_TENSORS
from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.formats import (
    CHANNEL_SCALE,
    FP8_INPUT_SCALE,
    FP8_SCALE,
    WEIGHTS_ONLY,
    Decision,
    TensorNames,
)
from jax_nvfp4_moe.checkpoint.modelopt import MODELOPT
from jax_nvfp4_moe.checkpoint.quantization import QuantConfig
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES, TensorInfo, Tensors
from jax_nvfp4_moe.checkpoint.stored_forms import (
    FLOATS,
    StoredForm,
    Weight,
    find_forms,
    form_of,
)
from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Scheme

INTEGERS = ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "BOOL")
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_F32 = np.dtype(np.float32)

# The declared schemes that round activations with scales from the file, and the dtypes that those
# scales may have.
_CALIBRATED = (Scheme.W4A4, FP8ActivationScaling.STATIC)
_SCALE_TYPES = {Scheme: ["F32"], FP8ActivationScaling: FLOATS}
# The names of the scales of FP8 values. "inv" is a misnomer of DeepSeek's: it multiplies as well.
SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale")
# The scheme of blocks that are stored but not declared.
_OF_BLOCKS = {StoredForm.BLOCKS: BlockFP8.SQUARE, StoredForm.MXFP8: BlockFP8.MX}

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
      warnings: a kind of difference between the configs and what is stored -> the modules that
        have it and a sentence about the first of them.
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
        self.warnings: dict[str, tuple[set[str], str]] = {}
        self.taken: set[str] = set()
        self.decisions: dict[str, Decision] = {}
        self.nbytes = 0

    @functools.cached_property
    def names(self) -> TensorNames:
        """The names of a quantized linear's tensors: those of the config, if the file has them.

        Tools convert files, and leave the config of another tool behind.
        """
        own, packed = self.quant.names, COMPRESSED_TENSORS.names.packed
        second = MODELOPT.names.weight_global
        endings = {name.rpartition(".")[2] for name in self.tensors.names()}
        if second in endings and packed not in endings:
            found = MODELOPT.names
        elif packed in endings and second not in endings:
            found = COMPRESSED_TENSORS.names
        else:
            return own
        if found != own and self.quant.format is not None:
            said = self.quant.format.name
            self.warn(
                "names",
                "",
                f"the config is that of {said}, but tensors have names such as "
                f"{found.packed} and {found.weight_global}: they are read by their names",
            )
        return found

    def note(self, fact: str) -> None:
        """Count `fact` for the log."""
        self.notes[fact] = self.notes.get(fact, 0) + 1

    def warn(self, kind: str, module: str, sentence: str) -> None:
        """Keep a sentence about `module` for the log. Of each kind, the first sentence is shown."""
        self.warnings.setdefault(kind, (set(), sentence))[0].add(module)

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

    def decide(
        self, module: str, forms: Sequence[StoredForm], calibrated: Callable[[], bool]
    ) -> Decision:
        """Return how `module` is quantized: what is stored decides, and then the configs.

        A difference between them becomes a warning. Errors of the configs are problems.

        Args:
          module: the module.
          forms: the forms that its stored weight may have. Without any, the configs decide alone.
          calibrated: tells whether the module has an input scale.
        """
        try:
            choices = self.quant.choices(module)
        except CheckpointError as error:
            self.problems += error.problems
            return Decision(None, str(error))
        fitting = [choice for choice in choices if not forms or form_of(choice.scheme) in forms]
        if fitting:
            return self._without_label(module, fitting[0])
        declared = choices[0]
        if StoredForm.DENSE in forms:
            source = f"stored dense, but declared quantized ({declared.source})"
            if declared.scheme is not BlockFP8.SQUARE:  # the tensors tell which linears are FP8
                self.warn(
                    f"stored dense, declared {declared.scheme}",
                    module,
                    f"{quoted(module)} is stored in floats but declared {declared.scheme} "
                    f"({declared.source}): it stays in floats",
                )
            return Decision(None, source)
        scheme = self._scheme_of(forms, calibrated)
        said = declared.scheme or "dense"
        self.warn(
            f"stored {forms[0]}, declared {said}",
            module,
            f"{quoted(module)} holds {forms[0]} but is declared {said} ({declared.source}): what "
            f"is stored decides, and it is read as {scheme}",
        )
        return Decision(scheme, f"holds {forms[0]}, but declared {said} ({declared.source})")

    def _scheme_of(self, forms, calibrated) -> CheckpointScheme:
        """Return the scheme of a module whose stored form is not the declared one."""
        form = forms[0]
        if form in _OF_BLOCKS:
            return _OF_BLOCKS[form]
        declared = [scheme for scheme in self.quant.schemes if form_of(scheme) is form]
        if form is StoredForm.NVFP4:
            only_weights = bool(declared) and Scheme.W4A4 not in declared
            return Scheme.W4A4 if calibrated() and not only_weights else Scheme.W4A16
        scheme = declared[0] if declared else FP8ActivationScaling.STATIC
        static = scheme is FP8ActivationScaling.STATIC
        return FP8ActivationScaling.WEIGHTS if static and not calibrated() else scheme

    def _without_label(self, module, decision) -> Decision:
        """Return a decision; of weights only if a mere label says more, and no scale is stored."""
        if not decision.labelled or form_of(decision.scheme) in self._calibrated_forms:
            return decision
        scheme = WEIGHTS_ONLY[decision.scheme]
        self.warn(
            f"labelled {decision.scheme}",
            module,
            f"{quoted(module)} is labelled {decision.scheme} ({decision.source}), but the file "
            f"stores no input scale for any such module: activations are not rounded ({scheme})",
        )
        return Decision(scheme, f"{decision.source}, but no input scale is stored")

    @functools.cached_property
    def _calibrated_forms(self) -> frozenset[StoredForm]:
        """The forms of weights that have an input scale anywhere in the file."""
        kinds = {"U8": StoredForm.NVFP4, "F4": StoredForm.NVFP4, "F8_E4M3": StoredForm.FP8}
        found = set()
        for name in self.tensors.names():
            stem = name.removesuffix(FP8_INPUT_SCALE)
            if stem == name:
                continue
            weight = self.find(f"{stem}weight") or self.find(stem[:-1])
            found.add(kinds.get(weight.dtype) if weight else None)
        return frozenset(filter(None, found))

    def forms(self, module: str) -> tuple[StoredForm, ...]:
        """Return the forms that the stored weight of a linear may have; see `find_forms`."""
        names = self.names
        packed = self.find(f"{module}.{names.packed}")
        if packed is not None and packed.dtype not in ("F8_E4M3", *FLOATS):
            return find_forms(Weight(packed, self.find(f"{module}.{names.block_scale}")))
        scales = (self.find(f"{module}.{name}") for name in SCALE_NAMES)
        return find_forms(Weight(self.find(f"{module}.weight"), next(filter(None, scales), None)))

    def has_input_scale(self, module: str) -> bool:
        """Return whether the file has an input scale for a linear."""
        names = (self.names.input_global, FP8_INPUT_SCALE)
        return any(f"{module}.{name}" in self.tensors for name in names)

    def checkpoint_scheme(self, module: str) -> CheckpointScheme:
        """Return the scheme of a linear, and record the decision in `decisions`."""
        decision = self.decide(module, self.forms(module), lambda: self.has_input_scale(module))
        self.decisions[module] = decision
        return decision.scheme

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

    def _dense(self, prefix, n, k, dtype):
        """Plan the weight of a linear that is declared dense."""
        name = f"{prefix}.weight"
        if self.find(name) is not None:
            self.ignore(
                [f"{prefix}.{self.names.input_global}"], "input scales of dense modules are ignored"
            )
        return self.array(name, (n, k), dtype)

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
