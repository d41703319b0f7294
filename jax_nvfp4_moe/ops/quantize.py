"""`quantize_nvfp4`: quantize activations to NVFP4 on the device."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_nvfp4_moe.backends.by_rows import by_rows, is_on_mesh
from jax_nvfp4_moe.backends.resolution import resolve
from jax_nvfp4_moe.numerics.arguments import check_arguments
from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.numerics.not_differentiable import not_differentiable
from jax_nvfp4_moe.numerics.nvfp4 import check_blocks, global_scale_of
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.ops.moe import check_activations
from jax_nvfp4_moe.scheme import Problem, Target

# Value of `scale_layout` -> name of the layout of the result.
_LAYOUTS = {"linear": CANONICAL, "swizzle_128x4": "swizzle_128x4"}


@check_arguments
def quantize_nvfp4(
    x: Float[Array, "m k"],
    *,
    global_scale: Float[Array, ""] | None = None,
    scale_layout: str = "linear",
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> NVFP4Tensor:
    """Quantize rows to NVFP4 on the device, with the same bits as `numerics.nvfp4.quantize`.

    With ``g = global_scale``, each block of 16 values gets ``s8 = e4m3(min(amax / (6 g), 448))``
    and ``codes = e2m1(x / (s8 g))``. All steps are in float32 and ties round to even. NaN and
    infinity have the same results as in `numerics.nvfp4.quantize`; subnormal numbers are kept.

    Args:
      x: ``[m, k]``, bfloat16, float16 or float32; k is a multiple of 16. m may be 0, and
        amax is then 0.
      global_scale: g, a float32 scalar. None (default) takes ``amax(|x|) / 2688``. The op does not
        check that it is positive and finite.
      scale_layout: "linear" (default) for block scales ``[m, k/16]``, or "swizzle_128x4" for the
        tiles that Blackwell's matrix units read, padded with zeros.
      target: the `Target` to lower for; None (default) for the current device.
      backend: name of a backend, or a sequence of names that are tried in that order. None
        (default) chooses the first backend that accepts the problem.

    Returns:
      An `NVFP4Tensor` ``[m, k]`` with layout "canonical" or "swizzle_128x4".

    Raises:
      ValueError: if a shape, a dtype or `scale_layout` is wrong. Also if the op is differentiated;
        the message says how to write a straight-through gradient.
      NoBackendError: if no backend can run the call; the message lists every backend and its
        reason.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> x = jnp.arange(64, dtype=jnp.bfloat16).reshape(2, 32)
      >>> quantized = nvfp4.ops.quantize_nvfp4(x)
      >>> quantized.packed.shape, quantized.block_scale.shape
      ((2, 16), (2, 2))

    Reference:
      `numerics.nvfp4.quantize` defines the result.
    """
    check_activations("x", x)
    check_blocks("x", x.shape)
    if x.ndim != 2:
        raise ValueError(f"x: expected shape [m, k], got {x.shape}")
    if scale_layout not in _LAYOUTS:
        raise ValueError(f"scale_layout: expected one of {list(_LAYOUTS)}, got {scale_layout!r}")
    scale = None if global_scale is None else jnp.asarray(global_scale, jnp.float32)
    if scale is not None and scale.shape != ():
        raise ValueError(f"global_scale: expected one number, got shape {scale.shape}")
    target = target or Target.current()
    problem = Problem("quantize_nvfp4", None, target, x.dtype.name, hidden=x.shape[1])
    plan = resolve(problem, backend=backend)
    run = functools.partial(plan.lower, scale_layout=scale_layout)
    if scale is None and is_on_mesh(x):  # A kernel finds the largest value of its own rows only.
        scale = global_scale_of(x)
    if scale is not None and scale_layout == "linear":
        run = by_rows(run, "m, - -> m, m, -")
    arrays = not_differentiable("quantize_nvfp4", run)(x, scale)
    return NVFP4Tensor(*arrays, layout=_LAYOUTS[scale_layout])
