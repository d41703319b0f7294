"""Survey a checkpoint that is refused: find the modules that can be read all the same.

The survey knows no architecture. It takes the modules and their sizes from the headers, and finds
each of them as a load would. No value is read.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any, Literal

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.experts.finding import find_experts
from jax_nvfp4_moe.checkpoint.folder import find_folder, read_config, read_num_layers
from jax_nvfp4_moe.checkpoint.formats.quantization import QuantConfig, read_quant_config
from jax_nvfp4_moe.checkpoint.key_mapping import canonical_names, find_key_mapping
from jax_nvfp4_moe.checkpoint.names import PROJECTIONS
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES, open_tensors
from jax_nvfp4_moe.checkpoint.weights.by_format import find_linear
from jax_nvfp4_moe.checkpoint.weights.finder import FLOATS, INTEGERS, Finder
from jax_nvfp4_moe.checkpoint.weights.projections import is_stacked, packed_name
from jax_nvfp4_moe.checkpoint.weights.requests import ExpertSizes
from jax_nvfp4_moe.checkpoint.weights.unexpected_keys import known_extra
from jax_nvfp4_moe.numerics.tensor import MoEParams
from jax_nvfp4_moe.scheme import Scheme

_EXPERTS = re.compile(r"(?:^|.*?\.)experts(?=\.)")
_PLAIN = (*FLOATS, *(dtype for dtype in INTEGERS if dtype not in ("U8", "I8")))
_TWO_CODES = ("U8", "I8")  # a byte with two 4-bit codes

Verdict = Literal["read", "left out", "refused"]


@dataclasses.dataclass(frozen=True)
class SurveyedModule:
    """One module of the file, or all routed experts of a layer.

    Attributes:
      name: the module, such as "model.layers.0.mlp.experts".
      format: how the weights are stored, such as "NVFP4 w4a4" or "bfloat16".
      tensors: the number of its tensors.
      nbytes: the bytes of its tensors.
      verdict: "read" if a model can load the module, "left out" if loads skip it, or "refused".
      reason: one sentence on why the module is refused, or what it is if it is left out; else "".
    """

    name: str
    format: str
    tensors: int
    nbytes: int
    verdict: Verdict
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Survey:
    """What a checkpoint holds, module by module.

    Attributes:
      config: the parsed ``config.json``.
      quant: how modules are quantized; without rules if the quantization config is refused.
      modules: all modules, in the order of their names.
      problems: one sentence for each thing that is refused.
    """

    config: dict[str, Any]
    quant: QuantConfig
    modules: tuple[SurveyedModule, ...]
    problems: tuple[str, ...]


def survey_checkpoint(path: str | pathlib.Path) -> Survey:
    """Find which modules of a checkpoint can be read, whatever its architecture.

    Args:
      path: folder or Hub name of the checkpoint. No weight is read.

    Raises:
      CheckpointError: ``config.json`` or the header of a file cannot be read, so that nothing is
        known about the modules.
    """
    folder = find_folder(path)
    config = read_config(folder)
    refused: tuple[str, ...] = ()
    try:
        quant = read_quant_config(folder, config)
    except CheckpointError as error:
        quant, refused = QuantConfig(), error.problems
    with open_tensors(folder) as tensors:
        ambiguous: list[str] = []
        mapping = find_key_mapping(tensors.names(), ambiguous)
        renamed = canonical_names(tensors.names(), mapping, ambiguous)
        if not ambiguous:
            tensors.rename(renamed)
        finder = Finder(tensors, quant, mapping, "optional")
        surveyor = _Surveyor(finder, refused[0] if refused else "", read_num_layers(config))
        modules = tuple(surveyor.modules())
    reasons = [module.reason for module in modules if module.verdict == "refused"]
    return Survey(config, quant, modules, tuple(dict.fromkeys([*refused, *ambiguous, *reasons])))


class _Surveyor:
    """Finds the modules of a file one by one.

    Args:
      finder: looks tensors up; its problems become the reasons of the module that is looked up.
      refused: why the quantization config is refused; "" if it is not.
      num_layers: the number of layers in the config, or None.
    """

    def __init__(self, finder: Finder, refused: str, num_layers: int | None):
        self._finder = finder
        self._refused = refused
        self._num_layers = num_layers

    def modules(self) -> Iterator[SurveyedModule]:
        """Yield all modules of the file."""
        groups: dict[str, list[str]] = {}
        for name in sorted(self._finder.tensors.names()):
            experts = _EXPERTS.match(name)
            groups.setdefault(experts[0] if experts else name.rpartition(".")[0], []).append(name)
        for module, names in groups.items():
            yield self._module(module, names)

    def _module(self, module, names) -> SurveyedModule:
        infos = [self._finder.tensors.info(name) for name in names]
        stored = list(dict.fromkeys(STORED_TYPES[info.dtype].numpy.name for info in infos))
        facts = len(names), sum(info.nbytes for info in infos)
        extras = [known_extra(name, self._num_layers) for name in names]
        if extras[0] is not None and None not in extras:
            return SurveyedModule(module, ", ".join(stored), *facts, "left out", extras[0])
        if all(info.dtype in _PLAIN for info in infos):
            return SurveyedModule(module, ", ".join(stored), *facts, "read")
        before = len(self._finder.problems)
        if self._refused:
            self._finder.problems.append(self._refused)
            form = None
        else:
            form = self._find(module, names)
            self._find_leftovers(names, extras)
        problems = self._finder.problems[before:]
        if problems:
            return SurveyedModule(module, ", ".join(stored), *facts, "refused", problems[0])
        return SurveyedModule(module, form or ", ".join(stored), *facts, "read")

    def _find(self, module, names) -> str | None:
        """Find a module with quantized weights, and return its format."""
        finder = self._finder
        if _EXPERTS.match(f"{module}."):
            sizes = _expert_sizes(finder, module, names)
            if sizes is None:
                finder.problems.append(
                    f"{quoted(module)}: the names of these experts are not known"
                )
                return None
            found = find_experts(finder, module, sizes, None).value
            decision = finder.decisions.get(f"{module}.*")
            scheme = decision and decision.scheme
            return f"NVFP4 {scheme}" if isinstance(found, MoEParams) else f"FP8 {scheme}"
        info = finder.find(f"{module}.{finder.names.packed}") or finder.find(f"{module}.weight")
        if info is None or len(info.shape) != 2:
            finder.problems.append(
                f"{quoted(module)}: expected a matrix named weight or {finder.names.packed}, got "
                f"tensors {', '.join(name.rpartition('.')[2] for name in names)}"
            )
            return None
        n, k = info.shape[0], info.shape[1] * (2 if info.dtype in _TWO_CODES else 1)
        find_linear(finder, module, n, k, None, None)
        scheme = finder.decisions[module].scheme
        return f"NVFP4 {scheme}" if isinstance(scheme, Scheme) else f"FP8 {scheme}"

    def _find_leftovers(self, names, extras):
        """Add a problem for the tensors of a module that are not used."""
        left = [
            name
            for name, extra in zip(names, extras, strict=True)
            if extra is None and name not in self._finder.taken
        ]
        if left:
            self._finder.problems.append(f"{quoted(left[0])} is not part of its module")


def _expert_sizes(finder, prefix, names) -> ExpertSizes | None:
    """Return the sizes of a layer's experts by the headers; None if their names are not known."""
    numbers = {name.removeprefix(f"{prefix}.").partition(".")[0] for name in names}
    if not any(map(str.isdecimal, numbers)):
        return _stacked_sizes(finder, prefix)
    e = len(numbers)
    if numbers != set(map(str, range(e))):
        return None
    if is_stacked(finder, prefix, e):
        return None
    gate, _, down_name = PROJECTIONS
    first = f"{prefix}.0.{down_name}"
    down = finder.find(f"{first}.{finder.names.packed}") or finder.find(f"{first}.weight")
    if down is None or len(down.shape) != 2:
        return None
    h, i = down.shape[0], down.shape[1] * (2 if down.dtype in _TWO_CODES else 1)
    gated = any(name.startswith(f"{prefix}.0.{gate}.") for name in names)
    return ExpertSizes(e, h, i, gated, f"{first}.bias" in finder.tensors)


