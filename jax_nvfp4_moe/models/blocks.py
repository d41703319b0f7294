"""Find the expert blocks of a model."""

from collections.abc import Iterator
from typing import Any

from flax import nnx

from jax_nvfp4_moe.nn.experts.moe import NVFP4MoE


def expert_blocks(model: Any) -> Iterator[tuple[str, NVFP4MoE]]:
    """Yield each expert block with its path, such as "layers.3.mlp", in the order of the layers."""
    found = [(path, part) for path, part in nnx.iter_modules(model) if isinstance(part, NVFP4MoE)]
    # Layer indices are compared as numbers. As text, layer 10 would come before layer 2.
    for path, block in sorted(found, key=lambda pair: [(isinstance(p, str), p) for p in pair[0]]):
        yield ".".join(map(str, path)), block


def experts_path(block: str) -> str:
    """Return the path of the routed experts in the block at the path `block`."""
    return f"{block}.experts" if block else "experts"
