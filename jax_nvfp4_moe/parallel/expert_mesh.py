"""ExpertMesh: the two axes of a mesh along which weights are divided, and what they divide."""

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
    """Devices in rows and columns; static.

    Attributes:
      mesh: with an axis `expert`, an axis `tensor`, or both.
    """

    mesh: Mesh

    @property
    def expert(self) -> int:
        """Number of shards that share out the experts."""
        return self.mesh.shape.get(EXPERT, 1)

    @property
    def tensor(self) -> int:
        """Number of shards into which one expert, or the heads of an attention, is divided."""
        return self.mesh.shape.get(TENSOR, 1)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes that there are."""
        return tuple(name for name in (EXPERT, TENSOR) if name in self.mesh.shape)

    @property
    def target(self) -> Target:
        """The device that programs on this mesh are lowered for."""
        return Target.of(self.mesh.devices.flat[0])

    def in_one_process(self, axis: str) -> bool:
        """Return whether devices that differ along `axis` alone belong to one process."""
        owners = np.vectorize(lambda device: device.process_index)(self.mesh.devices)
        index = self.mesh.axis_names.index(axis)
        return bool((owners == owners.take([0], axis=index)).all())

    def spec(self, *axes: str | None) -> PartitionSpec:
        """Return the specification that divides the leading axes of an array along `axes`."""
        return PartitionSpec(*(name if name in self.mesh.shape else None for name in axes))

    def sharding(self, *axes: str | None) -> NamedSharding:
        """Return the sharding of `spec`; without `axes` all devices hold the whole array."""
        return self.named_sharding(self.spec(*axes))

    def named_sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Return the sharding of a specification that `spec` returned."""
        return NamedSharding(self.mesh, spec)

    def shard_map(self, body: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Return `body` as it runs on every shard, on its own parts of the arguments."""
        # Types of custom calls do not say how results vary from shard to shard: nothing to check.
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def reshard(self, array: Any, *axes: str | None) -> Any:
        """Return `array` sharded along `axes` if they are Explicit; XLA sees to Auto ones."""
        if AxisType.Explicit not in self.mesh.axis_types:
            return array
        return jax.sharding.reshard(array, self.sharding(*axes))

    def automatic(self) -> "ExpertMesh":
        """Return the same devices with Auto axes, which are no part of the types of arrays."""
        kinds = (AxisType.Auto,) * self.mesh.devices.ndim
        return ExpertMesh(Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=kinds))


def find_expert_mesh(mesh: Any) -> ExpertMesh:
    """Return the `ExpertMesh` of `mesh`.

    Raises:
      ValueError: `mesh` is no `jax.sharding.Mesh`, has neither axis, or another that is not 1.
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
            f"mesh: expected axes '{EXPERT}' and '{TENSOR}', either of which may be missing, and "
            f"no other larger than 1; got {dict(mesh.shape)}"
        )
    return expert_mesh


def check_context(array: Any) -> None:
    """Check that programs on `array`, a weight, can be called where this is.

    Raises:
      ValueError: it lies on Auto axes, and ``jax.set_mesh`` has Explicit ones here.
    """
    own, here = jax.typeof(array).sharding.mesh, jax.sharding.get_abstract_mesh()
    if own.empty or AxisType.Explicit in own.axis_types:
        return
    if AxisType.Explicit in here.axis_types:
        raise ValueError(
            f"mesh: expected a call outside jax.set_mesh of Explicit axes {here.axis_names}, since "
            "the weights lie on Auto ones, as those of a loaded model do; leave jax.set_mesh, or "
            "give it the same devices with axis_types of AxisType.Auto"
        )


def divisors(n: int, multiple: int = 1) -> list[int]:
    """Return the numbers of equal parts, each a multiple of `multiple`, into which n divides."""
    units = n // multiple if n % multiple == 0 else 0
    return [parts for parts in range(1, units + 1) if units % parts == 0]


def check_parts(axis: str, parts: int, what: str, n: int, multiple: int = 1) -> None:
    """Check that n divides into `parts` equal parts, each a multiple of `multiple`.

    Raises:
      ValueError: it cannot; lists the sizes of `axis` that are legal.
    """
    legal = divisors(n, multiple)
    if parts not in legal:
        blocks = f" of whole blocks of {multiple}" if multiple > 1 else ""
        raise ValueError(
            f"mesh: axis '{axis}' of {parts} does not divide {what} = {n} into equal parts"
            f"{blocks}; legal sizes of '{axis}': {', '.join(map(str, legal)) or 'none'}"
        )


def check_row_scales(expert_mesh: ExpertMesh, scheme: CheckpointScheme) -> None:
    """Check that no row of activations is divided whose scale is that of the whole row.

    Raises:
      ValueError: one is; a shard would find another scale, and other numbers.
    """
    if expert_mesh.tensor > 1 and scheme in DYNAMIC:
        raise ValueError(
            f"mesh: expected axis '{TENSOR}' of 1 with {scheme}, whose scales are found from whole "
            f"rows of activations; got {expert_mesh.tensor}. Use axis '{EXPERT}', or "
            "calibrated scales"
        )


def replicate(tree: Any, expert_mesh: ExpertMesh) -> Any:
    """Return `tree` with every array whole on every device; traced arrays as they are."""
    whole = expert_mesh.sharding()

    def put(leaf):
        return leaf if isinstance(leaf, Tracer) else put_parts(leaf, whole)

    return jax.tree.map(put, tree)


def put_parts(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Return the array `leaf`, of which each device gets its part and no more is read.

    Args:
      leaf: has a shape, a dtype, and parts ``leaf[index]``: a numpy or JAX array, or a lazy
        one.
      sharding: says which parts.
    """
    if isinstance(leaf, jax.Array):
        return jax.device_put(leaf, sharding)
    return stack_parts(leaf.shape, sharding, lambda index: leaf[index])


def stack_parts(shape: Sequence[int], sharding: NamedSharding, part: Any) -> jax.Array:
    """Return an array whose part at `index` is ``part(index)``.

    A part is made for local devices alone, and once where several hold it.
    """
    made = {}

    def once(index):
        key = tuple((one.start, one.stop) for one in index)
        if key not in made:
            made[key] = part(index)
        return made[key]

    return jax.make_array_from_callback(tuple(shape), sharding, once)


def first_shard_only(bias: jax.Array) -> jax.Array:
    """Return a bias on the first shard along `tensor` and zeros on the others.

    A linear whose columns are divided adds its bias once in the sum over the shards.
    """
    return jnp.where(lax.axis_index(TENSOR) == 0, bias, jnp.zeros_like(bias))
