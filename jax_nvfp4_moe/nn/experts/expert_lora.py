"""ExpertLoRA: low-rank adapters of the routed experts of one layer."""

from flax import nnx

from jax_nvfp4_moe.nn.linear.lora import LowRankPair
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams
from jax_nvfp4_moe.ops.low_rank import AdaptedExperts


class ExpertLoRA(nnx.Module):
    """The adapters of all experts of one layer, beside one or both of their matrices.

    Expert e computes ``W[e] @ x + alpha / r * b[e] @ (a[e] @ x)`` for each of the two matrices. The
    first result enters the activation. If a pair is `merge_aware`, the matrices are instead
    ``round(W[e] + alpha / r * b[e] @ a[e])``, as `merge_lora` makes them.

    Attributes:
      gate_up: `LowRankPair` of the first matrices, ``[e, r, h]`` and ``[e, 2i, r]`` with all gate
        rows first, or ``[e, i, r]`` without a gate. None if these matrices have no adapter.
      down: `LowRankPair` of the second matrices, ``[e, r, i]`` and ``[e, h, r]``, or None.
    """

    def __init__(self, gate_up: LowRankPair | None, down: LowRankPair | None):
        """Store the two pairs."""
        self.gate_up, self.down = nnx.data(gate_up), nnx.data(down)

    def pairs(self) -> dict[str, LowRankPair]:
        """Return the adapted matrices by name."""
        pairs = {"gate_up": self.gate_up, "down": self.down}
        return {name: pair for name, pair in pairs.items() if pair is not None}

    def beside(self, params: MoEParams | DenseExperts) -> AdaptedExperts:
        """Return the frozen weights with the adapters beside them."""
        pairs = (None if pair is None else pair.read() for pair in (self.gate_up, self.down))
        return AdaptedExperts(params, *pairs)
