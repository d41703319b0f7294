"""The blocks with experts inside a model."""

from collections.abc import Iterator
from typing import Any

from flax import nnx

from jax_nvfp4_moe.nn.moe import NVFP4MoE


def expert_blocks(model: Any) -> Iterator[tuple[str, NVFP4MoE]]:
    """Return each block with its path, such as "layers.3.mlp", in the order of the layers."""
    found = [(path, part) for path, part in nnx.iter_modules(model) if isinstance(part, NVFP4MoE)]
    # Indices of layers are numbers: in their order, not in that of their digits.
    for path, block in sorted(found, key=lambda pair: [(isinstance(p, str), p) for p in pair[0]]):
        yield ".".join(map(str, path)), block


def experts_path(block: str) -> str:
    """Return the path of the routed experts of the block at path `block`."""
    return f"{block}.experts" if block else "experts"
