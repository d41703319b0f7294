"""Random parameters, exact results and the accuracy rule, for tests and benchmarks."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe.numerics.activations import activate
from jax_nvfp4_moe.numerics.tensor import MoEParams, NVFP4Tensor, quantize


def random_moe_params(
    key: jax.Array, *, num_experts: int, hidden: int, intermediate: int, gated: bool = True
) -> MoEParams:
    """Return random NVFP4 experts whose scales vary as in real checkpoints.

    Weights are normal with standard deviation ``1 / sqrt(k)``. They are quantized with the global
    scale ``amax / 2688`` of each matrix of each expert, with separate scales of gate and up. So
    global scales differ from expert to expert, and block scales span the range that they have for
    trained weights. Input scales fit activations of about unit size.

    Args:
      key: a key of `jax.random.key`.
      num_experts: number of experts e.
      hidden: number of features of a token h, a multiple of 16.
      intermediate: number of features between the GEMMs i, a multiple of 16.
      gated: whether `gate_up` holds gate and up rows (default), or up rows alone.

    Returns:
      `MoEParams` in the canonical layout with input scales and without biases.

    Raises:
      ValueError: if `hidden` or `intermediate` is not a multiple of 16.

    Example:
      >>> import jax
      >>> import jax_nvfp4_moe as nvfp4
      >>> params = nvfp4.testing.random_moe_params(
      ...     jax.random.key(0), num_experts=4, hidden=64, intermediate=32
      ... )
      >>> params.gate_up.shape, params.down.shape, params.has_input_scales
      ((4, 64, 64), (4, 64, 32), True)
    """
    return _random_moe_params(key, num_experts, hidden, intermediate, 2 if gated else 1)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _random_moe_params(key, num_experts, hidden, intermediate, halves):
    """Implement `random_moe_params`; `halves` is 2 for gated experts, else 1."""
    keys = jax.random.split(key, 3)
    gate_up = _random_weight(keys[0], (num_experts, halves, intermediate, hidden))
    gate_up = NVFP4Tensor(
        gate_up.packed.reshape(num_experts, halves * intermediate, hidden // 2),
        gate_up.block_scale.reshape(num_experts, halves * intermediate, hidden // 16),
        gate_up.global_scale if halves == 2 else gate_up.global_scale[:, 0],
    )
    down = _random_weight(keys[1], (num_experts, hidden, intermediate))
    spread = jax.random.uniform(keys[2], (2, num_experts), jnp.float32, 0.5, 1.0)
    return MoEParams(gate_up, down, spread[0] * (6.0 / 2688), spread[1] * (3.0 / 2688))


def _random_weight(key, shape):
    """Quantize normal weights, one leading slice at a time to save memory."""
    keys = jax.random.split(key, shape[0])

    def one(key):
        return quantize(jax.random.normal(key, shape[1:], jnp.float32) * shape[-1] ** -0.5)

    return jax.lax.map(one, keys)


def random_routing(key: jax.Array, tokens: int, num_experts: int, top_k: int):
    """Return random experts and weights for each token.

    The experts of a token are distinct and uniformly distributed. The weights are positive, and
    those of a token add up to 1.

    Args:
      key: a key of `jax.random.key`.
      tokens: number of tokens t.
      num_experts: number of experts, at least `top_k`.
      top_k: number of experts per token k.

    Returns:
      A tuple ``(expert_ids, expert_weights)``: int32 ``[t, k]`` and float32 ``[t, k]``.

    Example:
      >>> import jax
      >>> import jax_nvfp4_moe as nvfp4
      >>> ids, weights = nvfp4.testing.random_routing(jax.random.key(0), 5, 8, 2)
      >>> ids.shape, weights.shape, round(float(weights.sum()), 4)
      ((5, 2), (5, 2), 5.0)
    """
    return _random_routing(key, tokens, num_experts, top_k)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random_routing(key, tokens, num_experts, top_k):
    """Implement `random_routing` under jit."""
    id_key, weight_key = jax.random.split(key)
    scores = jax.random.uniform(id_key, (tokens, num_experts))
    ids = jax.lax.top_k(scores, top_k)[1].astype(jnp.int32)
    weights = jax.random.uniform(weight_key, (tokens, top_k), jnp.float32, 0.1, 1.0)
    return ids, weights / weights.sum(axis=-1, keepdims=True)


def assert_as_accurate_as(
    actual, yardstick, truth, factor: float = 2.0, *, tolerated: float = 2**-6
) -> None:
    """Assert that the worst error of `actual` is at most `factor` times that of a yardstick.

    The condition is ``max |actual - truth| <= factor * max |yardstick - truth| + ulp``. The term
    ulp is half the epsilon of the dtype of `actual`, times the largest ``|truth|``. Without it, an
    exact yardstick would allow no rounding at all.

    A yardstick that is wrong would allow any error, so its own error is limited too:
    ``||yardstick - truth|| <= tolerated * ||truth||``, where both are finite.

    Args:
      actual: the array under test, of any float dtype.
      yardstick: the same result, computed by plain XLA in bfloat16 or in the dtype under test.
      truth: the exact result in float64, from the same codes and scales.
      factor: allowed ratio of the errors, 2 by default.
      tolerated: largest error of the yardstick itself, relative to `truth`. The default of 1/64
        allows several roundings to bfloat16. Roundings to FP4 need more, because a value near the
        middle of two codes may take either.

    Raises:
      AssertionError: if the error is larger, if `actual` contains NaN, or if the yardstick is
        wrong; the message gives the worst element, its value and the bound.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> actual, yardstick = jnp.array([1.001]), jnp.array([1.002])
      >>> nvfp4.testing.assert_as_accurate_as(actual, yardstick, [1.0])  # passes
      >>> try:
      ...     nvfp4.testing.assert_as_accurate_as(jnp.array([1.005]), yardstick, [1.0])
      ... except AssertionError as error:
      ...     print(str(error)[:19])
      error 0.005 at (0,)
    """
    truth = np.asarray(truth, np.float64)
    if truth.size == 0:
        return
    plain = np.asarray(yardstick, np.float64)
    finite = np.isfinite(truth) & np.isfinite(plain)
    distance, size = (np.linalg.norm(x[finite]) for x in (plain - truth, truth))
    if distance > tolerated * size:
        raise AssertionError(
            f"what the result is compared with is itself wrong by {distance / size:.2g} of the "
            f"exact result ({tolerated:.2g} allowed)"
        )
    error = np.abs(np.asarray(actual, np.float64) - truth)
    spacing = float(jnp.finfo(actual.dtype).eps) / 2 * np.abs(truth).max()
    allowed = factor * np.abs(plain - truth).max() + spacing
    worst = np.unravel_index(np.nan_to_num(error, nan=np.inf).argmax(), error.shape)
    if not error[worst] <= allowed:
        raise AssertionError(
            f"error {error[worst]:.3g} at {tuple(map(int, worst))} is over {factor} x the "
            f"yardstick's error ({allowed:.3g} allowed): got {np.asarray(actual)[worst]}, "
            f"expected {truth[worst]:.6g}"
        )


def moe_mlp_float64(x, params: MoEParams, expert_ids, expert_weights, call, *, rounded=None):
    """Compute ``ops.moe_mlp`` in float64 numpy from the same codes and scales: the truth of tests.

    Nothing is rounded except by `rounded`.

    Args:
      x: tokens ``[t, h]`` of any float dtype.
      params: `MoEParams` in the canonical layout.
      expert_ids: integers ``[t, k]``; an id that is -1 or out of range contributes nothing.
      expert_weights: ``[t, k]`` of any float dtype.
      call: the activation, as `find_activation` returns it.
      rounded: function ``(rows, expert, product) -> rows`` that rounds float64 rows ``[m, k]`` to
        NVFP4 before a GEMM of an expert: product 0 is gate_up, product 1 is down. None (default)
        rounds nothing, as in w4a16.

    Returns:
      float64 ``[t, h]``.

    Example:
      >>> import jax
      >>> import jax_nvfp4_moe as nvfp4
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> params = nvfp4.testing.random_moe_params(
      ...     keys[0], num_experts=4, hidden=64, intermediate=32
      ... )
      >>> x = jax.random.normal(keys[1], (5, 64))
      >>> ids, weights = nvfp4.testing.random_routing(keys[2], 5, 4, 2)
      >>> call = nvfp4.find_activation("silu")
      >>> truth = nvfp4.testing.moe_mlp_float64(x, params, ids, weights, call)
      >>> y = nvfp4.ops.moe_mlp(x, params, ids, weights, scheme="w4a16")
      >>> yardstick = nvfp4.testing.moe_mlp_xla(x, params, ids, weights, call)
      >>> nvfp4.testing.assert_as_accurate_as(y, yardstick, truth)
    """
    x, ids = np.asarray(x, np.float64), np.asarray(expert_ids)
    weights = np.asarray(expert_weights, np.float64)
    y = np.zeros(x.shape)
    rounded = rounded or (lambda rows, expert, product: rows)
    for expert in np.unique(ids[(ids >= 0) & (ids < params.num_experts)]):
        gate_up, down = (
            np.asarray(_matrix(weight, expert), np.float64)
            for weight in (params.gate_up, params.down)
        )
        tokens, slots = np.nonzero(ids == expert)
        u = rounded(x[tokens], expert, 0) @ gate_up.T + _bias(params.gate_up_bias, expert)
        d = rounded(activate_float64(call, u), expert, 1) @ down.T + _bias(params.down_bias, expert)
        np.add.at(y, tokens, weights[tokens, slots, None] * d)
    return y


@jax.jit
def _matrix(weight, expert):
    """Return the matrix of one expert, dequantized to float32."""
    return jax.tree.map(lambda leaf: leaf[expert], weight).dequantize()


def _bias(bias, expert):
    """Return the bias of one expert in float64, or 0 if there is no bias."""
    return 0.0 if bias is None else np.asarray(bias, np.float64)[expert]


def activate_float64(call, u):
    """Compute ``numerics.activations.activate`` in float64 numpy.

    Args:
      call: the activation, as `find_activation` returns it.
      u: float64 ``[m, 2i]`` if the activation is gated, else ``[m, i]``.

    Returns:
      float64 ``[m, i]``.

    Example:
      >>> import numpy as np
      >>> import jax_nvfp4_moe as nvfp4
      >>> call = nvfp4.find_activation("relu2")
      >>> nvfp4.testing.activate_float64(call, np.array([[-1.0, 3.0]])).tolist()
      [[0.0, 9.0]]
    """
    if not call.row.gated:
        return _FUNCTIONS[call.name](np.minimum(u, call.limit))
    gate, up = (u[:, 0::2], u[:, 1::2]) if call.row.interleaved else np.split(u, 2, axis=-1)
    up, function = np.clip(up, -call.limit, call.limit) + call.beta, _FUNCTIONS[call.name]
    if call.row.bounds_result:
        return np.minimum(function(gate, call.alpha), call.limit) * up
    return function(np.minimum(gate, call.limit), call.alpha) * up


def _silu(x, alpha=1.0):
    return x / (1 + np.exp(-np.clip(alpha * x, -700, 700)))


def _gelu(x, _=None):
    return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))


def _gelu_tanh(x, _=None):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


_FUNCTIONS = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "swigluoai": _silu,
    "swigluoai_uninterleave": _silu,
    "swiglustep": _silu,
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "silu_no_mul": _silu,
    "gelu_no_mul": _gelu,
    "gelu_tanh_no_mul": _gelu_tanh,
}


_dequantize = jax.jit(NVFP4Tensor.dequantize, static_argnums=1)


def moe_mlp_xla(x, params: MoEParams, expert_ids, expert_weights, call, dtype=jnp.bfloat16):
    """Compute ``ops.moe_mlp`` (w4a16) as plain XLA does with all arrays in `dtype`.

    This is the yardstick of tests. Weights are dequantized to `dtype`, and every token runs through
    every expert. Sums inside a GEMM are float32, and results between the GEMMs are rounded to
    `dtype`.

    Args:
      x: tokens ``[t, h]`` of any float dtype, cast to `dtype`.
      params: `MoEParams` in any layout.
      expert_ids: integers ``[t, k]``; an id that is -1 or out of range contributes nothing.
      expert_weights: float32 ``[t, k]``.
      call: the activation, as `find_activation` returns it.
      dtype: dtype of all arrays, bfloat16 by default.

    Returns:
      ``[t, h]`` of `dtype`.

    Example:
      >>> import jax
      >>> import jax_nvfp4_moe as nvfp4
      >>> params = nvfp4.testing.random_moe_params(
      ...     jax.random.key(0), num_experts=4, hidden=64, intermediate=32
      ... )
      >>> x = jax.random.normal(jax.random.key(1), (5, 64))
      >>> ids, weights = nvfp4.testing.random_routing(jax.random.key(2), 5, 4, 2)
      >>> call = nvfp4.find_activation("silu")
      >>> y = nvfp4.testing.moe_mlp_xla(x, params, ids, weights, call)
      >>> y.shape, y.dtype.name
      ((5, 64), 'bfloat16')
    """
    x = jnp.asarray(x).astype(dtype)
    gate_up, down = _dequantize(params.gate_up, dtype), _dequantize(params.down, dtype)
    u = jnp.einsum("th,enh->etn", x, gate_up)
    u = u if params.gate_up_bias is None else u + params.gate_up_bias[:, None].astype(dtype)
    d = jnp.einsum("eti,ehi->eth", activate(call, u).astype(dtype), down)
    d = d if params.down_bias is None else d + params.down_bias[:, None].astype(dtype)
    hit = jax.nn.one_hot(expert_ids, params.num_experts)
    weights = jnp.einsum("tke,tk->te", hit, expert_weights, precision="highest").astype(dtype)
    return jnp.einsum("te,eth->th", weights, d)
