"""Products of heads with the matrices of latent attention: XLA's dot, or our kernels for few rows.

`nn.attention` calls them. The matrix of a head expands a latent to its keys or values.
Instead of expanding latents, queries are multiplied by the matrices of keys, and the results of
attention by the matrices of values.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.backends.kernel_call import kernel_call
from jax_nvfp4_moe.backends.record import CUDA, HALVES, Backend, Kernel
from jax_nvfp4_moe.numerics.rope import Rope
from jax_nvfp4_moe.ops.dense import precision_for
from jax_nvfp4_moe.ops.latents import rotate_key
from jax_nvfp4_moe.ops.running import run
from jax_nvfp4_moe.scheme import Target


def absorb_queries(
    q: Float[Array, "b t n w"],
    keys: Float[Array, "n p k"],
    positions: Int32[Array, "b t"],
    *,
    rope: Rope | None,
    interleaved: bool,
    target: Target | None = None,
) -> Float[Array, "b t n d"]:
    """Return queries in the space of the latents: ``q[..., :p] @ keys``, then rotated channels.

    Args:
      q: queries ``[b, t, n, p + e]``, of which the last e channels are not rotated yet.
      keys: matrix that expands a latent of k channels to the key of each head.
      positions: position of each token.
      rope: parameters of the rotation, with ``e/2`` frequencies; None for none.
      interleaved: whether the two channels of a rotated pair are adjacent in `q`.
      target: the `Target` to lower for; None (default) for the current device.

    Returns:
      ``[b, t, n, k + e]`` in the dtype of `q`. Gradients flow in plain XLA.
    """
    (p, k), options = keys.shape[1:], {"rope": rope, "interleaved": interleaved}
    facts = _facts(q, keys, p, k, q.shape[3] - p) | {"target": target}
    return run(
        "absorb_queries", (q, keys, positions), "b t, -, b t -> b t", options=options, **facts
    )


def expand_values(
    x: Float[Array, "b t n k"], values: Float[Array, "n d k"], *, target: Target | None = None
) -> Float[Array, "b t n d"]:
    """Return ``x @ values.T`` for each head: the values for sums of latents.

    Args:
      x: weighted sums of latents, in the dtype of the result.
      values: matrix that expands a latent of k channels to the value of each head.
      target: the `Target` to lower for; None (default) for the current device.

    Returns:
      ``[b, t, n, d]``. Gradients flow in plain XLA.
    """
    facts = _facts(x, values, values.shape[1], values.shape[2], 0) | {"target": target}
    return run("expand_values", (x, values), "b t, - -> b t", **facts)


def _facts(x, matrices, width, latent, rotated):
    """Return the facts of a product: dtypes, and the numbers of rows and of channels."""
    sizes = {"rows": x.shape[0] * x.shape[1], "head width": width, "latent": latent}
    sizes["rotated width"] = rotated
    return {"dtype": x.dtype.name, "weight_dtype": matrices.dtype.name, "sizes": sizes}


def absorb(q, keys, positions, *, rope, interleaved):
    """Compute `absorb_queries` by XLA."""
    plain, turning = jnp.split(q, [keys.shape[1]], axis=-1)
    turned = rotate_key(turning, positions, rope, interleaved)
    return jnp.concatenate([multiply_heads(plain, keys, contracted=1), turned], axis=-1)


def expand(x, values):
    """Compute `expand_values` by XLA."""
    return multiply_heads(x, values, contracted=2)


def multiply_heads(x: Float[Array, "b t n k"], matrix, contracted: int) -> Float[Array, "b t n m"]:
    """Multiply each head by its matrix in ``matrix [n, ., .]``, summing over axis `contracted`."""
    y = lax.dot_general(
        x,
        matrix,
        (((3,), (contracted,)), ((2,), (0,))),
        precision=precision_for(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return jnp.moveaxis(y, 0, 2).astype(x.dtype)


def _lower_absorb(ffi_target, q, keys, positions, *, rope, interleaved):
    """Lower `head_products.absorb_queries` to an FFI target."""
    b, t, n, width = q.shape
    output = jax.ShapeDtypeStruct((b * t, n, width - keys.shape[1] + keys.shape[2]), q.dtype)
    y = kernel_call(ffi_target, output)(
        q.reshape(b * t, n, width),
        keys,
        positions.reshape(-1),
        jnp.asarray(() if rope is None else rope.frequencies, jnp.float32),
        rotation_scale=np.float32(1 if rope is None else rope.scale),
        interleaved=interleaved,
    )
    return y.reshape(b, t, n, y.shape[2])


def _lower_expand(ffi_target, x, values):
    """Lower `head_products.expand_values` to an FFI target."""
    b, t, n, k = x.shape
    output = jax.ShapeDtypeStruct((b * t, n, values.shape[1]), x.dtype)
    return kernel_call(ffi_target, output)(x.reshape(b * t, n, k), values).reshape(
        b, t, n, values.shape[1]
    )


HEAD_PRODUCTS_CUDA = Backend(
    "head_products_cuda",
    {
        "absorb_queries": Kernel(_lower_absorb, "nvfp4_absorb_queries_cuda"),
        "expand_values": Kernel(_lower_expand, "nvfp4_expand_values_cuda"),
    },
    (CUDA,),
    dtypes=HALVES,
    weight_dtypes={dtype: (dtype,) for dtype in HALVES},
    limits={
        "rows": "HEAD_PRODUCT_ROWS",
        "head width": "HEAD_PRODUCT_QUERIES",
        "latent": "HEAD_PRODUCT_LATENTS",
        "rotated width": "HEAD_PRODUCT_ROTATED",
    },
)


BACKENDS = (HEAD_PRODUCTS_CUDA,)
OF_XLA = {"absorb_queries": absorb, "expand_values": expand}
