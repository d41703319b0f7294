"""The names and the stacked forms of experts in checkpoints.

To support another naming of the projections, add a row to `PER_EXPERT`.
"""

import dataclasses
import re

from jax_nvfp4_moe.checkpoint.finder import Finder
from jax_nvfp4_moe.checkpoint.safetensors import Tensors

# Published files of Step-3.7 have one tensor for each projection of all experts.
_APART = re.compile(r"(.+\.moe)\.((?:gate|up|down)_proj)\.(\w+)")


@dataclasses.dataclass(frozen=True)
class Naming:
    """The names of one expert's projections, which follow ``EXPERTS.E.`` in a tensor's name.

    Attributes:
      gate: the gate projection; None if the naming has none.
      up: the up projection.
      down: the down projection.
    """

    gate: str | None
    up: str
    down: str


PER_EXPERT = (
    Naming("gate_proj", "up_proj", "down_proj"),  # Qwen, DeepSeek, GLM, Kimi, Nemotron (no gate)
    Naming("w1", "w3", "w2"),  # Mixtral, MiniMax
    Naming("linear", "linear_v", "linear_1"),  # Grok
)


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
    """The sizes of one layer's experts, as the model asks for them.

    Attributes:
      num_experts: e, the number of experts.
      hidden: h, the size of the activations that enter and leave the layer.
      intermediate: i, the size of one expert's intermediate activations.
      gated: whether experts have a gate projection.
      bias: whether both products add a bias.
      interleaved: whether gate and up rows alternate if one tensor holds both.
      inputs_first: whether stacked matrices that are not NVFP4 are ``[e, k, n]``. None decides by
        their shapes.
    """

    num_experts: int
    hidden: int
    intermediate: int
    gated: bool
    bias: bool
    interleaved: bool = False
    inputs_first: bool | None = None

    @property
    def parts(self) -> int:
        """The number of projections in the first product: 2 with a gate, else 1."""
        return 2 if self.gated else 1


@dataclasses.dataclass(frozen=True)
class Requests:
    """The linears and experts that a model has asked for, in order. All of them can be quantized.

    Attributes:
      linears: module -> n and k, the outputs and the inputs.
      experts: the experts' module -> their sizes.
    """

    linears: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    experts: dict[str, ExpertSizes] = dataclasses.field(default_factory=dict)


def find_naming(finder: Finder, prefix: str, sizes: ExpertSizes) -> Naming | None:
    """Return the naming that the file uses.

    Returns:
      None if one tensor holds all experts. If the file has no experts at all, the first naming, so
      that messages have names to ask for.
    """

    def used(stem):
        return next(finder.tensors.under(stem), None) is not None

    for naming in PER_EXPERT:
        if any(used(f"{prefix}.{e}.{naming.down}.") for e in range(sizes.num_experts)):
            return naming
    return None if used(f"{prefix}.down_proj") else PER_EXPERT[0]


def stacks_apart(tensors: Tensors) -> dict[str, list[str]]:
    """Find the tensors that stack one projection of all experts, gate and up apart.

    Returns:
      Name -> the names that the slices of single experts would have, for `Tensors.split`.
    """
    found = {}
    for name in tensors.names():
        match = _APART.fullmatch(name)
        if match is None:
            continue
        block, projection, leaf = match.groups()
        weight = f"{block}.{projection}.weight"
        shape = tensors.info(weight).shape if weight in tensors else ()
        if len(shape) == 3 and shape[0] and tensors.info(name).shape[:1] == shape[:1]:
            experts = range(shape[0])
            found[name] = [f"{block}.experts.{e}.{projection}.{leaf}" for e in experts]
    return found
