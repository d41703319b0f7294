"""Run a whole step of a model as the program of each device of a mesh.

Otherwise each module shards its own arrays. Between two modules, the program is one of all devices,
in which a chain of kernels (`ops.chain_calls`) has to end. In the program of one device, a chain
goes on through all modules, and through the sums of GPUs that `connect_peers` has connected.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from jax_nvfp4_moe.parallel.expert_mesh import TENSOR, ExpertMesh
from jax_nvfp4_moe.parallel.partition_specs import partition_specs
from jax_nvfp4_moe.parallel.shard_spec import axis_spec
from jax_nvfp4_moe.parallel.sharded_variable import find_layout, sharded_axes
from jax_nvfp4_moe.parallel.tensor_parallel import EXACT_INDEX, find_largest, own_columns


def find_connected_mesh(model: Any) -> ExpertMesh | None:
    """Return the mesh whose GPUs `connect_peers` has connected and on which `model` is; or None.

    It is None in these cases, too:

    * The mesh shards the rows of a batch.
    * Experts have adapters, whose variables do not tell how they are sharded.
    * The tokens are dispatched to the devices of their experts, which shards them.
    """
    found = None
    for module, mesh in _modules_on_meshes(model):
        if not mesh.peers or mesh.data > 1 or getattr(module, "adapter", None) is not None:
            return None
        if getattr(getattr(module, "options", None), "dispatch", "psum") != "psum":
            return None
        found = mesh
    return found


def start_together(model: Any, values: jax.Array) -> jax.Array:
    """Return `values`, and let connected GPUs start a program together.

    The programs of this package, such as those of `generate`, call it. Call it once in each program
    of your own that runs a model on a mesh of `connect_peers`, outside of loops. If such a program
    has no collective of XLA, one GPU may begin to wait for another whose program is not ready yet,
    and both may wait until the sum fails. Models on other meshes need no call, and have `values`
    returned unchanged.

    Args:
      model: the model that the program runs.
      values: a number or an array, such as the token ids. All devices have the same `values`, and
        the program uses the result in their place.

    Returns:
      An array equal to `values`.

    Example:
      >>> import importlib.resources
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> from jax_nvfp4_moe.parallel import start_together
      >>> path = importlib.resources.files(nvfp4) / "examples" / "tiny-python-moe"
      >>> model = nvfp4.load_model(path)
      >>> run = jax.jit(lambda model, ids: model(start_together(model, ids)))
      >>> run(model, jnp.zeros((1, 4), jnp.int32)).shape
      (1, 4, 4096)
    """
    for _, mesh in _modules_on_meshes(model):
        if mesh.peers:
            return from_first_device(values, mesh)
    return values


def from_first_device(values: Any, expert_mesh: ExpertMesh) -> jax.Array:
    """Return the `values` that the first device of a mesh has, by a collective of XLA.

    Before GPUs of one process run a program, XLA loads kernels and makes CUDA graphs for each GPU.
    Only if the program has a collective, XLA then lets the GPUs wait for each other on the host.
    Without that, one GPU could already wait in a sum (`connect_peers`) for another, and the CUDA
    driver could hold back the thread that prepares the program of the other GPU.
    """
    axes = expert_mesh.mesh.axis_names

    def body(values):
        # XLA would remove a collective of values of which it knows that all devices have the same.
        own = jnp.where(lax.axis_index(axes) == 0, values, jnp.zeros_like(values))
        return lax.psum(own, axes)

    return expert_mesh.shard_map(body, (expert_mesh.spec(),), expert_mesh.spec())(
        jnp.asarray(values)
    )


def _modules_on_meshes(model: Any) -> Iterator[tuple[nnx.Module, ExpertMesh]]:
    """Yield the modules that a mesh shards, and their meshes."""
    if not isinstance(model, nnx.Module):
        return
    for _, module in nnx.iter_modules(model):
        mesh = getattr(module, "expert_mesh", None)
        if isinstance(mesh, ExpertMesh):
            yield module, mesh


def on_each_device(run: Callable, expert_mesh: ExpertMesh) -> Callable:
    """Return `run` as a function whose program is that of each device.

    Args:
      run: ``(model, ids, cache) -> (logits, cache)``, with the parts that one device holds.
      expert_mesh: the mesh of the model, without an axis `data`.

    Returns:
      A function of the whole model and the whole cache. The ids and the logits, or what `run`
      returns in their place, are replicated.
    """

    def call(model, ids, cache):
        leaves, tree = jax.tree.flatten(model)
        given, whole = model_specs(model, expert_mesh), expert_mesh.spec()
        kept = cache_specs(model, cache, expert_mesh)

        def body(leaves, ids, cache):
            return run(tree.unflatten(leaves), ids, cache)

        mapped = expert_mesh.shard_whole(body, (given, whole, kept), (whole, kept))
        return mapped(leaves, ids, cache)

    return call


def shards_logits(model: Any) -> bool:
    """Return whether each device has the logits of some tokens, which `only_largest` needs."""
    mesh = getattr(model, "expert_mesh", None)
    return isinstance(mesh, ExpertMesh) and model.config.vocab_size <= EXACT_INDEX


def only_largest(run: Callable, expert_mesh: ExpertMesh) -> Callable:
    """Return `run` with the largest logit of each token in place of all logits.

    Devices then exchange two numbers for each token. The logits of Qwen3-30B-A3B are 0.6 MB for
    each token; above 1 MiB, a collective of XLA gathers them, which ends a CUDA graph.

    Args:
      run: as for `on_each_device`, of a model for which `shards_logits` is true.
      expert_mesh: the mesh of the model.

    Returns:
      A function that returns the pair of `find_largest` for each token, and the cache.
    """

    def call(model, ids, cache):
        with own_columns():
            logits, cache = run(model, ids, cache)
        return find_largest(logits, expert_mesh), cache

    return call


def model_specs(model: nnx.Module, expert_mesh: ExpertMesh) -> list[PartitionSpec]:
    """Return the specification of each leaf of a model, in the order of `jax.tree.leaves`."""
    found = []
    for variable in jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        if not isinstance(variable, nnx.Variable):
            found.append(expert_mesh.spec())
        elif variable.get_metadata("partition_specs", None) is not None:
            found += jax.tree.leaves(partition_specs(variable))
        elif find_layout(variable) is None:
            found += [expert_mesh.spec()] * len(jax.tree.leaves(variable.get_value()))
        else:
            found += [axis_spec(expert_mesh, axis) for axis in sharded_axes(variable)]
    return found


def cache_specs(model: Any, cache: Any, expert_mesh: ExpertMesh) -> Any:
    """Return a cache of `model` with the specification of each array in its place.

    An axis that is shorter in the cache of one device is sharded along `tensor`.
    """

    def make():
        return model.init_cache(len(cache.lengths), cache.max_length)

    own = jax.eval_shape(expert_mesh.shard_whole(make, (), expert_mesh.spec()))

    def spec(whole, part):
        pairs = enumerate(zip(whole.shape, part.shape, strict=True))
        axes = [axis for axis, (all_of, some) in pairs if all_of != some]
        return expert_mesh.spec(*(None,) * axes[0], TENSOR) if axes else expert_mesh.spec()

    return jax.tree.map(spec, cache, own)
