"""Activation functions between the two GEMMs of an expert, gated and not gated.

A gated activation takes a gate ``g`` and an up value ``u`` and returns ``act(g) * u``. An
activation that is not gated takes one input ``x``. All arithmetic is in float32. A finite `limit`
clamps the inputs first: ``g = min(g, limit)``, ``u = clip(u, -limit, limit)`` and
``x = min(x, limit)``. "swiglustep" clamps the result of `act` in place of the gate:
``min(act(g), limit) * clip(u, -limit, limit)``.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Activation:
    """One activation: a row of the table `ACTIVATIONS`.

    Attributes:
      gated: whether the first GEMM returns gate and up columns.
      function: ``(gate, alpha) -> value`` in float32. For a gated activation, the result is then
        multiplied by ``up + beta``.
      interleaved: whether gate and up rows of the weight alternate. If False, all gate rows come
        first, then all up rows.
      parametrised: whether a caller may set `alpha` and `beta`.
      alpha: default factor inside `function`.
      beta: default number that is added to up.
      limit: default bound of the inputs. Infinity means that nothing is clamped.
      bounds_result: whether `limit` bounds the result of `function` in place of the gate.
    """

    gated: bool
    function: Callable
    interleaved: bool = False
    parametrised: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf
    bounds_result: bool = False


def _silu(x, alpha):
    return x * jax.nn.sigmoid(alpha * x)


def _gelu(x, alpha):
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x, alpha):
    return jax.nn.gelu(x, approximate=True)


def _relu2(x, alpha):
    return jnp.square(jnp.maximum(x, 0.0))


ACTIVATIONS = {
    "silu": Activation(True, _silu),
    "gelu": Activation(True, _gelu),
    "gelu_tanh": Activation(True, _gelu_tanh),
    "swigluoai": Activation(True, _silu, True, parametrised=True, alpha=1.702, beta=1.0, limit=7.0),
    "swigluoai_uninterleave": Activation(
        True, _silu, parametrised=True, alpha=1.702, beta=1.0, limit=7.0
    ),
    "swiglustep": Activation(True, _silu, limit=7.0, bounds_result=True),
    "relu2": Activation(False, _relu2),
    "silu_no_mul": Activation(False, _silu),
    "gelu_no_mul": Activation(False, _gelu),
    "gelu_tanh_no_mul": Activation(False, _gelu_tanh),
}

# Other names that configurations of models use for the same activations.
ALIASES = {"gelu_pytorch_tanh": "gelu_tanh", "relu2_no_mul": "relu2", "swish": "silu"}


@dataclasses.dataclass(frozen=True)
class ActivationCall:
    """An activation with all its parameters resolved, as backends receive it.

    `find_activation` returns it.

    Attributes:
      name: a key of `ACTIVATIONS`.
      alpha: factor inside the activation, for example in ``x * sigmoid(alpha * x)``.
      beta: number that is added to up before the multiplication.
      limit: bound of the inputs. Infinity means that nothing is clamped.
    """

    name: str
    alpha: float
    beta: float
    limit: float

    @property
    def row(self) -> Activation:
        """The entry of `ACTIVATIONS` with this name."""
        return ACTIVATIONS[self.name]


def find_activation(
    name: str | ActivationCall,
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
) -> ActivationCall:
    """Return the activation called `name`, with all its parameters resolved.

    The computed function is
    ``function(min(gate, limit), alpha) * (clip(up, -limit, limit) + beta)`` for gated activations,
    and ``function(min(x, limit), alpha)`` for the others. "swiglustep" computes
    ``min(silu(gate), limit) * clip(up, -limit, limit)``. All arithmetic is in float32.

    Args:
      name: a key of `ACTIVATIONS` or one of its `ALIASES`, such as "silu". An `ActivationCall` is
        returned unchanged.
      alpha: factor inside the activation. None, the default, takes the value of the activation.
        Only "swigluoai" and "swigluoai_uninterleave" accept a number.
      beta: number that is added to up. None, the default, takes the value of the activation. The
        same activations accept a number as for `alpha`.
      limit: bound of the inputs, a positive number. None, the default, takes the value of the
        activation.

    Returns:
      An `ActivationCall`, which `ops.moe_mlp` and the modules accept as `activation`.

    Raises:
      ValueError: if the name is unknown; the message lists the known names.
      ValueError: if `alpha` or `beta` is given for an activation that has no such parameter.
      ValueError: if `limit` is not positive.
      ValueError: if `name` is an `ActivationCall` and a parameter is given too.

    Example:
      >>> import jax_nvfp4_moe as nvfp4
      >>> nvfp4.find_activation("swigluoai", limit=5.0)
      ActivationCall(name='swigluoai', alpha=1.702, beta=1.0, limit=5.0)
      >>> nvfp4.find_activation("gelu_pytorch_tanh").name
      'gelu_tanh'

    Source: "swigluoai" is the activation of OpenAI's gpt-oss, with its constants. "swiglustep" is
    that of StepFun's Step-3.7, under the name that vLLM gives it.
    """
    if isinstance(name, ActivationCall):
        if (alpha, beta, limit) != (None, None, None):
            raise ValueError(
                f"alpha, beta, limit: expected None, because {name} already contains these "
                f"parameters; got {alpha}, {beta}, {limit}"
            )
        return name
    name = ALIASES.get(name, name)
    if name not in ACTIVATIONS:
        raise ValueError(
            f"activation: expected one of {sorted([*ACTIVATIONS, *ALIASES])}, got {name!r}"
        )
    row = ACTIVATIONS[name]
    if not row.parametrised and (alpha is not None or beta is not None):
        takes = sorted(other for other, its in ACTIVATIONS.items() if its.parametrised)
        raise ValueError(
            f"alpha, beta: expected None, because only {takes} take these parameters; "
            f"got {name!r} with alpha={alpha}, beta={beta}"
        )
    call = ActivationCall(
        name,
        row.alpha if alpha is None else float(alpha),
        row.beta if beta is None else float(beta),
        row.limit if limit is None else float(limit),
    )
    if not call.limit > 0:
        raise ValueError(f"limit: expected a positive number, got {limit}")
    return call


def activate(call: ActivationCall, u: jax.Array) -> jax.Array:
    """Apply the activation `call` to the output of the first GEMM.

    Computes ``function(min(gate, limit), alpha) * (clip(up, -limit, limit) + beta)`` for gated
    activations and ``function(min(u, limit), alpha)`` for the others, all in float32. If the row of
    the activation has `bounds_result`, the limit bounds the result of the function, not the gate.

    Args:
      call: the activation, as `find_activation` returns it.
      u: any float dtype, ``[..., 2i]`` if the activation is gated, else ``[..., i]``.

    Returns:
      float32 ``[..., i]``.
    """
    return activate_parts(call, *split_parts(call, u.astype(jnp.float32)))


def split_parts(call: ActivationCall, u: jax.Array) -> tuple[jax.Array, ...]:
    """Return the gate and the up columns of ``u [..., 2i]``; `u` alone if `call` is not gated."""
    if not call.row.gated:
        return (u,)
    if call.row.interleaved:
        return u[..., 0::2], u[..., 1::2]
    return tuple(jnp.split(u, 2, axis=-1))


def join_parts(call: ActivationCall, *parts: jax.Array) -> jax.Array:
    """Undo `split_parts`."""
    if call.row.interleaved:
        return jnp.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)
    return jnp.concatenate(parts, axis=-1)


def activate_parts(call: ActivationCall, gate: jax.Array, up: jax.Array | None = None) -> jax.Array:
    """Do what `activate` does, on the parts of `split_parts` in float32."""
    if up is None:
        return call.row.function(_at_most(gate, call.limit), call.alpha)
    if math.isfinite(call.limit):
        up = jnp.clip(up, -call.limit, call.limit)
    if call.row.bounds_result:
        gate = _at_most(call.row.function(gate, call.alpha), call.limit)
    else:
        gate = call.row.function(_at_most(gate, call.limit), call.alpha)
    return gate * (up + call.beta)


def _at_most(x, limit):
    """Return ``min(x, limit)``; an infinite `limit` adds no operation to the program."""
    return jnp.minimum(x, limit) if math.isfinite(limit) else x
