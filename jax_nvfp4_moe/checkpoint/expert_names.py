"""The names and the stacked forms of experts in checkpoints.

To support another naming of the projections, add a row to `PER_EXPERT`.
"""

import dataclasses
import re

from jax_nvfp4_moe.checkpoint.plan import FLOATS, Buffer, Planner, TensorSlice
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


def find_naming(planner: Planner, prefix: str, sizes: ExpertSizes) -> Naming | None:
    """Return the naming that the file uses.

    Returns:
      None if one tensor holds all experts. If the file has no experts at all, the first naming, so
      that messages have names to ask for.
    """

    def used(stem):
        return next(planner.tensors.under(stem), None) is not None

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


def first_projection(prefix: str, sizes: ExpertSizes) -> str:
    """Return the name of the first product's tensor in a file that stacks experts."""
    return f"{prefix}.gate_up_proj" if sizes.gated else f"{prefix}.up_proj"


def plan_stacked_bias(
    planner: Planner, stem: str, bias: Buffer | None, alternate: int | None
) -> None:
    """Plan the bias ``[e, n]`` of one projection of all experts, if the model has one.

    Args:
      planner: looks tensors up, and collects problems.
      stem: the name of the projection.
      bias: the buffer; None if the model has no bias.
      alternate: as for `stack`.
    """
    if bias is None:
        return
    name = f"{stem}.bias" if f"{stem}.bias" in planner.tensors else f"{stem}_bias"
    planner.take(name, FLOATS, bias.shape)
    bias.slices += stack(name, bias.shape[0], False, alternate)


def stack(name: str, e: int, swapped: bool, alternate: int | None) -> list[TensorSlice]:
    """Return the slices that fill a buffer ``[e, n, ...]`` from one tensor of all `e` experts.

    The slices put the gate rows before the up rows, and the outputs before the inputs.

    Args:
      name: the name of the tensor.
      e: the number of experts.
      swapped: whether the tensor is ``[e, ..., n]``.
      alternate: the number of gate rows if gate and up rows alternate. None if they do not.
    """
    every = slice(None)
    rows = [(every, every)]
    if alternate is not None:
        halves = slice(0, alternate), slice(alternate, 2 * alternate)
        rows = [(half, slice(first, None, 2)) for first, half in enumerate(halves)]
    elif not swapped:
        return [TensorSlice(name)]
    if not swapped:
        return [TensorSlice(name, (every, at), part=(every, part)) for at, part in rows]
    return [
        TensorSlice(name, (x, at), part=(x, every, part), swapped=True)
        for x in range(e)
        for at, part in rows
    ]


def packed_name(planner: Planner, stem: str) -> tuple[str, str]:
    """Find the tensor that holds the weights of one projection of all experts.

    Returns:
      The name of the tensor, and the text between `stem` and the names of its scales.
    """
    packed = planner.names.packed
    for name, join in (
        (stem, "_"),
        (f"{stem}.{packed}", "."),
        (f"{stem}_{packed}", "_"),
        (f"{stem}.weight", "."),
    ):
        if name in planner.tensors:
            return name, join
    return stem, "_"
