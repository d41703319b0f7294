"""`ExpertMesh`: a mesh whose axes `expert` and `tensor` shard weights, with checks and helpers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_nvfp4_moe.scheme import DYNAMIC, CheckpointScheme, Target

EXPERT, TENSOR = "expert", "tensor"


@dataclasses.dataclass(frozen=True)
class ExpertMesh:
    """A mesh of devices with an axis `expert`, an axis `tensor`, or both; static.

    Attributes:
      mesh: the `jax.sharding.Mesh`.
    """

    mesh: Mesh

    @property
    def expert(self) -> int:
        """Number of shards along `expert`, among which the experts are divided."""
        return self.mesh.shape.get(EXPERT, 1)

    @property
    def tensor(self) -> int:
        """Number of shards along `tensor`, which divide each expert and the heads of attention."""
        return self.mesh.shape.get(TENSOR, 1)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of those of the two axes that the mesh has."""
        return tuple(name for name in (EXPERT, TENSOR) if name in self.mesh.shape)

    @property
    def target(self) -> Target:
        """The device for which programs on this mesh are lowered."""
        return Target.of(self.mesh.devices.flat[0])

    def in_one_process(self, axis: str) -> bool:
        """Return whether devices that differ only along `axis` belong to one process."""
        owners = np.vectorize(lambda device: device.process_index)(self.mesh.devices)
        index = self.mesh.axis_names.index(axis)
        return bool((owners == owners.take([0], axis=index)).all())

    def spec(self, *axes: str | None) -> PartitionSpec:
        """Return the `PartitionSpec` that shards the leading axes of an array along `axes`.

        An axis that the mesh lacks is replaced by None.
        """
        return PartitionSpec(*(name if name in self.mesh.shape else None for name in axes))

    def sharding(self, *axes: str | None) -> NamedSharding:
        """Return the sharding for `spec`; without `axes`, every device holds the whole array."""
        return self.named_sharding(self.spec(*axes))

    def named_sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Return the sharding for a specification that `spec` returned."""
        return NamedSharding(self.mesh, spec)

    def shard_map(self, body: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Return a function that runs `body` on each shard with its parts of the arguments."""
        # The types of custom calls do not say how results vary between shards: nothing to check.
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def reshard(self, array: Any, *axes: str | None) -> Any:
        """Return `array` sharded along `axes` if the mesh has Explicit axes.

        With Auto axes the array is returned unchanged, because XLA chooses its sharding.
        """
        if AxisType.Explicit not in self.mesh.axis_types:
            return array
        return jax.sharding.reshard(array, self.sharding(*axes))

    def automatic(self) -> "ExpertMesh":
        """Return the same devices with Auto axes, which are not part of the types of arrays."""
        kinds = (AxisType.Auto,) * self.mesh.devices.ndim
        return ExpertMesh(Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=kinds))


