"""`activate`, `add_gated`, `add_linear_gated`, `gate_heads`: gates between and after GEMMs."""

import math
from collections.abc import Sequence

from jaxtyping import Array, Float

from jax_nvfp4_moe.backends import heads, reference
from jax_nvfp4_moe.backends.resolution import resolve
from jax_nvfp4_moe.numerics.activations import ActivationCall, find_activation
from jax_nvfp4_moe.numerics.arguments import check_arguments
from jax_nvfp4_moe.ops.dense import dense
from jax_nvfp4_moe.ops.derivative import with_derivative_of
from jax_nvfp4_moe.scheme import Problem, Target

_FLOATS = ("bfloat16", "float16", "float32")
# Rows up to which a kernel of its own pays: between two other kernels of ours it does not end a
# chain (`ops.chain_calls`). With more rows, XLA's fusion is as good.
_FEW_ROWS = 64


@check_arguments
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
      target: the `Target` to lower for; None (default) for the current device.
      backend: name of a backend, or a sequence of names that are tried in that order. None
        (default) chooses the first backend that accepts the problem.

    Returns:
      ``[..., i]`` in the dtype of `gate_up`. Gradients flow in plain XLA.

    Raises:
      ValueError: if a shape, a dtype or the activation is wrong.
      NoBackendError: if no backend can run the call; the message lists every backend and its
        reason.

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
    _check_dtype("gate_up", gate_up)
    if gate_up.ndim < 1 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: expected [..., 2i], got {gate_up.shape}")
    run = _resolve("activate", gate_up, 1, target, backend)
    return with_derivative_of(reference.activate_rows, run, "... _ -> ... _", call=call)(gate_up)


@check_arguments
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
      target: the `Target` to lower for; None (default) for the current device.
      backend: name of a backend, or a sequence of names that are tried in that order. None
        (default) chooses the first backend that accepts the problem.

    Returns:
      ``[..., h]`` in the dtype of `x`. Gradients flow in plain XLA.

    Raises:
      ValueError: if a shape or a dtype is wrong.
      NoBackendError: if no backend can run the call; the message lists every backend and its
        reason.

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
    run = _resolve("add_gated", x, 1, target, backend)
    rows = "... _, ... _, ... _ -> ... _"
    return with_derivative_of(reference.add_gated, run, rows)(x, gate, z)


@check_arguments
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

    Args:
      x: ``[..., h]``, bfloat16, float16 or float32.
      gate_input: ``[..., k]`` of the dtype of `x`.
      gate_weight: ``[k]`` of the dtype of `x`.
      z: ``[..., h]`` of the dtype of `x`.
      target: the `Target` to lower for; None (default) for the current device.
      backend: name of a backend, or a sequence of names that are tried in that order. None
        (default) chooses the first backend that accepts the problem. Backend "reference" computes
        the gate as a linear layer does, which may run on a kernel for few rows.

    Returns:
      ``[..., h]`` in the dtype of `x`. Gradients flow in plain XLA.

    Raises:
      ValueError: if a shape or a dtype is wrong.
      NoBackendError: if no backend can run the call; the message lists every backend and its
        reason.

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
    target = target or Target.current()
    run = _resolve("add_linear_gated", x, 1, target, backend, inputs=k)
    if run is reference.add_linear_gated:
        # The same bits as a linear layer and `add_gated`, with a kernel where `dense` has one.
        gate = dense(gate_input, gate_weight[None], target=target, dtype=x.dtype)
        return reference.add_gated(x, gate, z)
    rows = "... _, ... _, -, ... _ -> ... _"
    operands = x, gate_input, gate_weight, z
    return with_derivative_of(reference.add_linear_gated, run, rows)(*operands)


@check_arguments
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
      gates: one gate for each head, ``[..., n]``. Or the projected tokens ``[..., w]`` that
        `prepare_heads` takes with ``gated=True``: in the first ``2 n d`` columns, the d channels of
        each query head are followed by d gates. The dtype is that of `x`.
      target: the `Target` to lower for; None (default) for the current device.
      backend: name of a backend, or a sequence of names that are tried in that order. None
        (default) chooses the first backend that accepts the problem.

    Returns:
      ``[..., n, d]`` in the dtype of `x`. Gradients flow in plain XLA.

    Raises:
      ValueError: if a shape or a dtype is wrong.
      NoBackendError: if no backend can run the call; the message lists every backend and its
        reason.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> x = jnp.full((1, 2, 3), 4.0)  # two heads of width 3
      >>> nvfp4.ops.gate_heads(x, jnp.array([[0.0, 100.0]])).tolist()
      [[[2.0, 2.0, 2.0], [4.0, 4.0, 4.0]]]
    """
    _check_dtype("x", x)
    if x.ndim < 2:
        raise ValueError(f"x: expected [..., n, d], got {x.shape}")
    *lead, n, d = x.shape
    width = gates.shape[-1] if gates.ndim else 0
    fits = gates.shape[:-1] == tuple(lead) and (width == n or width >= 2 * n * d)
    if not fits or gates.dtype != x.dtype:
        raise ValueError(
            f"gates: expected {x.dtype.name} {(*lead, n)}, or a last axis of at least {2 * n * d}, "
            f"because x is {x.dtype.name} {x.shape}; got {gates.dtype.name} {gates.shape}"
        )
    run = _resolve("gate_heads", x, 2, target, backend)
    rows = "... _ _, ... _ -> ... _ _"
    return with_derivative_of(heads.gate_heads, run, rows)(x, gates)


def _check_dtype(name, x):
    if x.dtype.name not in _FLOATS:
        raise ValueError(f"{name}: expected {', '.join(_FLOATS)}; got {x.dtype.name}")


def _check_sum(x, z):
    """Check the terms of a sum."""
    _check_dtype("x", x)
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


def _resolve(op, x, axes, target, backend, inputs=0):
    """Return the function that computes `op` on rows, which are the last `axes` axes of `x`.

    `inputs` is the number of inputs of a linear gate.
    """
    rows = math.prod(x.shape[:-axes])
    if backend is None and not (isinstance(rows, int) and rows <= _FEW_ROWS):
        backend = "reference"
    target = target or Target.current()
    hidden = math.prod(x.shape[-axes:])
    problem = Problem(op, None, target, x.dtype.name, hidden=hidden, intermediate=inputs)
    return resolve(problem, backend=backend).lower
