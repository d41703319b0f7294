"""Calibrate a user's own model: find the input scales of the NVFP4 modules inside it.

The model runs as its user calls it. Each NVFP4 module records what enters it, and a callback hands
the largest magnitude to the host. A callback works where values cannot leave a function: inside
`jax.jit`, `nnx.scan`, `nnx.vmap` and `nnx.remat`.

Transformations make new modules, so that a module cannot be found by its identity. During the
calibration each module holds its number. The number of a stacked module has an entry for each
layer, and a transformation takes the entry of a layer with the weights of that layer.
"""

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_nvfp4_moe.nn.experts.routed_experts import NVFP4Experts, RoutedTokens
from jax_nvfp4_moe.nn.intermediates import listen
from jax_nvfp4_moe.nn.linear.nvfp4_linear import NVFP4Linear
from jax_nvfp4_moe.nn.variables import NVFP4Param
from jax_nvfp4_moe.numerics.nvfp4 import SCALE_RANGE
from jax_nvfp4_moe.numerics.routing import narrow_ids
from jax_nvfp4_moe.ops.preparation import plan_with_input_scales
from jax_nvfp4_moe.parallel.placement import to_physical_ids
from jax_nvfp4_moe.quantization.calibration import observe, observe_experts
from jax_nvfp4_moe.scheme import Scheme

_LOG = logging.getLogger("jax_nvfp4_moe")
_NUMBER = "calibration_number"  # attribute that holds the number of a module

Module = TypeVar("Module", bound=nnx.Module)


def calibrate(
    module: Module, batches: Iterable[Any], *, scheme: Scheme | str | None = None
) -> Module:
    """Fill the input scales of the NVFP4 modules inside a model, so that it can run W4A4.

    It calls ``module(batch)`` for each batch. An input scale is ``amax / 2688`` of the activations
    that entered a product in all batches. As in ModelOpt's files, all experts of a layer share one
    input scale for each of their two products.

    The model may use `nnx.jit`, `jax.jit`, `nnx.scan`, `nnx.vmap` and `nnx.remat`. A module that no
    batch reaches stays as it is, and the log says so.

    Args:
      module: a Flax NNX module that contains `NVFP4MoE`, `NVFP4Experts` or `NVFP4Linear`, on one
        device. It is changed in place. Functions that were compiled with the module closed over
        keep its old weights: compile them again.
      batches: the inputs, such as a list of arrays. Data like those of the later use give the best
        scales.
      scheme: the scheme to run from now on, such as "w4a4". None (default) keeps what each module
        was asked for. A module that was asked for nothing then counts as a W4A4 checkpoint: it
        runs W4A4 on GPUs with FP4 tensor cores, and W4A16 on other devices.

    Returns:
      `module`.

    Raises:
      ValueError: there are no batches or no NVFP4 modules, no batch reached a module, activations
        were not finite, or experts are on a mesh.
      NoBackendError: no backend can run a module with `scheme`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jax_nvfp4_moe as nvfp4
      >>> model = nnx.Sequential(
      ...     nvfp4.NVFP4Linear(32, 64, rngs=nnx.Rngs(0)),
      ...     nvfp4.NVFP4MoE(8, 64, 32, top_k=2, rngs=nnx.Rngs(1)),
      ... )
      >>> batches = jax.random.normal(jax.random.key(0), (3, 16, 32))
      >>> model = nvfp4.calibrate(model, batches, scheme="w4a4")
      >>> str(model.layers[0].scheme), str(model.layers[1].scheme)
      ('w4a4', 'w4a4')
      >>> model(batches[0]).shape
      (16, 64)

    Source: NVIDIA ModelOpt calibrates checkpoints in the same way.
    """
    parts = _find_parts(module)
    for part in parts.values():
        plan_with_input_scales(part.plan, scheme)  # raises before any batch runs
    sizes = [_stack(part) for part in parts.values()]
    found = _Largest(sum(map(_count, sizes)))
    with _numbered(parts.values(), sizes), listen(found.take, lambda one: hasattr(one, _NUMBER)):
        count = _run(module, batches)
    if not count:
        raise ValueError("batches: expected at least one batch to call the module with, got none")
    if not found.reached.any():
        raise ValueError(
            f"batches: none of the {count} batches reached an NVFP4 module of "
            f"{type(module).__name__} with a token. Its call must run the modules inside it. A "
            "function that jax.jit compiled before, with the module closed over, still runs the "
            "program of before"
        )
    _fill(parts, sizes, found, scheme)
    return module


def _find_parts(module) -> dict[str, NVFP4Experts | NVFP4Linear]:
    """Return path -> NVFP4 module inside `module`.

    Raises:
      ValueError: there is none, or experts are on a mesh.
    """
    if not isinstance(module, nnx.Module):
        raise ValueError(
            f"module: expected a Flax NNX module, got {type(module).__name__}. Calibrate the "
            "modules of a Linen model before `nnx.bridge.to_linen` wraps them"
        )
    kinds = (NVFP4Experts, NVFP4Linear)
    found = {id(part): (path, part) for path, part in nnx.iter_modules(module)}
    parts = {".".join(map(str, path)): p for path, p in found.values() if isinstance(p, kinds)}
    if not parts:
        raise ValueError(
            "module: expected a module that contains an NVFP4MoE, an NVFP4Experts or an "
            f"NVFP4Linear; {type(module).__name__} contains none that `nnx.iter_modules` finds"
        )
    meshes = [path for path, p in parts.items() if getattr(p, "expert_mesh", None) is not None]
    if meshes:
        raise ValueError(
            f"module: expected modules on one device, but {meshes[0] or 'it'} is on a mesh. "
            "Calibrate the model on one device, and make the modules on the mesh with its weights"
        )
    return parts