def _stacked_sizes(finder, prefix) -> ExpertSizes | None:
    """Return the sizes of experts that one tensor holds."""
    gated = any(finder.tensors.under(f"{prefix}.gate_up_proj"))
    bias = any(name.endswith("bias") for name in finder.tensors.under(f"{prefix}.down_proj"))
    blocks = finder.find(f"{prefix}.down_proj_blocks")
    if blocks is not None and len(blocks.shape) == 4:  # MXFP4 as in gpt-oss: 16 bytes for 32 codes
        e, h, count, _ = blocks.shape
        return ExpertSizes(e, h, 32 * count, gated, bias, interleaved=True)
    stems = f"{prefix}.gate_up_proj" if gated else f"{prefix}.up_proj", f"{prefix}.down_proj"
    first, down = (finder.find(packed_name(finder, stem)[0]) for stem in stems)
    if first is None or down is None or len(first.shape) != 3 or len(down.shape) != 3:
        return None
    codes = 2 if down.dtype in _TWO_CODES else 1
    e, rows, columns = down.shape
    if codes * first.shape[2] == rows:  # [e, 2i, h] and [e, h, i]
        return ExpertSizes(e, rows, codes * columns, gated, bias, inputs_first=False)
    return ExpertSizes(e, columns, codes * rows, gated, bias, inputs_first=True)
