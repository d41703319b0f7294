"""`quantize_nvfp4`: quantize activations to NVFP4 on the device."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_nvfp4_moe.backends.by_rows import by_rows, is_on_mesh
from jax_nvfp4_moe.backends.kernel_call import kernel_call, scratch
from jax_nvfp4_moe.backends.launch_facts import workspace_bytes
from jax_nvfp4_moe.backends.record import CPU, CUDA, Backend, Kernel
from jax_nvfp4_moe.numerics.layouts import CANONICAL, find_layout, to_layout
from jax_nvfp4_moe.numerics.not_differentiable import not_differentiable
from jax_nvfp4_moe.numerics.nvfp4 import check_blocks, global_scale_of, quantize
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.ops.checks import check_floats
from jax_nvfp4_moe.ops.documentation import public_op
from jax_nvfp4_moe.ops.running import find_plan
from jax_nvfp4_moe.scheme import Target

# Value of `scale_layout` -> name of the layout of the result.
_LAYOUTS = {"linear": CANONICAL, "swizzle_128x4": "swizzle_128x4"}


@public_op
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
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      An `NVFP4Tensor` ``[m, k]`` with layout "canonical" or "swizzle_128x4".

    Raises:
      ValueError: if a shape, a dtype or `scale_layout` is wrong. Also if the op is differentiated;
        the message says how to write a straight-through gradient.
      NoBackendError: if no backend can run the call.

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
    check_floats(x=x)
    check_blocks("x", x.shape)
    if x.ndim != 2:
        raise ValueError(f"x: expected shape [m, k], got {x.shape}")
    if scale_layout not in _LAYOUTS:
        raise ValueError(f"scale_layout: expected one of {list(_LAYOUTS)}, got {scale_layout!r}")
    scale = None if global_scale is None else jnp.asarray(global_scale, jnp.float32)
    if scale is not None and scale.shape != ():
        raise ValueError(f"global_scale: expected one number, got shape {scale.shape}")
    facts = {"dtype": x.dtype.name, "hidden": x.shape[1]}
    plan = find_plan("quantize_nvfp4", target=target, backend=backend, **facts)
    run = functools.partial(plan.lower, scale_layout=scale_layout)
    if scale is None and is_on_mesh(x):  # A kernel finds the largest value of its own rows only.
        scale = global_scale_of(x)
    if scale is not None and scale_layout == "linear":
        run = by_rows(run, "m, - -> m, m, -")
    arrays = not_differentiable("quantize_nvfp4", run)(x, scale)
    return NVFP4Tensor(*arrays, layout=_LAYOUTS[scale_layout])


def meaning(x, global_scale, scale_layout):
    """Quantize rows ``[m, k]`` with `numerics.nvfp4.quantize`; convert scales to `scale_layout`."""
    packed, block_scale, scale = quantize(x, global_scale)
    if scale_layout != "linear":
        packed, block_scale = to_layout(packed, block_scale, find_layout(scale_layout))
    return packed, block_scale, scale


@functools.partial(jax.jit, inline=True, static_argnames=("ffi_target", "scale_layout"))
def lower_quantize(ffi_target, x, global_scale, scale_layout):
    """Lower `quantize_nvfp4` to an FFI target.

    The call returns packed uint8, block_scale float8_e4m3fn and the global scale. Swizzled block
    scales are padded to whole tiles. Without a given global scale, the kernel computes it from x.
    """
    m, k = x.shape
    scales = (m, k // 16) if scale_layout == "linear" else (-(-m // 128) * 128, -(-k // 64) * 4)
    outputs = (
        jax.ShapeDtypeStruct((m, k // 2), jnp.uint8),
        jax.ShapeDtypeStruct(scales, jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((), jnp.float32),
        scratch(workspace_bytes(ffi_target, global_scale is None)),
    )
    scale = jnp.zeros(0, jnp.float32) if global_scale is None else global_scale
    packed, block_scale, own_scale, _ = kernel_call(ffi_target, outputs)(
        x, scale, scale_layout=scale_layout
    )
    return packed, block_scale, own_scale if global_scale is None else global_scale


QUANTIZE_CUDA = Backend(
    "quantize_cuda",
    {"quantize_nvfp4": Kernel(lower_quantize, "nvfp4_quantize_cuda")},
    (CUDA,),
)


QUANTIZE_CPU = Backend(
    "quantize_cpu",
    {"quantize_nvfp4": Kernel(lower_quantize, "nvfp4_quantize_cpu")},
    (CPU,),
)


BACKENDS = (QUANTIZE_CUDA, QUANTIZE_CPU)
MEANINGS = {"quantize_nvfp4": meaning}
