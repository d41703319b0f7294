"""`causal_convolution`: the short convolution of a recurrent mixer for the tokens of a prompt."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from jax_nvfp4_moe.backends.kernel_call import kernel_call
from jax_nvfp4_moe.backends.record import CUDA, HALVES, Backend, Kernel
from jax_nvfp4_moe.numerics.convolution import convolve
from jax_nvfp4_moe.ops.checks import check_axes, check_integers, check_shapes
from jax_nvfp4_moe.ops.documentation import public_op
from jax_nvfp4_moe.ops.positions import PADDING, narrow_positions
from jax_nvfp4_moe.ops.running import run
from jax_nvfp4_moe.scheme import Target


@public_op
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

    Unless you name a backend, few tokens run the reference.

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
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      A tuple ``(parts, inputs)``: the results of each part, float32 ``[b, t, heads * width]``, and
      the new `inputs`. Gradients flow to all float arguments, in plain XLA.

    Raises:
      ValueError: if a shape, a dtype or a column does not fit the others.
      NoBackendError: if no backend can run the call.

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
    check_axes("x", x, "b, t, n")
    _check_arrays(x, positions, inputs, weight, bias)
    (t, n), (channels, taps) = x.shape[1:], weight.shape
    widths = (channels // max(heads, 1),) if widths is None else tuple(widths)
    stride = sum(widths) if stride is None else stride
    _check_columns(n, channels, widths, first, heads, stride)
    weights = {"weight": weight, "bias": bias}
    sizes = {"taps": taps, "columns": n, "first column": first, "stride": stride, "tokens": t}
    return run(
        "causal_convolution",
        (x, narrow_positions(positions), inputs),
        "b, b, b, - -> b, b",
        target=target,
        backend=backend,
        named=jax.tree.map(lambda value: value.astype(jnp.float32), weights),
        options={"widths": widths, "first": first, "heads": heads, "stride": stride},
        dtype=x.dtype.name,
        hidden=n,
        sizes=sizes | {f"width of part {i}": width for i, width in enumerate(widths)},
    )


def _check_arrays(x, positions, inputs, weight, bias):
    """Raise a ValueError that names the array which does not fit."""
    b, t, _ = x.shape
    if inputs.ndim != 3 or inputs.shape[0] != b or inputs.dtype != x.dtype:
        raise ValueError(
            f"inputs: expected {x.dtype.name} [{b}, taps - 1, c], because x is {x.dtype.name} "
            f"{x.shape}; got {inputs.dtype.name} {inputs.shape}"
        )
    check_integers("positions", positions, (b, t))
    past, channels = inputs.shape[1:]
    check_shapes({"weight": (weight, (channels, past + 1)), "bias": (bias, (channels,))})


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


def meaning(
    x: Float[Array, "b t n"],
    positions: Int32[Array, "b t"],
    inputs: Float[Array, "b taps-1 c"],
    *,
    weight: Float[Array, "c taps"],
    bias: Float[Array, " c"] | None,
    widths: tuple[int, ...],
    first: int = 0,
    heads: int = 1,
    stride: int | None = None,
    activation: Callable = jax.nn.silu,
) -> tuple[tuple[Float[Array, "b t part"], ...], Float[Array, "b taps-1 c"]]:
    """Compute `causal_convolution`; `activation` is what follows the convolution."""
    stride = sum(widths) if stride is None else stride
    x = x[..., first : first + heads * stride]
    if heads == 1:
        x = x[..., : sum(widths)]
    else:
        each = x.reshape(*x.shape[:-1], heads, stride)[..., : sum(widths)]
        parts = jnp.split(each, _ends(widths), axis=-1)
        x = jnp.concatenate([lax.collapse(part, 2) for part in parts], axis=-1)
    mixed, inputs = convolve(x, inputs, weight, positions < PADDING)
    if bias is not None:
        mixed = mixed + bias[None, None]
    ends = [heads * end for end in _ends(widths)]
    return tuple(jnp.split(activation(mixed), ends, axis=-1)), inputs


def _ends(widths):
    """Return where all parts but the last one end."""
    return [sum(widths[: i + 1]) for i in range(len(widths) - 1)]


_PARTS = 3  # the most parts of the channels of a head


def _lower(ffi_target, x, positions, inputs, *, weight, bias, widths, first, heads, stride):
    """Lower `causal_convolution` to its FFI target."""
    parts = [jax.ShapeDtypeStruct((*x.shape[:2], heads * width), jnp.float32) for width in widths]
    missing = [jax.ShapeDtypeStruct((0,), jnp.float32)] * (_PARTS - len(parts))
    call = kernel_call(
        ffi_target,
        (*parts, *missing, inputs),
        input_output_aliases={4: _PARTS},
    )
    results = call(
        x,
        positions,
        weight,
        jnp.zeros(0, jnp.float32) if bias is None else bias,
        inputs,
        widths=np.array(widths, np.int64),
        first=np.int64(first),
        heads=np.int64(heads),
        stride=np.int64(stride),
    )
    return tuple(results[: len(parts)]), results[-1]


_FEW_TOKENS = 8  # tokens of a row up to which XLA's fusions run


_COLUMNS = ("columns", "first column", "stride", *(f"width of part {i}" for i in range(_PARTS)))


CONVOLUTION_CUDA = Backend(
    "convolution_cuda",
    {"causal_convolution": Kernel(_lower, "nvfp4_causal_convolution_cuda")},
    (CUDA,),
    dtypes=HALVES,
    max_extent="MAX_EXTENT",
    limits={
        "taps": "CONVOLUTION_TAPS",
        **dict.fromkeys(_COLUMNS, "CONVOLUTION_COLUMNS"),
    },
    unasked={"tokens": range(_FEW_TOKENS + 1, 1 << 62)},
)


BACKENDS = (CONVOLUTION_CUDA,)
MEANINGS = {"causal_convolution": meaning}