def find_expert_mesh(mesh: Any) -> ExpertMesh:
    """Return the `ExpertMesh` for `mesh`.

    Args:
      mesh: `jax.sharding.Mesh` with an axis "expert", an axis "tensor", or both. Other axes must
        have size 1.

    Raises:
      ValueError: if `mesh` is not a mesh, has neither axis, or has another axis larger than 1.

    Example:
      >>> import jax
      >>> from jax_nvfp4_moe.parallel import find_expert_mesh
      >>> expert_mesh = find_expert_mesh(jax.make_mesh((1, 1), ("expert", "tensor")))
      >>> expert_mesh.expert, expert_mesh.tensor
      (1, 1)
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"mesh: expected a jax.sharding.Mesh with axes '{EXPERT}' and '{TENSOR}', "
            f"got {type(mesh).__name__}"
        )
    others = {name: n for name, n in mesh.shape.items() if name not in (EXPERT, TENSOR) and n > 1}
    expert_mesh = ExpertMesh(mesh)
    if others or not expert_mesh.axes:
        raise ValueError(
            f"mesh: expected axes '{EXPERT}' and '{TENSOR}', one of which may be missing, and "
            f"no other axis larger than 1; got {dict(mesh.shape)}"
        )
    return expert_mesh


def check_context(array: Any) -> None:
    """Check that programs on `array`, a weight, can be called in the current mesh context.

    Raises:
      ValueError: if the weight is on Auto axes and ``jax.set_mesh`` has set Explicit axes.
    """
    own, here = jax.typeof(array).sharding.mesh, jax.sharding.get_abstract_mesh()
    if own.empty or AxisType.Explicit in own.axis_types:
        return
    if AxisType.Explicit in here.axis_types:
        raise ValueError(
            f"mesh: expected a call outside jax.set_mesh of Explicit axes {here.axis_names}, "
            "because the weights are on Auto axes, as in every loaded model. Leave jax.set_mesh, "
            "or give it a mesh of the same devices with axis_types of AxisType.Auto"
        )


def divisors(n: int, multiple: int = 1) -> list[int]:
    """Return all numbers of equal parts of n in which each part is a multiple of `multiple`."""
    units = n // multiple if n % multiple == 0 else 0
    return [parts for parts in range(1, units + 1) if units % parts == 0]


def check_parts(axis: str, parts: int, what: str, n: int, multiple: int = 1) -> None:
    """Check that n divides into `parts` equal parts, each a multiple of `multiple`.

    Args:
      axis: name of the mesh axis, for the error message.
      parts: number of parts, the size of that axis.
      what: name of the divided size, for the error message.
      n: the divided size.
      multiple: number that must divide each part, 1 by default.

    Raises:
      ValueError: if it does not; the message lists the legal sizes of `axis`.
    """
    legal = divisors(n, multiple)
    if parts not in legal:
        blocks = f" of whole blocks of {multiple}" if multiple > 1 else ""
        raise ValueError(
            f"mesh: axis '{axis}' of {parts} does not divide {what} = {n} into equal parts"
            f"{blocks}; legal sizes of '{axis}': {', '.join(map(str, legal)) or 'none'}"
        )


def check_row_scales(expert_mesh: ExpertMesh, scheme: CheckpointScheme) -> None:
    """Check that `tensor` does not divide rows of activations whose scale depends on the whole row.

    Raises:
      ValueError: if it does. Each shard would find another scale, and the results would differ.
    """
    if expert_mesh.tensor > 1 and scheme in DYNAMIC:
        raise ValueError(
            f"mesh: expected axis '{TENSOR}' of 1 with {scheme}, because its scales are computed "
            f"from whole rows of activations; got {expert_mesh.tensor}. Use axis '{EXPERT}', or a "
            "scheme with calibrated scales"
        )


def replicate(tree: Any, expert_mesh: ExpertMesh) -> Any:
    """Return `tree` with every array replicated on all devices; traced arrays are unchanged."""
    whole = expert_mesh.sharding()

    def put(leaf):
        return leaf if isinstance(leaf, Tracer) else put_parts(leaf, whole)

    return jax.tree.map(put, tree)


def put_parts(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Return `leaf` as a global array; only the part of each device is read.

    Args:
      leaf: an array with shape, dtype and parts ``leaf[index]``: numpy, JAX or lazy.
      sharding: the part of each device.
    """
    if isinstance(leaf, jax.Array):
        return jax.device_put(leaf, sharding)
    return stack_parts(leaf.shape, sharding, lambda index: leaf[index])


def stack_parts(shape: Sequence[int], sharding: NamedSharding, part: Any) -> jax.Array:
    """Return a global array whose part at `index` is ``part(index)``.

    `part` is called for local devices only, and once for a part that several devices hold.
    """
    made = {}

    def once(index):
        key = tuple((one.start, one.stop) for one in index)
        if key not in made:
            made[key] = part(index)
        return made[key]

    return jax.make_array_from_callback(tuple(shape), sharding, once)


def first_shard_only(bias: jax.Array) -> jax.Array:
    """Return the bias on the first shard along `tensor`, and zeros on the other shards.

    If the columns of a linear layer are sharded, its outputs are summed over the shards. The bias
    must then be added once.
    """
    return jnp.where(lax.axis_index(TENSOR) == 0, bias, jnp.zeros_like(bias))
