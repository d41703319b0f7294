"""The activations between an expert's two products: one table, gated and not.

A gated activation takes gate ``g`` and up ``u`` and returns ``act(g) * u``; one that is not takes
``x`` alone. All arithmetic is float32. A finite `limit` clamps first: ``g = min(g, limit)``,
``u = clip(u, -limit, limit)``, ``x = min(x, limit)``.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Activation:
    """One row of the table.

    Attributes:
      gated: whether the first product yields gate and up.
      function: ``(gate, alpha) -> value`` in float32, before the multiplication by up.
      parametrised: whether a caller may set alpha and beta.
      interleaved: whether its rows alternate gate, up, gate, up instead of standing in halves.
      alpha, beta, limit: what they are where the caller names none; ``(up + beta)`` is multiplied.
    """

    gated: bool
    function: Callable
    interleaved: bool = False
    parametrised: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf


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
    "relu2": Activation(False, _relu2),
    "silu_no_mul": Activation(False, _silu),
    "gelu_no_mul": Activation(False, _gelu),
    "gelu_tanh_no_mul": Activation(False, _gelu_tanh),
}

# Other names that configurations use for the same row.
ALIASES = {"gelu_pytorch_tanh": "gelu_tanh", "relu2_no_mul": "relu2", "swish": "silu"}


@dataclasses.dataclass(frozen=True)
class ActivationCall:
    """An activation with its parameters settled: what a backend is told."""

    name: str
    alpha: float
    beta: float
    limit: float

    @property
    def row(self) -> Activation:
        """Its row of the table."""
        return ACTIVATIONS[self.name]


def find_activation(
    name: str | ActivationCall,
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
) -> ActivationCall:
    """Return the activation called `name`, with the table's parameters where None is given.

    Args:
      name: a row of `ACTIVATIONS` or an alias of one. An `ActivationCall`, whose parameters are
        settled, is returned as it is.
      alpha, beta: for rows that take them; None for the row's own.
      limit: where the inputs are clamped; None for the row's own.

    Raises:
      ValueError: the name is unknown (the message lists those that are), it takes no `alpha` and
        `beta`, `limit` is not positive, or parameters come beside an `ActivationCall`.
    """
    if isinstance(name, ActivationCall):
        if (alpha, beta, limit) != (None, None, None):
            raise ValueError(f"alpha, beta, limit: expected None beside {name}, which has them")
        return name
    name = ALIASES.get(name, name)
    if name not in ACTIVATIONS:
        raise ValueError(
            f"activation: expected one of {sorted([*ACTIVATIONS, *ALIASES])}, got {name!r}"
        )
    row = ACTIVATIONS[name]
    if not row.parametrised and (alpha is not None or beta is not None):
        takes = sorted(other for other, its in ACTIVATIONS.items() if its.parametrised)
        raise ValueError(f"alpha, beta: expected None but with one of {takes}, got {name!r}")
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
    """Apply `call` to the first product, ``[..., 2i]`` (gated) or ``[..., i]``; gives ``[..., i]``.

    ``function(min(gate, limit), alpha) * (clip(up, -limit, limit) + beta)``; float32 throughout.
    """
    u = u.astype(jnp.float32)
    if not call.row.gated:
        return call.row.function(_at_most(u, call.limit), call.alpha)
    if call.row.interleaved:
        gate, up = u[..., 0::2], u[..., 1::2]
    else:
        gate, up = jnp.split(u, 2, axis=-1)
    if math.isfinite(call.limit):
        up = jnp.clip(up, -call.limit, call.limit)
    return call.row.function(_at_most(gate, call.limit), call.alpha) * (up + call.beta)


def _at_most(x, limit):
    return jnp.minimum(x, limit) if math.isfinite(limit) else x
