"""The gated delta rule for the tokens of a prompt."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from jax_nvfp4_moe.backends.kernel_call import kernel_call, scratch
from jax_nvfp4_moe.backends.launch_facts import workspace_bytes_of_rows
from jax_nvfp4_moe.backends.record import CUDA, Backend, Kernel
from jax_nvfp4_moe.ops.checks import check_recurrence, read_lengths, read_result_dtype
from jax_nvfp4_moe.ops.documentation import public_op
from jax_nvfp4_moe.ops.recurrent.gated_delta import apply_gated_delta
from jax_nvfp4_moe.ops.recurrent.kernel_limits import STATES, count_chunks
from jax_nvfp4_moe.ops.running import run
from jax_nvfp4_moe.scheme import Target


@public_op
def gated_delta_rule(
    q: Float[Array, "b t m d"],
    k: Float[Array, "b t m d"],
    v: Float[Array, "b t m r e"],
    g: Float[Array, "b t m r"] | Float[Array, "b t m r d"],
    beta: Float[Array, "b t m r"],
    state: Float[Array, "b m r d e"],
    *,
    lengths: Int[Array, " b"] | None = None,
    normalize: bool = False,
    dtype: DTypeLike = jnp.bfloat16,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "b t m r e"], Float[Array, "b m r d e"]]:
    """Apply the gated delta rule to t tokens of each of b rows, chunk by chunk.

    Each of m key heads serves r value heads, and each value head has a state S. Token by token, the
    state decays, corrects the value that it stores for a key, and is read with a query::

      S = diag(exp(g)) S
      S = S + k (beta (v - k.T S))
      y = q.T S

    The states, the decays and the system of corrections of each chunk are computed in float32.

    Args:
      q: queries, float32 ``[b, t, m, d]``.
      k: keys, float32 ``[b, t, m, d]``, of length 1 or less unless `normalize` is True. With longer
        keys and rates near 1, the corrections may grow without bound.
      v: values, float32 ``[b, t, m, r, e]``.
      g: logarithms of the decays, float32, at most 0: ``[b, t, m, r]`` for one decay of a whole
        state, as in gated delta nets, or ``[b, t, m, r, d]`` for one of each channel of the keys,
        as in Kimi delta attention. A token with g = 0 and beta = 0 leaves the state unchanged.
      beta: rates of correction, float32 ``[b, t, m, r]``, from 0 to 1.
      state: state of each value head before the first token, float32 ``[b, m, r, d, e]``.
      lengths: number of tokens of each row, integers ``[b]``. A token behind them is padding: it
        leaves the state unchanged, its result is 0, and its operands may be anything, NaN included.
        On a GPU, padding then costs only the zeros of its results. None (default) if all rows have
        t tokens.
      normalize: whether keys are first scaled to length 1, and queries to length ``d ** -0.5``.
        Each squared length gets 1e-6 more. False (default) takes both as they are.
      dtype: dtype to which the caller rounds the results, bfloat16 by default. For bfloat16,
        products with values and states take TensorFloat-32 on a GPU. For float16 and float32, all
        products are float32.
      target, backend: where the op runs, and which kernel runs it.

    Returns:
      The results, float32 ``[b, t, m, r, e]``, and the state after the last token. Gradients flow
      to all arrays, in plain XLA.

    Raises:
      ValueError: if a shape does not fit the others, an array or `dtype` is not a float, or
        `lengths` are not integers.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> keys = jnp.full((1, 5, 2, 16), 0.25)  # 5 tokens, 2 key heads
      >>> y, state = nvfp4.ops.gated_delta_rule(
      ...     keys, keys, jnp.ones((1, 5, 2, 3, 8)), jnp.zeros((1, 5, 2, 3)),
      ...     jnp.full((1, 5, 2, 3), 0.5), jnp.zeros((1, 2, 3, 16, 8)),
      ... )
      >>> y.shape, float(y[0, 0, 0, 0, 0])
      ((1, 5, 2, 3, 8), 0.5)

    Source:
      arXiv:2412.06464; arXiv:2510.26692 for decays of channels; arXiv:2406.06484 for the chunks.
    """
    if v.ndim != 5:
        raise ValueError(f"v: expected shape [b, t, m, r, e], got {v.shape}")
    (b, t, m, r, e), d = v.shape, q.shape[-1]
    shapes = {"q": (q, (b, t, m, d)), "k": (k, (b, t, m, d)), "v": (v, v.shape)}
    own = (d,) if g.ndim == v.ndim else ()  # a decay for each channel
    shapes |= {"g": (g, (b, t, m, r, *own)), "beta": (beta, (b, t, m, r))}
    shapes["state"] = state, (b, m, r, d, e)
    check_recurrence(shapes)
    lengths, name = read_lengths(lengths, b), read_result_dtype(dtype)
    return run(
        "gated_delta_rule",
        [array.astype(jnp.float32) for array in (q, k, v, g, beta, state)],
        "b, b, b, b, b, b, b -> b, b",
        target=target,
        backend=backend,
        named={"lengths": lengths},
        options={"normalize": normalize, "dtype": name},
        dtype=name,
        sizes={"key width": d, "value width": e},
    )


def _lower(ffi_target, q, k, v, g, beta, state, lengths=None, *, normalize, dtype):
    """Lower `gated_delta_rule` to its FFI target. The record accepts one `dtype` only."""
    del dtype
    (b, t, m, r, e), d = v.shape, q.shape[3]
    channel_decays = g.ndim == v.ndim
    if channel_decays and r > 1:
        # The value heads of a key head share no products, so each gets a key head of its own.
        q, k = (jnp.repeat(x, r, axis=2) for x in (q, k))
        n = m * r
        v, g, beta = v.reshape(b, t, n, 1, e), g.reshape(b, t, n, 1, d), beta.reshape(b, t, n, 1)
        operands = q, k, v, g, beta, state.reshape(b, n, 1, d, e), lengths
        y, new = _lower(ffi_target, *operands, normalize=normalize, dtype=None)
        return y.reshape(b, t, m, r, e), new.reshape(state.shape)
    lengths = jnp.zeros(0, jnp.int32) if lengths is None else lengths
    size = workspace_bytes_of_rows(ffi_target, count_chunks(b, t), m, r, channel_decays)
    call = kernel_call(ffi_target, (v, state, scratch(size)), input_output_aliases={6: 1})
    return tuple(call(q, k, v, g, beta, lengths, state, normalize=bool(normalize))[:2])


# The products of both recurrences over prompts take TensorFloat-32, which is accurate enough for
# results that are rounded to bfloat16: see `choose_precision`.
DELTA_RULE_CUDA = Backend(
    "delta_rule_cuda",
    {"gated_delta_rule": Kernel(_lower, "nvfp4_delta_rule_cuda")},
    (CUDA,),
    dtypes=("bfloat16",),
    limits=STATES,
)


BACKENDS = (DELTA_RULE_CUDA,)
MEANINGS = {"gated_delta_rule": apply_gated_delta}
