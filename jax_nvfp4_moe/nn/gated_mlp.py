"""GatedMLP: the feed-forward block of dense layers, and the shared experts of sparse ones."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_nvfp4_moe.nn.building import Builder
from jax_nvfp4_moe.nn.division import divide
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import TensorParallel


class GatedMLP(TensorParallel):
    """A gated feed-forward block: ``y = down(silu(gate(x)) * up(x))``.

    Attributes:
      gate_up: `MergedLinear` that computes gate and up.
      down: linear layer from the intermediate width back to the hidden width.
    """

    def __init__(self, make: Builder, path: str, hidden: int, intermediate: int):
        """Make the block of one shard.

        Args:
          make: builder of the model.
          path: path of the block in the model, such as "layers.3.mlp".
          hidden: width of the tokens.
          intermediate: number of intermediate columns in one shard.
        """
        rows = {"gate": intermediate, "up": intermediate}
        self.gate_up = make.merged_linear(f"{path}.gate_up", hidden, rows)
        self.down = make.linear(f"{path}.down", hidden, intermediate)

    def run(self, x: Float[Array, "... h"]) -> Float[Array, "... h"]:
        """Run the three products; the activation is computed in float32."""
        gate, up = jnp.split(self.gate_up(x).astype(jnp.float32), 2, axis=-1)
        return self.down((jax.nn.silu(gate) * up).astype(x.dtype))


def build_gated_mlp(make: Builder, path: str, hidden: int, intermediate: int) -> GatedMLP:
    """Build a `GatedMLP`, divided along the mesh axis `tensor` where that is possible.

    Args:
      make: builder of the model.
      path: path of the block in the model.
      hidden: width of the tokens.
      intermediate: number of intermediate columns of all shards together.
    """
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
