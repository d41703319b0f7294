"""GatedMLP: the feed-forward of dense layers, and shared experts."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_nvfp4_moe.nn.building import Builder
from jax_nvfp4_moe.nn.division import divide
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import TensorParallel


class GatedMLP(TensorParallel):
    """``down(silu(gate(x)) * up(x))``.

    Attributes:
      gate_up: `MergedLinear` of gate and up.
      down: a linear.
    """

    def __init__(self, make: Builder, path: str, hidden: int, intermediate: int):
        """Make one with `intermediate` columns in one shard."""
        rows = {"gate": intermediate, "up": intermediate}
        self.gate_up = make.merged_linear(f"{path}.gate_up", hidden, rows)
        self.down = make.linear(f"{path}.down", hidden, intermediate)

    def run(self, x: Float[Array, "... h"]) -> Float[Array, "... h"]:
        """Run the three products; the activation is float32."""
        gate, up = jnp.split(self.gate_up(x).astype(jnp.float32), 2, axis=-1)
        return self.down((jax.nn.silu(gate) * up).astype(x.dtype))


def build_gated_mlp(make: Builder, path: str, hidden: int, intermediate: int) -> GatedMLP:
    """Make a `GatedMLP`, over a mesh divided along `tensor`."""
    shards = make.settings.shards
    rows = ShardSpec("rows", shards)
    return divide(
        make,
        lambda make, width: GatedMLP(make, path, hidden, width),
        intermediate,
        intermediate // shards,
        specs={"gate": rows, "up": rows, "down": ShardSpec("columns", shards)},
        last=f"{path}.down",
        width=intermediate,
    )
