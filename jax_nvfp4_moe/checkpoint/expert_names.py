"""How experts are named and stacked in checkpoints.

Adding a naming is adding a row to `PER_EXPERT`.
"""

import dataclasses

from jax_nvfp4_moe.checkpoint.plan import FLOATS, Buffer, Planner, TensorSlice


@dataclasses.dataclass(frozen=True)
class Naming:
    """Names of the projections of one expert, below ``EXPERTS.E.``."""

    gate: str | None
    up: str
    down: str


PER_EXPERT = (
    Naming("gate_proj", "up_proj", "down_proj"),  # Qwen, DeepSeek, GLM, Kimi; Nemotron: no gate
    Naming("w1", "w3", "w2"),  # Mixtral, MiniMax
    Naming("linear", "linear_v", "linear_1"),  # Grok
)


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
    """The sizes that a model asks for.

    Attributes:
      num_experts: e.
      hidden: h.
      intermediate: i.
      gated: whether there are gate rows.
      bias: whether both products add a bias.
      interleaved: whether gate and up rows alternate where one tensor holds both.
      inputs_first: whether stacked dense matrices are ``[e, k, n]``; None tells by their shapes.
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
        """Projections in the first product."""
        return 2 if self.gated else 1


@dataclasses.dataclass(frozen=True)
class Requests:
    """What a model has asked for that can be quantized; in that order.

    Attributes:
      linears: module -> n and k.
      experts: the experts' module -> their sizes.
    """

    linears: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    experts: dict[str, ExpertSizes] = dataclasses.field(default_factory=dict)


def find_naming(planner: Planner, prefix: str, sizes: ExpertSizes) -> Naming | None:
    """Return the naming in use, None for all experts in one tensor."""

    def used(stem):
        return next(planner.tensors.under(stem), None) is not None

    for naming in PER_EXPERT:
        if any(used(f"{prefix}.{e}.{naming.down}.") for e in range(sizes.num_experts)):
            return naming
    return None if used(f"{prefix}.down_proj") else PER_EXPERT[0]


def first_projection(prefix: str, sizes: ExpertSizes) -> str:
    """Return the name that stacked experts have for the matrices of their first product."""
    return f"{prefix}.gate_up_proj" if sizes.gated else f"{prefix}.up_proj"


def plan_stacked_bias(
    planner: Planner, stem: str, bias: Buffer | None, alternate: int | None
) -> None:
    """Plan the bias ``[e, n]`` of one projection, where the model has one."""
    if bias is None:
        return
    name = f"{stem}.bias" if f"{stem}.bias" in planner.tensors else f"{stem}_bias"
    planner.take(name, FLOATS, bias.shape)
    bias.slices += stack(name, bias.shape[0], False, alternate)


def stack(name: str, e: int, swapped: bool, alternate: int | None) -> list[TensorSlice]:
    """Return the slices that fill ``[e, n, ...]`` from the tensor `name` of all `e` experts.

    Args:
      name: of the tensor.
      e: experts.
      swapped: whether it is ``[e, ..., n]``.
      alternate: number of gate rows, where gate and up rows alternate; None where they do not.
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
    """Return the name of stacked weights and what stands between `stem` and the names of scales."""
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
