"""`causal_convolution`: the short convolution of a recurrent mixer for the tokens of a prompt."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.backends import convolution as reference
from jax_nvfp4_moe.backends.attention import narrow_positions
from jax_nvfp4_moe.backends.resolution import resolve
from jax_nvfp4_moe.numerics.arguments import check_arguments
from jax_nvfp4_moe.ops.derivative import with_derivative_of
from jax_nvfp4_moe.scheme import Problem, Target

_FLOATS = ("bfloat16", "float16", "float32")
# Tokens of a row up to which XLA's fusions run.
_FEW_TOKENS = 8


@check_arguments
def causal_convolution(
    x: Float[Array, "b t n"],
    positions: Int[Array, "b t"],
    inputs: Float[Array, "b taps-1 c"],
    *,
    weight: Float[Array, "c taps"],
    bias: Float[Array, " c"] | None = None,
    widths: Sequence[int] | None = None,
    first: int = 0,
    heads: int = 1,
    stride: int | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[tuple[Float[Array, "b t part"], ...], Float[Array, "b taps-1 c"]]:
    """Convolve each channel over the last tokens, and apply SiLU.

    ::

      sum[t, c] = weight[c, 0] x[t - taps + 1, c] + ... + weight[c, taps - 1] x[t, c]
      y[t, c] = silu(sum[t, c] + bias[c])

    The channels are columns of the projected tokens `x`, which may have other columns too. Sums and
    results are float32.

    Args:
      x: projected tokens ``[b, t, n]``, bfloat16, float16 or float32.
      positions: position of each token, integers ``[b, t]``. A token at position 2**30 or after it
        is padding: it does not enter the new `inputs`, and its result is undefined, but finite if
        `x` is finite. Padding must follow all other tokens of its row.
      inputs: last inputs of the convolution before `x`, ``[b, taps - 1, c]`` in the dtype of `x`,
        the oldest first. Zeros before the first token. If the caller donates the array, it is
        changed in place.
      weight: weights of the convolution, float32 ``[c, taps]``. The last one of a channel
        multiplies the newest input.
      bias: float32 ``[c]``; None (default) for none.
      widths: widths of the parts into which the results are divided, ``sum(widths) * heads == c``.
        None (default) for one part.
      first: the first column of `x` that is a channel, 0 by default.
      heads: number of heads, 1 by default. Each head has its columns of the first part, then those
        of the second part, and so on. In `inputs` and in the results, the channels of all heads of
        one part stand together.
      stride: number of columns from the beginning of a head to that of the next one. None (default)
        for ``sum(widths)``.
      target: the `Target` to lower for; None (default) for the current device.
      backend: name of a backend, or a sequence of names that are tried in that order. None
        (default) chooses the first backend that accepts the problem, and the reference for few
        tokens.

    Returns:
      A tuple ``(parts, inputs)``: the results of each part, float32 ``[b, t, heads * width]``, and
      the new `inputs`. Gradients flow to all float arguments, in plain XLA.

    Raises:
      ValueError: if a shape, a dtype or a column does not fit the others.
      NoBackendError: if no backend can run the call; the message lists every backend and its
        reason.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> x = jnp.ones((1, 16, 12))  # 8 channels, and 4 columns of something else
      >>> (q, k), inputs = nvfp4.ops.causal_convolution(
      ...     x, jnp.arange(16)[None], jnp.zeros((1, 3, 8)), weight=jnp.ones((8, 4)), widths=(4, 4)
      ... )
      >>> q.shape, [round(float(y), 2) for y in k[0, :4, 0]], inputs.shape
      ((1, 16, 4), [0.73, 1.76, 2.86, 3.93], (1, 3, 8))
    """
    if x.ndim != 3 or x.dtype.name not in _FLOATS:
        raise ValueError(
            f"x: expected [b, t, n] of one of {', '.join(_FLOATS)}; got {x.dtype.name} {x.shape}"
        )
    _check_arrays(x, positions, inputs, weight, bias)
    (t, n), (channels, taps) = x.shape[1:], weight.shape
    widths = (channels // max(heads, 1),) if widths is None else tuple(widths)
    stride = sum(widths) if stride is None else stride
    _check_columns(n, channels, widths, first, heads, stride)
    if backend is None and not (isinstance(t, int) and t > _FEW_TOKENS):
        backend = "reference"
    target = target or Target.current()
    numbers = taps, n, first, stride, *widths
    problem = Problem(
        "causal_convolution", None, target, x.dtype.name, hidden=n, head_widths=numbers
    )
    run = with_derivative_of(
        reference.causal_convolution,
        resolve(problem, backend=backend).lower,
        "b, b, b, - -> b, b",
        widths=widths,
        first=first,
        heads=heads,
        stride=stride,
    )
    weights = {"weight": weight, "bias": bias}
    weights = jax.tree.map(lambda value: value.astype(jnp.float32), weights)
    return run(x, narrow_positions(positions), inputs, **weights)


def _check_arrays(x, positions, inputs, weight, bias):
    """Raise a ValueError that names the array which does not fit."""
    b, t, _ = x.shape
    if inputs.ndim != 3 or inputs.shape[0] != b or inputs.dtype != x.dtype:
        raise ValueError(
            f"inputs: expected {x.dtype.name} [{b}, taps - 1, c], because x is {x.dtype.name} "
            f"{x.shape}; got {inputs.dtype.name} {inputs.shape}"
        )
    if positions.shape != (b, t) or positions.dtype.kind not in "iu":
        raise ValueError(
            f"positions: expected integers {(b, t)}, got {positions.dtype.name} {positions.shape}"
        )
    past, channels = inputs.shape[1:]
    expected = {"weight": (weight, (channels, past + 1)), "bias": (bias, (channels,))}
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")


def _check_columns(n, channels, widths, first, heads, stride):
    """Raise a ValueError that names the argument which does not fit the columns of x."""
    if not 1 <= len(widths) <= 3 or min(widths) < 1 or sum(widths) * heads != channels:
        raise ValueError(
            f"widths: expected one to three positive numbers whose sum is that of the channels of "
            f"a head, {channels} / {heads}; got {widths}"
        )
    if first < 0 or stride < sum(widths) or first + heads * stride > n:
        raise ValueError(
            f"first, heads and stride: expected heads of at least {sum(widths)} columns in the {n} "
            f"columns of x; got {first}, {heads} and {stride}"
        )
