"""`activate`, `add_gated`, `add_linear_gated`, `gate_heads`: gates between and after GEMMs."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.backends.kernel_call import kernel_call
from jax_nvfp4_moe.backends.record import CUDA, Backend, Kernel
from jax_nvfp4_moe.numerics import activations
from jax_nvfp4_moe.numerics.activations import ActivationCall, find_activation
from jax_nvfp4_moe.ops.checks import check_floats
from jax_nvfp4_moe.ops.dense import dense
from jax_nvfp4_moe.ops.documentation import public_op
from jax_nvfp4_moe.ops.heads import split_gates
from jax_nvfp4_moe.ops.running import find_plan, run
from jax_nvfp4_moe.scheme import Target


@public_op
def activate(
    gate_up: Float[Array, "... 2i"],
    activation: str | ActivationCall = "silu",
    *,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> Float[Array, "... i"]:
    """Apply a gated activation: ``y = act(gate) * up``, in float32, rounded once.

    Args:
      gate_up: ``[..., 2i]``, bfloat16, float16 or float32. The gate columns come first, then the
        up columns. For "swigluoai" they alternate.
      activation: name of a gated activation, or the result of `find_activation`. Defaults to
        "silu".
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      ``[..., i]`` in the dtype of `gate_up`. Gradients flow in plain XLA.

    Raises:
      ValueError: if a shape, a dtype or the activation is wrong.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> gate_up = jnp.array([[0.0, 2.0, 5.0, 3.0]])  # gates 0 and 2, ups 5 and 3
      >>> [round(float(y), 3) for y in nvfp4.ops.activate(gate_up)[0]]
      [0.0, 5.285]
    """
    call = find_activation(activation)
    if not call.row.gated:
        raise ValueError(f"activation: expected a gated activation, got {call.name}")
    check_floats(gate_up=gate_up)
    if gate_up.ndim < 1 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: expected [..., 2i], got {gate_up.shape}")
    facts = _facts(gate_up, 1, target, backend)
    return run("activate", (gate_up,), "... _ -> ... _", options={"call": call}, **facts)


@public_op
def add_gated(
    x: Float[Array, "... h"],
    gate: Float[Array, "... 1"] | None,
    z: Float[Array, "... h"],
    *,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> Float[Array, "... h"]:
    """Add a block's result to another one, behind a gate: ``y = x + sigmoid(gate) * z``.

    The sigmoid and the product are rounded to the dtype of `x`.

    Args:
      x: ``[..., h]``, bfloat16, float16 or float32.
      gate: ``[..., 1]`` of the dtype of `x`. None adds `z` itself.
      z: ``[..., h]`` of the dtype of `x`.
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      ``[..., h]`` in the dtype of `x`. Gradients flow in plain XLA.

    Raises:
      ValueError: if a shape or a dtype is wrong.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> x, z = jnp.ones((1, 2)), jnp.full((1, 2), 4.0)
      >>> nvfp4.ops.add_gated(x, jnp.zeros((1, 1)), z).tolist()
      [[3.0, 3.0]]
    """
    _check_sum(x, z)
    if gate is not None:
        _check_like("x", x, "gate", gate, (*x.shape[:-1], 1))
    rows = "... _, ... _, ... _ -> ... _"
    return run("add_gated", (x, gate, z), rows, **_facts(x, 1, target, backend))


@public_op
def add_linear_gated(
    x: Float[Array, "... h"],
    gate_input: Float[Array, "... k"],
    gate_weight: Float[Array, " k"],
    z: Float[Array, "... h"],
    *,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> Float[Array, "... h"]:
    """Add a block's result behind a linear gate: ``y = x + sigmoid(gate_input @ gate_weight) * z``.

    The gate is a linear layer with a single output. Its sum is computed in float32. The gate, its
    sigmoid and the product with `z` are each rounded to the dtype of `x`.

    Backend "reference" computes the gate as a linear layer does, which may run on a kernel for few
    rows.

    Args:
      x: ``[..., h]``, bfloat16, float16 or float32.
      gate_input: ``[..., k]`` of the dtype of `x`.
      gate_weight: ``[k]`` of the dtype of `x`.
      z: ``[..., h]`` of the dtype of `x`.
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      ``[..., h]`` in the dtype of `x`. Gradients flow in plain XLA.

    Raises:
      ValueError: if a shape or a dtype is wrong.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> x, z, a = jnp.ones((1, 2)), jnp.full((1, 2), 4.0), jnp.array([[1.0, 2.0, 3.0]])
      >>> nvfp4.ops.add_linear_gated(x, a, jnp.array([1.0, 1.0, -1.0]), z).tolist()
      [[3.0, 3.0]]
    """
    _check_sum(x, z)
    k = gate_input.shape[-1] if gate_input.ndim else 0
    _check_like("x", x, "gate_input", gate_input, (*x.shape[:-1], k))
    _check_like("gate_input", gate_input, "gate_weight", gate_weight, (k,))
    facts = _facts(x, 1, target or Target.current(), backend, inputs=k)
    if find_plan("add_linear_gated", **facts).backend.platform is None:
        # The same bits as a linear layer and `add_gated`, with a kernel where `dense` has one.
        gate = dense(gate_input, gate_weight[None], target=facts["target"], dtype=x.dtype)
        return add_gated_meaning(x, gate, z)
    rows = "... _, ... _, -, ... _ -> ... _"
    return run("add_linear_gated", (x, gate_input, gate_weight, z), rows, **facts)


@public_op
def gate_heads(
    x: Float[Array, "... n d"],
    gates: Float[Array, "... w"],
    *,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> Float[Array, "... n d"]:
    """Multiply the heads of an attention by their gates: ``y = x * sigmoid(gate)``.

    The product is computed in float32 and rounded once.

    Args:
      x: results of n heads ``[..., n, d]``, bfloat16, float16 or float32.
      gates: one gate for each head, ``[..., n]``, or for each channel of each head, ``[..., n *
        d]``. Or the projected tokens ``[..., w]`` that `prepare_heads` takes with ``gated=True``:
        in the first ``2 n d`` columns, the d channels of each query head are followed by d gates.
        The dtype is that of `x`.
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      ``[..., n, d]`` in the dtype of `x`. Gradients flow in plain XLA.

    Raises:
      ValueError: if a shape or a dtype is wrong.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> x = jnp.full((1, 2, 3), 4.0)  # two heads of width 3
      >>> nvfp4.ops.gate_heads(x, jnp.array([[0.0, 100.0]])).tolist()
      [[[2.0, 2.0, 2.0], [4.0, 4.0, 4.0]]]
    """
    check_floats(x=x)
    if x.ndim < 2:
        raise ValueError(f"x: expected [..., n, d], got {x.shape}")
    *lead, n, d = x.shape
    width = gates.shape[-1] if gates.ndim else 0
    fits = gates.shape[:-1] == tuple(lead) and (width in (n, n * d) or width >= 2 * n * d)
    if not fits or gates.dtype != x.dtype:
        raise ValueError(
            f"gates: expected {x.dtype.name} {(*lead, n)}, or a last axis of at least {2 * n * d}, "
            f"or of {n * d}, "
            f"because x is {x.dtype.name} {x.shape}; got {gates.dtype.name} {gates.shape}"
        )
    rows = "... _ _, ... _ -> ... _ _"
    return run("gate_heads", (x, gates), rows, **_facts(x, 2, target, backend))


def _check_sum(x, z):
    """Check the terms of a sum."""
    check_floats(x=x)
    if x.ndim < 1:
        raise ValueError(f"x: expected [..., h], got {x.shape}")
    _check_like("x", x, "z", z, x.shape)


def _check_like(source, like, name, array, shape):
    """Check that `array` has the shape that follows from `like`, and the dtype of `like`."""
    if (array.shape, array.dtype) != (shape, like.dtype):
        raise ValueError(
            f"{name}: expected {like.dtype.name} {shape}, because {source} is {like.dtype.name} "
            f"{like.shape}; got {array.dtype.name} {array.shape}"
        )


def _facts(x, axes, target, backend, inputs=0):
    """Return the facts of an op on rows, which are the last `axes` axes of `x`.

    `inputs` is the number of inputs of a linear gate.
    """
    return {
        "target": target,
        "backend": backend,
        "dtype": x.dtype.name,
        "hidden": math.prod(x.shape[-axes:]),
        "intermediate": inputs,
        "sizes": {"rows": math.prod(x.shape[:-axes])},
    }


@functools.partial(jax.jit, inline=True, static_argnames=("call",))
def activate_meaning(gate_up, *, call):
    """Apply an activation; `ops.activate` describes the result."""
    return activations.activate(call, gate_up).astype(gate_up.dtype)


@functools.partial(jax.jit, inline=True)
def add_gated_meaning(x, gate, z):
    """Add; `ops.add_gated` describes the result."""
    return x + (z if gate is None else jax.nn.sigmoid(gate) * z)


@functools.partial(jax.jit, inline=True)
def add_linear_gated_meaning(x, gate_input, gate_weight, z):
    """Add; `ops.add_linear_gated` describes the result."""
    operands = gate_input.astype(jnp.float32), gate_weight.astype(jnp.float32)
    gate = jnp.dot(*operands, precision=lax.Precision.HIGHEST).astype(x.dtype)
    return add_gated_meaning(x, gate[..., None], z)


@functools.partial(jax.jit, inline=True)
def gate_heads_meaning(x, gates):
    """Multiply heads by their gates; `ops.gate_heads` describes the result."""
    n, d = x.shape[-2:]
    *lead, width = gates.shape
    if width in (n, n * d):
        gate = gates.reshape(*lead, n, 1 if width == n else d)
    else:
        gate = split_gates(gates, n, d)[1]
    return (x.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)


def _lower_activate(ffi_target, gate_up, *, call):
    """Lower `activate` to an FFI target."""
    *lead, width = gate_up.shape
    rows = gate_up.reshape(-1, width)
    output = jax.ShapeDtypeStruct((rows.shape[0], width // 2), gate_up.dtype)
    y = kernel_call(ffi_target, output)(
        rows,
        activation=call.name,
        alpha=np.float32(call.alpha),
        beta=np.float32(call.beta),
        limit=np.float32(call.limit),
    )
    return y.reshape(*lead, width // 2)


def _lower_add_gated(ffi_target, x, gate, z):
    """Lower `add_gated` to an FFI target."""
    rows = x.reshape(-1, x.shape[-1])
    operand = jnp.zeros(0, x.dtype) if gate is None else gate.reshape(-1)
    output = jax.ShapeDtypeStruct(rows.shape, x.dtype)
    return kernel_call(ffi_target, output)(rows, operand, z.reshape(rows.shape)).reshape(x.shape)


def _lower_add_linear_gated(ffi_target, x, gate_input, gate_weight, z):
    """Lower `add_linear_gated` to an FFI target."""
    rows = x.reshape(-1, x.shape[-1])
    inputs = gate_input.reshape(rows.shape[0], gate_weight.shape[0])
    output = jax.ShapeDtypeStruct(rows.shape, x.dtype)
    return kernel_call(ffi_target, output)(
        rows, inputs, gate_weight, z.reshape(rows.shape)
    ).reshape(x.shape)


def _lower_gate_heads(ffi_target, x, gates):
    """Lower `gate_heads` to an FFI target."""
    rows = x.reshape(-1, *x.shape[-2:])
    output = jax.ShapeDtypeStruct(rows.shape, x.dtype)
    return kernel_call(ffi_target, output)(rows, gates.reshape(-1, gates.shape[-1])).reshape(
        x.shape
    )


GATING_CUDA = Backend(
    "gating_cuda",
    {
        "activate": Kernel(_lower_activate, "nvfp4_activate_cuda"),
        "add_gated": Kernel(_lower_add_gated, "nvfp4_add_gated_cuda"),
        "add_linear_gated": Kernel(_lower_add_linear_gated, "nvfp4_add_linear_gated_cuda"),
        "gate_heads": Kernel(_lower_gate_heads, "nvfp4_gate_heads_cuda"),
    },
    (CUDA,),
    max_extent="MAX_EXTENT",
    # A kernel of its own pays for few rows: between two other kernels of ours it does not end a
    # chain (`ops.chain_calls`). With more rows, XLA's fusion is as good.
    unasked={"rows": range(65)},
)


BACKENDS = (GATING_CUDA,)
MEANINGS = {
    "activate": activate_meaning,
    "add_gated": add_gated_meaning,
    "add_linear_gated": add_linear_gated_meaning,
    "gate_heads": gate_heads_meaning,
}
