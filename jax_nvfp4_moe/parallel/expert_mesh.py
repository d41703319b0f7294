"""`ExpertMesh`: a mesh whose axes shard weights and rows, with checks and helpers.

An axis of a mesh has a role. `expert` shards the experts among devices, and `tensor` shards each
expert and the heads of attention. `data` shards the rows of a batch, and every part of the rows
has its own copy of the weights. Axes without a role are left alone: what lies on them is
replicated. Names of axes are those of the roles, unless the user gives others.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_nvfp4_moe.backends.launch_facts import facts
from jax_nvfp4_moe.ops.all_reduce import PeerGroups, all_reduce
from jax_nvfp4_moe.scheme import DYNAMIC, CheckpointScheme, Target

EXPERT, TENSOR, DATA = ROLES = "expert", "tensor", "data"

Roles = str | tuple[str, ...] | None
# The mesh whose shards run the function that is traced, in `ExpertMesh.shard_whole`.
_INSIDE: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("inside", default=None)
# Whether `ExpertMesh.add_up` leaves the terms as they are, in `left_apart`.
_APART: contextvars.ContextVar[bool] = contextvars.ContextVar("apart", default=False)


@contextlib.contextmanager
def left_apart(condition: bool) -> Iterator[None]:
    """Let `ExpertMesh.add_up` return the term of each device, if `condition` holds.

    The caller adds up what it computes from several of these terms, once. In another block whose
    condition holds, the terms stay apart in any case. Use it in the program of each device only
    (`ExpertMesh.shard_whole`).
    """
    token = _APART.set(condition or _APART.get())
    try:
        yield
    finally:
        _APART.reset(token)


@dataclasses.dataclass(frozen=True)
class ExpertMesh:
    """A mesh of devices, and the names of its axes `expert`, `tensor` and `data`; static.

    Attributes:
      mesh: the `jax.sharding.Mesh`.
      names: pairs of a role and the name of its axis, for roles whose axis has another name.
      peers: pairs of the roles of a sum and the GPUs that add up small arrays through each other's
        memory; see `connect_peers`. Empty (default) if XLA adds up everything.
    """

    mesh: Mesh
    names: tuple[tuple[str, str], ...] = ()
    peers: tuple[tuple[tuple[str, ...], PeerGroups], ...] = ()

    @property
    def expert(self) -> int:
        """Number of shards along `expert`, among which the experts are sharded."""
        return self.size(EXPERT)

    @property
    def tensor(self) -> int:
        """Number of shards along `tensor`, of each expert and of the heads of attention."""
        return self.size(TENSOR)

    @property
    def data(self) -> int:
        """Number of shards along `data`, of the rows of a batch."""
        return self.size(DATA)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of those axes of the mesh that shard weights."""
        return tuple(self.name(role) for role in (EXPERT, TENSOR) if self.has(role))

    def name(self, role: str) -> str:
        """Return the name of the axis that has a role."""
        return dict(self.names).get(role, role)

    def has(self, role: str) -> bool:
        """Return whether the mesh has an axis for a role."""
        return self.name(role) in self.mesh.shape

    def size(self, role: str) -> int:
        """Return the number of shards along the axis that has a role."""
        return self.mesh.shape.get(self.name(role), 1)

    def rows(self, count: int) -> str | None:
        """Return the role that shards `count` rows: `data`, or None if they are not sharded.

        Rows that do not divide into equal parts are replicated.
        """
        divides = self.data > 1 and count > 0 and count % self.data == 0
        return DATA if divides else None

    @property
    def target(self) -> Target:
        """The device for which programs on this mesh are lowered."""
        return Target.of(self.mesh.devices.flat[0])

    def in_one_process(self, role: str) -> bool:
        """Return whether devices that differ only along one axis belong to one process."""
        owners = np.vectorize(lambda device: device.process_index)(self.mesh.devices)
        index = self.mesh.axis_names.index(self.name(role))
        return bool((owners == owners.take([0], axis=index)).all())

    def spec(self, *roles: Roles) -> PartitionSpec:
        """Return the `PartitionSpec` that shards the leading axes of an array along `roles`.

        Several roles shard one axis of the array one after the other. A role without an axis in
        the mesh shards nothing.
        """

        def find(role):
            if role is None or isinstance(role, str):
                return self.name(role) if role is not None and self.has(role) else None
            return tuple(self.name(one) for one in role if self.has(one)) or None

        return PartitionSpec(*map(find, roles))

    def sharding(self, *roles: Roles) -> NamedSharding:
        """Return the sharding for `spec`; without `roles`, every device holds the whole array."""
        return self.named_sharding(self.spec(*roles))

    def named_sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Return the sharding for a specification that `spec` returned."""
        return NamedSharding(self.mesh, spec)

    @property
    def is_inside(self) -> bool:
        """Whether modules on this mesh are called with the parts of one shard: in `shard_whole`."""
        return _INSIDE.get() == self.mesh

    def shard_whole(self, body: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Return what `shard_map` returns, for a `body` that calls modules on this mesh.

        The modules get the parts of one shard, and run on that shard alone, except for their sums.
        """

        def inside(*args):
            token = _INSIDE.set(self.mesh)
            try:
                return body(*args)
            finally:
                _INSIDE.reset(token)

        return self.shard_map(inside, in_specs, out_specs)

    def shard_map(self, body: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Return a function that runs `body` on each shard with its parts of the arguments.

        In `shard_whole`, it is `body`: the arguments are parts already.
        """
        if self.is_inside:
            return body
        # The types of custom calls do not say how results vary between shards: nothing to check.
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def add_up(self, y: jax.Array, *roles: str) -> jax.Array:
        """Return the sum of `y` over the shards along `roles`, in float32, in the dtype of `y`.

        Call it inside of `shard_map`. In `left_apart`, it returns `y`.
        """
        if _APART.get():
            return y
        axes = tuple(self.name(role) for role in roles if self.has(role))
        peers = dict(self.peers).get(roles)
        return all_reduce(y, axes, peers=peers, target=self.target if peers else None)

    def adds_up_by_peers(self, nbytes: int, *roles: str) -> bool:
        """Return whether GPUs add up an array of this size through each other's memory."""
        return roles in dict(self.peers) and nbytes in facts().PEER_BYTES

    def reshard(self, array: Any, *roles: Roles) -> Any:
        """Return `array` sharded along `roles` if the mesh has Explicit axes.

        With Auto axes the array is returned unchanged, because XLA chooses its sharding.
        """
        if AxisType.Explicit not in self.mesh.axis_types:
            return array
        return jax.sharding.reshard(array, self.sharding(*roles))

    def shard_rows(self, tree: Any) -> Any:
        """Return `tree` with the first axis of every array sharded along `data`, if that fits."""

        def shard(array):
            role = self.rows(array.shape[0]) if jnp.ndim(array) else None
            if role is None:
                return array
            free = (PartitionSpec.UNCONSTRAINED,) * (array.ndim - 1)
            spec = PartitionSpec(self.name(role), *free)
            if isinstance(array, Tracer):
                return jax.lax.with_sharding_constraint(array, self.named_sharding(spec))
            others = tuple(getattr(getattr(array, "sharding", None), "spec", ()))[1:]
            spec = PartitionSpec(self.name(role), *others)
            return jax.device_put(array, self.named_sharding(spec))

        return tree if self.data == 1 else jax.tree.map(shard, tree)

    def automatic(self) -> "ExpertMesh":
        """Return the same devices with Auto axes, which are not part of the types of arrays."""
        kinds = (AxisType.Auto,) * self.mesh.devices.ndim
        mesh = Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=kinds)
        return dataclasses.replace(self, mesh=mesh)


