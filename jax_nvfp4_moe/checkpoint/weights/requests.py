"""The sizes of experts and linears, as a model asks for them."""

import dataclasses

from jax_nvfp4_moe.checkpoint.names import PROJECTIONS


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

    @property
    def projections(self) -> tuple[str, ...]:
        """The names of an expert's projections, down last."""
        return PROJECTIONS if self.gated else PROJECTIONS[1:]


@dataclasses.dataclass(frozen=True)
class Requests:
    """The linears and experts that a model has asked for, in order. All of them can be quantized.

    Attributes:
      linears: module -> n and k, the outputs and the inputs.
      experts: the experts' module -> their sizes.
    """

    linears: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    experts: dict[str, ExpertSizes] = dataclasses.field(default_factory=dict)
