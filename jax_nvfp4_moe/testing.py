"""Cases, random parameters and the accuracy rule, for tests and benchmarks."""

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
    """Return canonical experts with scales as in real checkpoints.

    Weights are normal with standard deviation ``1 / sqrt(k)``, quantized with ``amax / 2688`` of
    each expert's matrix (gate and up apart), so block scales span what trained weights do and
    global scales differ from expert to expert. Input scales fit activations of about unit size.

    Args:
      key: of `jax.random.key`.
      num_experts, hidden, intermediate: sizes; the last two multiples of 16.
      gated: whether gate_up holds two halves.
    """
    return _random_moe_params(key, num_experts, hidden, intermediate, 2 if gated else 1)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _random_moe_params(key, num_experts, hidden, intermediate, halves):
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
    """Quantize normal weights, one leading slice at a time so that memory stays small."""
    keys = jax.random.split(key, shape[0])

    def one(key):
        return quantize(jax.random.normal(key, shape[1:], jnp.float32) * shape[-1] ** -0.5)

    return jax.lax.map(one, keys)


def random_routing(key: jax.Array, tokens: int, num_experts: int, top_k: int):
    """Return distinct uniform expert_ids int32 ``[t, k]`` and weights that add up to 1."""
    return _random_routing(key, tokens, num_experts, top_k)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random_routing(key, tokens, num_experts, top_k):
    id_key, weight_key = jax.random.split(key)
    scores = jax.random.uniform(id_key, (tokens, num_experts))
    ids = jax.lax.top_k(scores, top_k)[1].astype(jnp.int32)
    weights = jax.random.uniform(weight_key, (tokens, top_k), jnp.float32, 0.1, 1.0)
    return ids, weights / weights.sum(axis=-1, keepdims=True)


def assert_as_accurate_as(actual, yardstick, truth, factor: float = 2.0) -> None:
    """Assert that the worst error of `actual` is within `factor` of the yardstick's worst.

    ``max |actual - truth| <= factor * max |yardstick - truth| + ulp``, where ulp is the rounding of
    the largest ``|truth|`` to the dtype of `actual`, for cases that the yardstick gets exactly.

    Args:
      actual: what is tested.
      yardstick: the same computed by plain XLA in bfloat16 (or the dtype in question).
      truth: float64, on the same codes and scales.
      factor: how much worse is allowed.

    Raises:
      AssertionError: with the worst element, its value and the bound.
    """
    truth = np.asarray(truth, np.float64)
    if truth.size == 0:
        return
    error = np.abs(np.asarray(actual, np.float64) - truth)
    spacing = float(jnp.finfo(actual.dtype).eps) / 2 * np.abs(truth).max()
    allowed = factor * np.abs(np.asarray(yardstick, np.float64) - truth).max() + spacing
    worst = np.unravel_index(np.nan_to_num(error, nan=np.inf).argmax(), error.shape)
    if not error[worst] <= allowed:
        raise AssertionError(
            f"error {error[worst]:.3g} at {tuple(map(int, worst))} is over {factor} x the "
            f"yardstick's ({allowed:.3g} allowed): got {np.asarray(actual)[worst]}, "
            f"exact {truth[worst]:.6g}"
        )


def moe_mlp_float64(x, params: MoEParams, expert_ids, expert_weights, call, *, rounded=None):
    """Return ``ops.moe_mlp`` in float64 numpy, on the same codes and scales; the truth of tests.

    Nothing is rounded on the way but what `rounded` rounds.

    Args:
      x, params, expert_ids, expert_weights: as for the op; params canonical.
      call: of `numerics.activations.find_activation`.
      rounded: ``(rows float64 [m, k], expert, product) -> rows``, applied to the input of product 0
        (gate_up) and 1 (down) of an expert: the rounding of activations to NVFP4; None for w4a16.
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
    """Return one expert's matrix in float32."""
    return jax.tree.map(lambda leaf: leaf[expert], weight).dequantize()


def _bias(bias, expert):
    return 0.0 if bias is None else np.asarray(bias, np.float64)[expert]


def activate_float64(call, u):
    """Return ``numerics.activations.activate`` in float64 numpy."""
    if not call.row.gated:
        return _FUNCTIONS[call.name](np.minimum(u, call.limit))
    gate, up = (u[:, 0::2], u[:, 1::2]) if call.row.interleaved else np.split(u, 2, axis=-1)
    gate, up = np.minimum(gate, call.limit), np.clip(up, -call.limit, call.limit)
    return _FUNCTIONS[call.name](gate, call.alpha) * (up + call.beta)


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
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "silu_no_mul": _silu,
    "gelu_no_mul": _gelu,
    "gelu_tanh_no_mul": _gelu_tanh,
}


_dequantize = jax.jit(NVFP4Tensor.dequantize, static_argnums=1)


def moe_mlp_xla(x, params: MoEParams, expert_ids, expert_weights, call, dtype=jnp.bfloat16):
    """Return ``ops.moe_mlp`` (w4a16) as plain XLA computes it with all arrays in `dtype`.

    The yardstick of tests: weights dequantized to `dtype`, every token through every expert,
    float32 accumulation inside a product and `dtype` between them.
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