def find_expert_mesh(mesh: Any, axis_names: Mapping[str, str] | None = None) -> ExpertMesh:
    """Return the `ExpertMesh` for `mesh`.

    Args:
      mesh: `jax.sharding.Mesh` with at least one of the axes "expert", "tensor" and "data". Other
        axes are left alone: what lies on them is replicated. Or an `ExpertMesh`, which is returned.
      axis_names: names of axes that are called something else, such as ``{"expert": "ep", "tensor":
        "tp", "data": "dp"}``. None (default) if the axes are called what they do.

    Raises:
      ValueError: if `mesh` is not a mesh or has none of the axes, or if `axis_names` has an unknown
        role, a name that the mesh lacks, or one name for two roles.

    Example:
      >>> import jax
      >>> from jax_nvfp4_moe.parallel import find_expert_mesh
      >>> expert_mesh = find_expert_mesh(jax.make_mesh((1, 1), ("expert", "tensor")))
      >>> expert_mesh.expert, expert_mesh.tensor
      (1, 1)
    """
    if isinstance(mesh, ExpertMesh):
        return mesh
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"mesh: expected a jax.sharding.Mesh with axes {_LISTED}, got {type(mesh).__name__}"
        )
    names = {} if axis_names is None else dict(axis_names)
    _check_names(names, mesh)
    others = {role: name for role, name in names.items() if role != name}
    expert_mesh = ExpertMesh(mesh, tuple(sorted(others.items())))
    if not any(map(expert_mesh.has, ROLES)):
        raise ValueError(
            f"mesh: expected at least one of the axes {_LISTED}, got {dict(mesh.shape)}. If axes "
            'have other names, pass axis_names, such as {"expert": "ep", "data": "dp"}'
        )
    return expert_mesh


_LISTED = f"'{EXPERT}', '{TENSOR}' and '{DATA}'"


def _check_names(names, mesh):
    """Raise a ValueError if `names`, from roles to axes of `mesh`, are not possible."""
    unknown = [role for role in names if role not in ROLES]
    if unknown:
        raise ValueError(f"axis_names: expected keys among {_LISTED}, got {unknown[0]!r}")
    missing = [name for name in names.values() if name not in mesh.shape]
    if missing:
        raise ValueError(
            f"axis_names: expected names of axes of the mesh {dict(mesh.shape)}, got {missing[0]!r}"
        )
    used = [names.get(role, role) for role in ROLES if names.get(role, role) in mesh.shape]
    if len(set(used)) < len(used):
        raise ValueError(f"axis_names: expected another axis for each role, got {names}")


def check_context(array: jax.Array) -> None:
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
      what: name of the sharded size, for the error message.
      n: the sharded size.
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


def stack_parts(shape: Sequence[int], sharding: NamedSharding, part: Callable) -> jax.Array:
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


def first_shard_only(bias: jax.Array, axis: str) -> jax.Array:
    """Return the bias on the first shard along a mesh axis, and zeros on the other shards.

    If the columns of a linear layer are sharded, its outputs are summed over the shards. The bias
    must then be added once.
    """
    return jnp.where(lax.axis_index(axis) == 0, bias, jnp.zeros_like(bias))
