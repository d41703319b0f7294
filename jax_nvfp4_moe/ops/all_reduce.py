"""`all_reduce`: add up the arrays of several devices, for use inside of `jax.shard_map`.

GPUs whose memory `parallel.connect_peers` has connected add up small arrays by a kernel of this
package. It may be a call of a chain (`ops.chain_calls`). Everything else is `jax.lax.psum`, which
ends a chain.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jax_nvfp4_moe.backends.kernel_call import kernel_call
from jax_nvfp4_moe.backends.record import CUDA, Backend, Kernel
from jax_nvfp4_moe.numerics.varying import varying_axes
from jax_nvfp4_moe.ops.derivative import with_derivative_of
from jax_nvfp4_moe.ops.running import find_plan
from jax_nvfp4_moe.scheme import Target


@dataclasses.dataclass(frozen=True)
class PeerGroups:
    """Groups of GPUs whose memory is connected; static.

    Attributes:
      groups: the roles of the axes of a sum, and the ids of the GPUs of each group, such as "tensor
        0,1 2,3". The memory is registered under this name, and a compiled program looks it up.
      size: number of GPUs of each group.
    """

    groups: str
    size: int


def all_reduce(
    x: Float[Array, "..."],
    axis_names: str | Sequence[str],
    *,
    peers: PeerGroups | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> Float[Array, "..."]:
    """Return the sum of `x` over all devices along mesh axes, in float32, in the dtype of `x`.

    The kernel adds up in the order of the devices, so that all devices get the same bits. Two
    devices get those of `jax.lax.psum`, because the order of two terms does not matter.

    Args:
      x: the terms of this device, bfloat16, float16 or float32.
      axis_names: name of a mesh axis, or several names.
      peers: the connected GPUs along these axes. None (default) if there are none.
      target, backend: where the op runs, and which record runs it.

    Returns:
      An array like `x`. Its derivatives are those of `jax.lax.psum`.

    Raises:
      NoBackendError: if no backend can run the call.
    """
    # The results of a kernel count as different on each device, and those of psum as equal. Where
    # the types of arrays say so, a kernel cannot replace it.
    if peers is None or varying_axes(x):
        return meaning(x, axis_names=axis_names)
    plan = find_plan(
        "all_reduce",
        target=target,
        backend=backend,
        dtype=x.dtype.name,
        sizes={"GPUs": peers.size, "bytes": x.size * x.dtype.itemsize},
    )
    options = {"axis_names": axis_names, "peers": peers}
    return with_derivative_of(meaning, plan.lower, **options)(x)


def meaning(x, *, axis_names, peers=None):
    """Add up as XLA does."""
    del peers  # XLA has its own connections.
    return lax.psum(x.astype(jnp.float32), axis_names).astype(x.dtype)


def _lower(ffi_target, x, *, axis_names, peers):
    """Lower `all_reduce` to an FFI target, which knows the devices from `peers`."""
    del axis_names
    flat = x.reshape(-1)
    call = kernel_call(ffi_target, jax.ShapeDtypeStruct(flat.shape, flat.dtype))
    return call(flat, groups=peers.groups, size=np.int64(peers.size)).reshape(x.shape)


ALL_REDUCE_CUDA = Backend(
    "all_reduce_cuda",
    {"all_reduce": Kernel(_lower, "nvfp4_all_reduce_cuda")},
    (CUDA,),
    limits={"GPUs": "PEERS", "bytes": "PEER_BYTES"},
    status="executed on two H200s",
)


BACKENDS = (ALL_REDUCE_CUDA,)
OF_XLA = {"all_reduce": meaning}
