"""Look tensors up in the headers of a checkpoint, and collect everything that is wrong with them.

A load has two steps. The first finds the tensors of each weight, reads no values, and collects all
problems in one `Finder`. The second reads the values.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from jax_nvfp4_moe.checkpoint.formats.modelopt import MODELOPT
from jax_nvfp4_moe.checkpoint.formats.quantization import QuantConfig
from jax_nvfp4_moe.checkpoint.formats.rules import (
    WEIGHTS_ONLY,
    Decision,
    TensorNames,
)
from jax_nvfp4_moe.checkpoint.key_mapping import KeyMapping
from jax_nvfp4_moe.checkpoint.names import FP8_INPUT_SCALE, SCALE_NAMES
from jax_nvfp4_moe.checkpoint.reading.unread import Check, Piece, Shape, Unread
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES, TensorInfo, Tensors
from jax_nvfp4_moe.checkpoint.weights.stored_forms import (
    FLOATS,
    OF_WEIGHTS,
    StoredForm,
    Weight,
    find_forms,
    form_of,
)
from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Scheme

INTEGERS = ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "BOOL")
_F32 = np.dtype(np.float32)

# The declared schemes that round activations with scales from the file.
CALIBRATED = (Scheme.W4A4, FP8ActivationScaling.STATIC)
# The scheme of blocks that are stored but not declared.
_OF_BLOCKS = {StoredForm.BLOCKS: BlockFP8.SQUARE, StoredForm.MXFP8: BlockFP8.MX}

# Whether modules with a calibrated scheme must have input scales, may have them, or are read
# without them.
InputScales = Literal["required", "optional", "ignored"]


class Finder:
    """Looks up tensors, and keeps a record of the tensors taken and the problems found.

    Attributes:
      tensors: the tensors of the checkpoint.
      quant: the quantization config of the checkpoint.
      spell: returns the name of a tensor with the projections of experts as the file spells them.
      input_scales: whether modules with a calibrated scheme must have input scales; see
        `options.LoadOptions`.
      problems: sentences for a `CheckpointError`.
      notes: a fact for the log -> how often it was noted.
      warnings: a kind of difference between the configs and what is stored -> the modules that
        have it and a sentence about the first of them.
      taken: the names of the tensors that are used, or ignored on purpose.
      decisions: module -> how it is quantized and what decided that, for every module that was
        asked for. The experts of a layer are one entry, ``PREFIX.experts.*``.
      nbytes: the bytes of all tensors that are read.
      claimed: the prefixes of drafting layers that are loaded. Tensors below them that nobody takes
        are problems, and their modules need no input scales.
    """

    def __init__(
        self,
        tensors: Tensors,
        quant: QuantConfig,
        key_mapping: KeyMapping,
        input_scales: InputScales = "required",
    ):
        self.tensors = tensors
        self.quant = quant
        self.spell = key_mapping.spell
        self.input_scales = input_scales
        self.problems: list[str] = []
        self.notes: dict[str, int] = {}
        self.warnings: dict[str, tuple[set[str], str]] = {}
        self.taken: set[str] = set()
        self.decisions: dict[str, Decision] = {}
        self.nbytes = 0
        self.claimed: list[str] = []

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
        return self.tensors.find(name)

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
            self.problems.append(f"{quoted(self.spell(name))} is missing: expected {expected}")
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
        if forms and forms[0] in OF_WEIGHTS:
            choices = [self._of_weights(module, forms[0], choice) for choice in choices]
            forms = (StoredForm.NVFP4,)
        fitting = [choice for choice in choices if not forms or form_of(choice.scheme) in forms]
        if fitting:
            decision = self._without_label(module, fitting[0])
            return self._without_scale(module, decision, calibrated)
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

    def _of_weights(self, module, form, choice) -> Decision:
        """Return a choice for a form of `OF_WEIGHTS`: without activations, if it is FP4 at all."""
        if choice.scheme is not Scheme.W4A4:
            return choice
        self.warn(
            f"{form}, declared {choice.scheme}",
            module,
            f"{quoted(module)} holds {form} and is declared {choice.scheme} ({choice.source}): "
            f"activations are not rounded ({Scheme.W4A16})",
        )
        return Decision(Scheme.W4A16, f"{choice.source}, in {form}")

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

    def _without_scale(self, module, decision, calibrated) -> Decision:
        """Return a decision; of weights only in drafting layers that tools have not calibrated."""
        claimed = module.startswith(tuple(self.claimed))
        if not claimed or decision.scheme not in CALIBRATED or calibrated():
            return decision
        scheme = WEIGHTS_ONLY[decision.scheme]
        self.warn(
            "drafting layers without input scales",
            module,
            f"{quoted(module)} is declared {decision.scheme} ({decision.source}), but the file "
            "stores no input scale for this drafting layer: activations are not rounded "
            f"({scheme})",
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

    def reads_input_scale(self, checkpoint_scheme: CheckpointScheme) -> bool:
        """Return whether the load reads the input scales of a module with this scheme."""
        return self.input_scales != "ignored" and checkpoint_scheme in CALIBRATED

    def array(
        self,
        name: str,
        shape: Shape,
        dtype: Any,
        stored_shape: Shape | None = None,
        check: Check | None = None,
    ) -> Unread:
        """Find one array that is not quantized.

        Args:
          name: the name of the tensor.
          shape: the shape of the array.
          dtype: the dtype of the array. None keeps the dtype of the file.
          stored_shape: the shape that the tensor must have. None takes `shape`.
          check: as for `Unread`.
        """
        integer = dtype is not None and np.dtype(dtype).kind in "iub"
        info = self.take(name, INTEGERS if integer else FLOATS, stored_shape or shape)
        stored = STORED_TYPES[info.dtype].numpy if info else _F32
        piece = Piece(name, shape=shape if stored_shape else None)
        return Unread(shape, np.dtype(dtype or stored), [piece], check)
