"""`chain_calls`: run the kernels of a function in few calls, so that they overlap."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jax_nvfp4_moe.backends.chains.emission import (
    CALL_CHAIN_CPU,
    CALL_CHAIN_CUDA,
    Call,
    Value,
    emit_chain,
)
from jax_nvfp4_moe.ops.records import RECORDS

_CHAINS = {record.platform: record.ffi_targets[0] for record in (CALL_CHAIN_CPU, CALL_CHAIN_CUDA)}
# FFI target of a kernel -> the target that runs a chain of such kernels.
_CHAIN_OF = {
    target: _CHAINS[record.platform]
    for record in RECORDS
    if "chain_calls" not in record.lower
    for target in record.ffi_targets
}
# Equations that contain a function of the same operands.
_FUNCTIONS = (
    "jit",
    "pjit",
    "closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vmap_call",
    "custom_partitioning",
)


def chain_calls(function: Callable) -> Callable:
    """Return `function`, with successive calls of our kernels joined into chains.

    The kernels compute the same bits. Operations of XLA between them have the same definition, but
    XLA may fuse them in another way, which can change the last bits of their float32 results.

    On a GPU, XLA starts a kernel when all kernels of the calls before it have ended. In a chain,
    the next kernel is already on the device by then, and may have requested its weights. This saves
    one to two microseconds for each kernel, which counts if a function has many short kernels, as a
    decoding step has. `generate` and `stream` chain the calls of their steps by themselves.

    Successive calls also run in parallel with the calls ahead of them, on a second stream, if they
    do not need their results. Shared experts thus run in parallel with the router and the routed
    experts.

    For one token, some kernels do the work of the call ahead of them, too. A linear layer
    normalizes its row (`ops.add_rms_norm`), and attention prepares its heads (`ops.prepare_heads`).
    For several tokens, a norm adds up the results of experts or of connected GPUs.

    A chain has kernels that follow each other and depend on nothing but each other's results and
    on arrays that exist before. Any other operation on a result, such as a matrix product by XLA,
    ends the chain.

    Args:
      function: function of arrays and pytrees of arrays that returns a pytree of arrays. It is
        traced whenever the new function is called, so call that inside of ``jax.jit``. Calls inside
        of loops, conditions and ``shard_map`` stay as they are. If arrays are sharded, XLA gathers
        them before a chain: chain the calls of one device, inside of ``shard_map``.

    Returns:
      A function of the same positional arguments. You cannot differentiate through a chain.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> weight = nvfp4.quantize(jnp.eye(64))
      >>> def twice(x):
      ...     return nvfp4.ops.linear(nvfp4.ops.linear(x, weight), weight)
      >>> x = jnp.ones((1, 64), jnp.bfloat16)
      >>> y = jax.jit(nvfp4.ops.chain_calls(twice))(x)
      >>> bool((y == twice(x)).all())
      True
    """

    @functools.wraps(function)
    def chained(*args):
        leaves, tree = jax.tree.flatten(args)

        def flat(*leaves):
            return function(*jax.tree.unflatten(tree, leaves))

        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        results = _run(closed, leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return chained


@dataclasses.dataclass(frozen=True)
class _View:
    """A value of a program: an array, or a reshaped one."""

    root: Value
    shape: tuple[int, ...]

    def array(self):
        array = self.root.array
        return array if self.shape == self.root.shape else jax.lax.reshape(array, self.shape)


@dataclasses.dataclass(frozen=True)
class _Step:
    """An equation of a program that is no reshape.

    Attributes:
      eqn: the equation of the jaxpr.
      operands: what it reads.
      results: what it writes.
    """

    eqn: Any
    operands: Sequence[_View]
    results: Sequence[Value]

    @property
    def chain(self) -> str | None:
        """Return the target that runs this call in a chain; None if no chain can.

        An array has no place in the attributes of a chain, because JAX hashes them.
        `causal_convolution` has one.
        """
        if self.eqn.primitive.name != "ffi_call":
            return None
        values = (getattr(value, "val", None) for _, value in self.eqn.params["attributes"])
        if any(isinstance(value, np.ndarray) for value in values):
            return None
        return _CHAIN_OF.get(self.eqn.params["target_name"])

    @property
    def call(self) -> Call:
        """Return this step as a call of a chain."""
        params = self.eqn.params
        return Call(
            params["target_name"],
            {name: getattr(value, "val", value) for name, value in params["attributes"]},
            [(view.root, view.shape) for view in self.operands],
            self.results,
            dict(params["input_output_aliases"]),
        )

    @property
    def overwritten(self) -> set[Value]:
        """Return the operands whose memory a result takes."""
        return {self.operands[index].root for index, _ in self.eqn.params["input_output_aliases"]}

    def run(self):
        """Evaluate the equation, and set the arrays of the results."""
        eqn = self.eqn
        params, operands = eqn.primitive.get_bind_params(eqn.params), self.operands
        with eqn.ctx.manager, jax.named_scope(str(eqn.source_info.name_stack)):
            found = eqn.primitive.bind(*(view.array() for view in operands), **params)
        arrays = found if eqn.primitive.multiple_results else [found]
        for value, array in zip(self.results, arrays, strict=True):
            value.array = array


def _inner(eqn) -> ClosedJaxpr | None:
    """Return the function that an equation calls once, if it has calls of ours or does nothing."""
    closed = _function(eqn)
    return closed if closed and (not closed.jaxpr.eqns or _has_calls(closed)) else None


def _function(eqn) -> ClosedJaxpr | None:
    """Return the function that an equation calls once with its own operands."""
    if eqn.primitive.name not in _FUNCTIONS:
        return None
    names = "jaxpr", "call_jaxpr", "call"
    closed = next((eqn.params[name] for name in names if name in eqn.params), None)
    return closed if isinstance(closed, ClosedJaxpr) else None


def _has_calls(closed: ClosedJaxpr) -> bool:
    inner = filter(None, map(_function, closed.jaxpr.eqns))
    return any(eqn.primitive.name == "ffi_call" for eqn in closed.jaxpr.eqns) or any(
        map(_has_calls, inner)
    )


def _is_reshape(eqn) -> bool:
    """Return whether an equation only changes the shape of its operand, or nothing."""
    name, operands = eqn.primitive.name, eqn.invars
    if name == "convert_element_type":
        return operands[0].aval.dtype == eqn.outvars[0].aval.dtype
    if (
        name not in ("reshape", "squeeze", "broadcast_in_dim", "stop_gradient")
        or len(operands) != 1
    ):
        return False
    if name == "reshape" and eqn.params["dimensions"] is not None:
        return False
    sizes = [math.prod(v.aval.shape) for v in (operands[0], eqn.outvars[0])]
    return sizes[0] == sizes[1] and not isinstance(operands[0], Literal)


def _inline(closed: ClosedJaxpr, views: Sequence[_View], steps: list[_Step]) -> list[_View]:
    """Append the steps of a function to `steps`, and return its results."""
    known = [_View(Value(c.shape, c.dtype, c), c.shape) for c in closed.consts]
    env = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*known, *views], strict=True))

    def read(atom):
        if not isinstance(atom, Literal):
            return env[atom]
        aval: Any = atom.aval
        return _View(Value(aval.shape, aval.dtype, atom.val), aval.shape)

    for eqn in closed.jaxpr.eqns:
        operands, inner = [read(atom) for atom in eqn.invars], _inner(eqn)
        if inner is not None:
            results = _inline(inner, operands, steps)
        elif _is_reshape(eqn):
            results = [_View(operands[0].root, eqn.outvars[0].aval.shape)]
        else:
            values = [Value(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
            steps.append(_Step(eqn, operands, values))
            results = [_View(value, value.shape) for value in values]
        env |= dict(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _run(closed: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    """Evaluate a function, with its calls in chains."""
    views = [_View(Value(a.shape, a.dtype, a), a.shape) for a in map(jax.numpy.asarray, arguments)]
    steps: list[_Step] = []
    results = _inline(closed, views, steps)
    last = {view.root: index for index, step in enumerate(steps) for view in step.operands}
    last |= {view.root: len(steps) for view in results}
    open_steps: list[_Step] = []

    def close(index):
        """Emit the open chain; `index` is that of the next step."""
        written = [value for step in open_steps for value in step.results]
        target = open_steps[0].chain if open_steps else None
        if len(open_steps) == 1:
            open_steps[0].run()
        elif target is not None:
            wanted = [value for value in written if last.get(value, -1) >= index]
            emit_chain(target, [step.call for step in open_steps], wanted)
        open_steps.clear()

    for index, step in enumerate(steps):
        waits = any(view.root.array is None for view in step.operands)
        if step.chain is None:
            if waits:
                close(index)
            step.run()
            continue
        if open_steps and not _fits(step, open_steps):
            close(index)
        open_steps.append(step)
    close(len(steps))
    return [view.array() for view in results]


def _fits(step: _Step, chain: Sequence[_Step]) -> bool:
    """Return whether a call may follow the calls of an open chain.

    A result can take the memory of an operand of the chain only, not that of a value inside. What
    was in that memory cannot be read afterwards.
    """
    overwritten = set().union(*(earlier.overwritten for earlier in chain))
    return (
        step.chain == chain[0].chain
        and all(value.array is not None for value in step.overwritten)
        and not any(view.root in overwritten for view in step.operands)
    )