def _stack(part) -> tuple[int, ...]:
    """Return the leading axes of the weights of a module that count stacked layers."""
    if isinstance(part, NVFP4Experts):
        return part.params.get_value().down.packed.shape[:-3]
    return part.weight.get_value().packed.shape[:-2]


def _count(stack) -> int:
    """Return the number of layers that are stacked in one module."""
    return int(np.prod(stack, dtype=np.int64))


@contextlib.contextmanager
def _numbered(parts, sizes) -> Iterator[None]:
    """Give each module, and each layer stacked in one, a number while a model runs."""
    parts, start = list(parts), 0
    try:
        for part, stack in zip(parts, sizes, strict=True):
            numbers = np.arange(start, start + _count(stack), dtype=np.int32).reshape(stack)
            setattr(part, _NUMBER, NVFP4Param(jnp.asarray(numbers)))
            start += _count(stack)
        yield
    finally:
        for part in parts:
            if hasattr(part, _NUMBER):
                delattr(part, _NUMBER)


def _run(module, batches) -> int:
    """Call the module with each batch, wait for all callbacks, and return the number of batches."""
    count = 0
    for batch in batches:
        jax.block_until_ready(jax.tree.leaves(module(batch)))
        count += 1
    jax.effects_barrier()
    return count


class _Largest:
    """The largest magnitudes that entered the products of each numbered module.

    Attributes:
      amax: float32 ``[n, 2]``, for the first and the second product; the second is 0 for linears.
      reached: bool ``[n]``, whether any row entered.
    """

    def __init__(self, count: int):
        self.amax = np.zeros((count, 2), np.float32)
        self.reached = np.zeros(count, bool)
        self._lock = threading.Lock()  # callbacks run in threads of XLA

    def take(self, part, value) -> None:
        """Take what a module records, maybe while a function is traced."""
        number = getattr(part, _NUMBER).get_value()
        if isinstance(part, NVFP4Experts):
            rows, amax = _observe_experts(part, value)
        else:
            rows, amax = _observe_rows(value.astype(part.dtype))
        jax.debug.callback(self._keep, number, rows, amax)

    def _keep(self, number, rows, amax) -> None:
        """Add the statistics of one call."""
        if rows:
            with self._lock:
                own = self.amax[int(number)]
                own[:] = np.maximum(own, amax)  # keeps NaN
                self.reached[int(number)] = True


@jax.jit
def _observe_rows(x):
    """Return the number of rows of `x`, and the largest magnitudes of the two products."""
    seen = observe(x.reshape(-1, x.shape[-1]))
    return seen["count"][0], jnp.stack([seen["amax"][0], jnp.float32(0)])


def _observe_experts(part: NVFP4Experts, value: RoutedTokens):
    """Return the number of rows of all experts, and the largest magnitudes of both products."""
    options = part.options
    ids = to_physical_ids(narrow_ids(jnp.asarray(value.expert_ids)), part.slots)
    routed = value._replace(x=value.x.astype(options.dtype), expert_ids=ids, y=None)
    static = {"call": options.activation, "weight_on_input": options.weight_on_input}
    return _observe_slots(part.params.get_value(), routed, **static)


def _observe_slots(params, routed, call, weight_on_input):
    first, second = observe_experts(
        params, call, routed, weight_on_input=weight_on_input, squares=False
    )
    return first["count"].sum(), jnp.stack([one["amax"].max() for one in (first, second)])


_observe_slots = jax.jit(_observe_slots, static_argnames=("call", "weight_on_input"))


def _fill(parts, sizes, found: _Largest, scheme) -> None:
    """Set the input scales of the modules that were reached.

    Raises:
      ValueError: activations were not finite. No module is changed then.
    """
    ends = np.cumsum([_count(stack) for stack in sizes])[:-1]
    each = dict(zip(parts, np.split(found.amax, ends), strict=True))
    for path, amax in each.items():
        if not np.isfinite(amax).all():
            raise ValueError(
                f"batches: the activations that enter {path or 'the module'} are not finite; look "
                "for NaN and infinity in the batches and in the weights"
            )
    unreached = []
    for (path, part), stack, reached in zip(
        parts.items(), sizes, np.split(found.reached, ends), strict=True
    ):
        if not reached.any():
            unreached.append(path)
            continue
        scale = np.where(each[path] > 0, each[path] / np.float32(SCALE_RANGE), np.float32(1))
        first, second = (half.reshape(stack) for half in scale.T)
        if isinstance(part, NVFP4Experts):
            part.set_input_scales(first, second, scheme=scheme)
        else:
            part.set_input_scale(first, scheme=scheme)
    if unreached:
        _LOG.warning(
            "no batch reached %d of %d NVFP4 modules, which keep their scheme and have no input "
            "scales: %s",
            len(unreached),
            len(parts),
            ", ".join(unreached),
        )
