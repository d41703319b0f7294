"""The recurrence of Mamba-2 for the tokens of a prompt."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from jax_nvfp4_moe.backends.kernel_call import kernel_call, scratch
from jax_nvfp4_moe.backends.launch_facts import workspace_bytes_of_rows
from jax_nvfp4_moe.backends.record import CUDA, Backend, Kernel
from jax_nvfp4_moe.ops.checks import check_recurrence, read_lengths, read_result_dtype
from jax_nvfp4_moe.ops.documentation import public_op
from jax_nvfp4_moe.ops.recurrent.kernel_limits import STATES, count_chunks
from jax_nvfp4_moe.ops.recurrent.mamba2 import apply_mamba2
from jax_nvfp4_moe.ops.running import run
from jax_nvfp4_moe.scheme import Target


@public_op
def mamba2_scan(
    x: Float[Array, "b t h p"],
    dt: Float[Array, "b t h"],
    a: Float[Array, " h"],
    B: Float[Array, "b t g n"],
    C: Float[Array, "b t g n"],
    D: Float[Array, " h"],
    state: Float[Array, "b h p n"],
    *,
    lengths: Int[Array, " b"] | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "b t h p"], Float[Array, "b h p n"]]:
    """Run the recurrence of Mamba-2 over t tokens of each of b rows, chunk by chunk.

    Each head has a state S. Its B and C are those of its group. Token by token::

      S = exp(dt a) S + dt outer(x, B)
      y = S @ C + D x

    The states and the decays are computed in float32.

    Args:
      x: inputs of the heads, float32 ``[b, t, h, p]``.
      dt: time steps, float32 ``[b, t, h]``, at least 0. A token with a step of 0 leaves the state
        unchanged.
      a: rates of the decays, float32 ``[h]``, at most 0.
      B: what is written to the states, float32 ``[b, t, g, n]``. Group 0 has the first h / g heads,
        and so on.
      C: what is read from the states, float32 ``[b, t, g, n]``.
      D: factors of `x` in the results, float32 ``[h]``.
      state: state of each head before the first token, float32 ``[b, h, p, n]``.
      lengths: number of tokens of each row, integers ``[b]``. A token behind them is padding: it
        leaves the state unchanged, its result is 0, and its operands may be anything, NaN included.
        On a GPU, padding then costs only the zeros of its results. None (default) if all rows have
        t tokens.
      dtype: dtype to which the caller rounds the results, bfloat16 by default. For bfloat16,
        products take TensorFloat-32 on a GPU. For float16 and float32, all products are float32.
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      The results, float32 ``[b, t, h, p]``, and the state after the last token. Gradients flow to
      all arrays, in plain XLA.

    Raises:
      ValueError: if a shape does not fit the others, an array or `dtype` is not a float, or
        `lengths` are not integers.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> each = jnp.ones((1, 5, 1, 16))  # 5 tokens, one group of 2 heads
      >>> y, state = nvfp4.ops.mamba2_scan(
      ...     jnp.ones((1, 5, 2, 8)), jnp.ones((1, 5, 2)), jnp.zeros(2), each, each,
      ...     jnp.array([0.0, 0.5]), jnp.zeros((1, 2, 8, 16)),
      ... )
      >>> y.shape, y[0, :, 1, 0].tolist()
      ((1, 5, 2, 8), [16.5, 32.5, 48.5, 64.5, 80.5])

    Source:
      arXiv:2405.21060, section 6.
    """
    if x.ndim != 4 or B.ndim != 4:
        raise ValueError(
            f"x and B: expected shapes [b, t, h, p] and [b, t, g, n], got {x.shape} and {B.shape}"
        )
    (b, t, h, p), (g, n) = x.shape, B.shape[2:]
    if h < 1 or g < 1 or h % g:
        raise ValueError(f"B: expected a number of groups that divides {h} heads, got {g}")
    expected = {"x": (x, x.shape), "dt": (dt, (b, t, h)), "a": (a, (h,)), "B": (B, (b, t, g, n))}
    expected |= {"C": (C, (b, t, g, n)), "D": (D, (h,)), "state": (state, (b, h, p, n))}
    check_recurrence(expected)
    lengths, name = read_lengths(lengths, b), read_result_dtype(dtype)
    return run(
        "mamba2_scan",
        [array.astype(jnp.float32) for array in (x, dt, a, B, C, D, state)],
        "b, b, -, b, b, -, b, b -> b, b",
        target=target,
        backend=backend,
        named={"lengths": lengths},
        options={"dtype": name},
        dtype=name,
        sizes={"head width": p, "state width": n},
    )


def _lower(ffi_target, x, dt, a, B, C, D, state, lengths=None, *, dtype):
    """Lower `mamba2_scan` to its FFI target. The record accepts one `dtype` only."""
    del dtype
    lengths = jnp.zeros(0, jnp.int32) if lengths is None else lengths
    (b, t, heads, _), groups = x.shape, B.shape[2]
    size = workspace_bytes_of_rows(ffi_target, count_chunks(b, t), groups, heads // groups)
    results = (x, jax.ShapeDtypeStruct(state.shape, x.dtype))
    call = kernel_call(
        ffi_target,
        (*results, scratch(size)),
        input_output_aliases={7: 1},
    )
    return tuple(call(x, dt, a, B, C, D, lengths, state)[:2])


MAMBA2_SCAN_CUDA = Backend(
    "mamba2_scan_cuda",
    {"mamba2_scan": Kernel(_lower, "nvfp4_mamba2_scan_cuda")},
    (CUDA,),
    dtypes=("bfloat16",),
    limits=STATES,
)


BACKENDS = (MAMBA2_SCAN_CUDA,)
MEANINGS = {"mamba2_scan": apply_mamba2}
