"""quantize_nvfp4: activations to NVFP4 on the device."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_nvfp4_moe.backends.resolution import resolve
from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.numerics.nvfp4 import check_blocks
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.ops.moe import check_activations
from jax_nvfp4_moe.scheme import Problem, Target

# Value of `scale_layout` -> layout tag of the result.
_LAYOUTS = {"linear": CANONICAL, "swizzle_128x4": "swizzle_128x4"}


def quantize_nvfp4(
    x: Float[Array, "m k"],
    *,
    global_scale: Float[Array, ""] | None = None,
    scale_layout: str = "linear",
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> NVFP4Tensor:
    """Quantize rows to NVFP4 on the device, to the bit as `numerics.nvfp4.quantize` does.

    ``s8 = e4m3(min(amax16 / (6 g), 448))``, ``codes = e2m1(x / (s8 g))``, float32, ties to even.
    NaN and infinities do what they do there; subnormals are kept.

    Args:
      x: ``[m, k]``, bfloat16, float16 or float32; k a multiple of 16.
      global_scale: g, float32 scalar; ``amax(|x|) / 2688`` where None. Not checked: positive and
        finite.
      scale_layout: "linear" ``[m, k/16]``, or "swizzle_128x4", the tiles that Blackwell's matrix
        units read, padded with zeros.
      target: the device to lower for; the current one where None.
      backend: name of a record; a sequence of names, tried in that order; None to choose.

    Raises:
      ValueError: a shape, dtype or layout is wrong.
      NoBackendError: no backend can run this; says why, one by one.

    Reference:
      `numerics.nvfp4.quantize`.
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
    return NVFP4Tensor(*plan.lower(x, scale, scale_layout), layout=_LAYOUTS[scale_layout])
