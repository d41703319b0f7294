"""GatedMLP: the feed-forward block of dense layers, and the shared experts of sparse ones."""

from collections.abc import Callable

from jaxtyping import Array, Float

from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.sharding import build_sharded
from jax_nvfp4_moe.numerics.activations import ActivationCall, find_activation
from jax_nvfp4_moe.ops.gating import activate
from jax_nvfp4_moe.parallel.shard_spec import ShardSpec
from jax_nvfp4_moe.parallel.tensor_parallel import TensorParallel


class GatedMLP(TensorParallel):
    """A gated feed-forward block: ``y = down(activation(gate(x)) * up(x))``.

    Attributes:
      gate_up: `MergedLinear` that computes gate and up.
      down: linear layer from the intermediate width back to the hidden width.
      activation: `ActivationCall`, static.
      target: static `Target` that the activation is lowered for.
    """

    def __init__(
        self,
        make: Builder,
        path: str,
        hidden: int,
        intermediate: int,
        activation: str | ActivationCall = "silu",
    ):
        """Make the block of one shard.

        Args:
          make: builder of the model.
          path: path of the block in the model, such as "layers.3.mlp".
          hidden: width of the tokens.
          intermediate: number of intermediate columns in one shard.
          activation: name of the activation, or the result of `find_activation`. Defaults to
            "silu".
        """
        self.activation, self.target = find_activation(activation), make.settings.target
        rows = {"gate": intermediate, "up": intermediate}
        self.gate_up = make.merged_linear(f"{path}.gate_up", hidden, rows)
        self.down = make.linear(f"{path}.down", hidden, intermediate)

    def run(self, x: Float[Array, "... h"]) -> Float[Array, "... h"]:
        """Run the three products; the activation is computed in float32."""
        return self.down(activate(self.gate_up(x), self.activation, target=self.target))


def build_gated_mlp(
    make: Builder,
    path: str,
    hidden: int,
    intermediate: int,
    build: Callable[[Builder, str, int, int], GatedMLP] = GatedMLP,
) -> GatedMLP:
    """Build a `GatedMLP`, sharded along the mesh axis `tensor` where that is possible.

    Args:
      make: builder of the model.
      path: path of the block in the model.
      hidden: width of the tokens.
      intermediate: number of intermediate columns of all shards together.
      build: makes the block of one shard, with the arguments of `GatedMLP`. Defaults to `GatedMLP`.
    """
    shards = make.settings.shards
    rows = ShardSpec("rows", shards)
    return build_sharded(
        make,
        lambda make, width: build(make, path, hidden, width),
        intermediate,
        intermediate // shards,
        specs={"gate": rows, "up": rows, "down": ShardSpec("columns", shards)},
        last=f"{path}.down",
        width=intermediate,
    )


class JoinedMLP(TensorParallel):
    """A `GatedMLP` whose gate and up are the halves of the result of one linear in the file.

    Attributes:
      input: linear layer that computes gate and up.
      output: linear layer from the intermediate width back to the hidden width.
      activation: `ActivationCall`, static.
      target: static `Target` that the activation is lowered for.
    """

    def __init__(
        self,
        make: Builder,
        path: str,
        hidden: int,
        intermediate: int,
        activation: str | ActivationCall = "silu",
    ):
        """Make the block of one shard, with the arguments of `GatedMLP`."""
        self.activation, self.target = find_activation(activation), make.settings.target
        self.input = make.linear(f"{path}.input", 2 * intermediate, hidden)
        self.output = make.linear(f"{path}.output", hidden, intermediate)

    def run(self, x: Float[Array, "... h"]) -> Float[Array, "... h"]:
        """Run the two products; the activation is computed in float32."""
        return self.output(activate(self.input(x), self.activation, target=self.target))


def build_joined_mlp(
    make: Builder,
    path: str,
    hidden: int,
    intermediate: int,
    activation: str | ActivationCall = "silu",
) -> JoinedMLP:
    """Build a `JoinedMLP`, sharded along the mesh axis `tensor` where that is possible.

    Args:
      make: builder of the model.
      path: path of the block in the model.
      hidden: width of the tokens.
      intermediate: number of intermediate columns of all shards together.
      activation: as for `JoinedMLP`. Defaults to "silu".
    """
    shards = make.settings.shards
    return build_sharded(
        make,
        lambda make, width: JoinedMLP(make, path, hidden, width, activation),
        intermediate,
        intermediate // shards,
        specs={
            "input": ShardSpec("rows", shards, (intermediate, intermediate)),
            "output": ShardSpec("columns", shards),
        },
        last=f"{path}.output",
        width=intermediate,
    )
