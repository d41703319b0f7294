"""Routers: from router logits to the experts of each token and their weights; float32 `jax.numpy`.

| model family | `Router` |
|---|---|
| Qwen3-MoE, Mixtral (softmax, top-k, renormalize) | ``Router(top_k)`` |
| softmax, top-k, weights without renormalization | ``Router(top_k, renormalize=False)`` |
| gpt-oss (top-k of the logits, softmax over these) | ``Router(top_k, select="logits")`` |
| DeepSeek-V3, GLM, Kimi-K2, Nemotron-3, MiniMax | ``Router(top_k, score="sigmoid", ...)`` |
| DeepSeek-V4 | ``Router(top_k, score="sqrt_softplus")`` |
| LFM2-MoE | ``Router(top_k, score="sigmoid", epsilon=1e-6)`` |
| Llama-4 (top-1, sigmoid, weight on input) | ``Router(1, score="sigmoid", select="logits", ...)`` |
| Phi-3.5-MoE (softmax over logits near each chosen one) | ``Router(2, select="near", ...)`` |

A correction bias changes which experts are chosen, but not their weights. If the router's linear
layer has a bias, as in gpt-oss, the caller adds it to the logits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from jax_nvfp4_moe.numerics.arguments import check_size

_SCORES = {
    "softmax": lambda logits: jax.nn.softmax(logits, axis=-1),
    "sigmoid": jax.nn.sigmoid,
    "sqrt_softplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}
_SELECT = ("scores", "logits", "near")
# DeepSeek divides by (sum + 1e-20). Without this term, a token whose scores all underflow to 0
# would get NaN weights.
TINY = 1e-20


@dataclasses.dataclass(frozen=True)
class Router:
    """How a layer chooses experts from router logits; static, so it may be a field of any module.

    With ``s = score(logits)`` and ``select="scores"``, `route` computes ``ids = top_k(s + bias)``
    and ``weights = scaling * s[ids] / sum(s[ids])``. With ``select="logits"`` it computes
    ``ids = top_k(logits)`` and ``weights = scaling * score(logits[ids])``. With ``select="near"``
    it computes ``ids = top_k(logits)``, and the weight of each id is a softmax of its own. The
    softmax of the id with logit m takes m and those later logits l of which ``(m - l) / max(abs(l),
    m) <= distance``. Later means that the logit is not among those of the ids before.

    Attributes:
      top_k: number of experts per token, at least 1.
      score: "softmax" (default), "sigmoid" or "sqrt_softplus".
      renormalize: whether the weights of the chosen experts are divided by their sum; True by
        default. Used with ``select="scores"`` only.
      select: "scores" (default) chooses by score plus correction bias and scores all experts.
        "logits" chooses by logit and scores only the chosen experts. "near" chooses by logit and
        weighs each chosen expert against those with almost the same logit (sparsemixer).
      num_groups: number of equal groups into which the experts are divided; 1 by default.
      groups_kept: number of groups whose experts may be chosen; 1 by default. The groups with the
        largest sum of their two best biased scores are kept.
      scaling: factor that multiplies the weights at the end, 1 by default (routed_scaling_factor).
      weight_on_input: whether the weight multiplies the expert's input instead of its output; False
        by default.
      epsilon: number that is added to the sum by which the weights are divided; 1e-20 by default.
      distance: largest relative distance of two logits that ``select="near"`` calls near; 0.02 by
        default (twice router_jitter_noise).

    Raises:
      ValueError: if a field is out of range; the message names the field.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> router = nvfp4.Router(top_k=2, score="sigmoid", scaling=2.5)
      >>> ids, weights = nvfp4.ops.route(router, jnp.array([[0.0, 3.0, 1.0]]))
      >>> ids.tolist()
      [[1, 2]]
      >>> round(float(weights.sum()), 4)
      2.5

    Source: the reference implementations of the models in the table of `numerics.routing`.
    """

    top_k: int
    score: str = "softmax"
    renormalize: bool = True
    select: str = "scores"
    num_groups: int = 1
    groups_kept: int = 1
    scaling: float = 1.0
    weight_on_input: bool = False
    epsilon: float = TINY
    distance: float = 0.02

    def __post_init__(self):
        """Check each field against its range."""
        if self.score not in _SCORES:
            raise ValueError(f"score: expected one of {sorted(_SCORES)}, got {self.score!r}")
        if self.select not in _SELECT:
            raise ValueError(f"select: expected one of {_SELECT}, got {self.select!r}")
        check_size("top_k", self.top_k)
        if not 1 <= self.groups_kept <= self.num_groups:
            raise ValueError(
                f"groups_kept: expected a number from 1 to num_groups={self.num_groups}, got "
                f"{self.groups_kept}"
            )


@functools.partial(jax.jit, inline=True, static_argnames=("router",))
def route(
    router: Router, logits: Float[Array, "t e"], bias: Float[Array, " e"] | None = None
) -> tuple[Int32[Array, "t top_k"], Float[Array, "t top_k"]]:
    """Choose `top_k` experts for each token, best first, and compute their weights.

    With ``s = score(logits)``, the ids are those of the largest ``s + bias`` among the kept groups,
    and ``weights = scaling * s[ids] / sum(s[ids])``. `Router` describes the other forms. A tie goes
    to the lower expert id.

    Args:
      router: how to route.
      logits: ``[t, e]`` of any float dtype; the computation is in float32.
      bias: correction of the scores ``[e]`` (e_score_correction_bias). None, the default, for no
        correction.

    Returns:
      A tuple ``(expert_ids, expert_weights)``: int32 ``[t, top_k]`` and float32 ``[t, top_k]``.

    Raises:
      ValueError: if the groups do not divide the experts, or the kept groups have fewer than
        `top_k` experts.

    Source: the reference implementations of the models in the table of this module.
    """
    logits = logits.astype(jnp.float32)
    check_experts(router, logits.shape[-1])
    ids = _choose(router, logits, bias)
    return ids, weigh(router, logits, ids)


@functools.partial(jax.jit, inline=True, static_argnames=("router",))
def weigh(
    router: Router, logits: Float[Array, "t e"], ids: Int32[Array, "t top_k"]
) -> Float[Array, "t top_k"]:
    """Return the weights of the experts `ids`.

    Gradients of `route` flow through this function alone, because the choice of experts has none.

    Args:
      router: how to route.
      logits: float32 ``[t, e]``.
      ids: int32 ``[t, top_k]``, the chosen experts.

    Returns:
      float32 ``[t, top_k]``.
    """
    if router.select == "logits":
        return _SCORES[router.score](jnp.take_along_axis(logits, ids, axis=-1)) * router.scaling
    if router.select == "near":
        return _weigh_near(router, logits, ids) * router.scaling
    weights = jnp.take_along_axis(_SCORES[router.score](logits), ids, axis=-1)
    if router.renormalize:
        weights = normalize_weights(router, weights)
    return weights * router.scaling


def _weigh_near(router, logits, ids):
    """Return the weight of each id: its softmax over the logits that are near and not yet chosen.

    Source: `sparsemixer` in `modeling_phimoe` of transformers; arXiv:2409.12136.
    """
    experts = jnp.arange(logits.shape[-1], dtype=ids.dtype)[None, :]
    left = jnp.ones(logits.shape, jnp.bool_)
    weights = []
    for chosen in jnp.split(ids, ids.shape[-1], axis=-1):
        largest = jnp.take_along_axis(logits, chosen, axis=-1)
        far = (largest - logits) / jnp.maximum(jnp.abs(logits), largest) > router.distance
        # Logits of earlier ids may be so much larger that their exponential is infinite.
        terms = jnp.exp(jnp.where(left & ~far, logits - largest, -jnp.inf))
        weights.append(1 / jnp.sum(terms, axis=-1, keepdims=True))
        left &= experts != chosen
    return jnp.concatenate(weights, axis=-1)


def normalize_weights(router: Router, weights: Float[Array, "t top_k"]) -> Float[Array, "t top_k"]:
    """Return the weights of the chosen experts divided by their sum plus ``router.epsilon``."""
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + router.epsilon)


def narrow_ids(expert_ids: Int[Array, "..."]) -> Int32[Array, "..."]:
    """Return expert ids as int32; an id that does not fit becomes -1, which means no expert.

    A plain cast would wrap around: the id ``2**32`` would become expert 0.
    """
    if expert_ids.dtype.itemsize <= 4:  # a uint32 above the int32 range becomes negative
        return expert_ids.astype(jnp.int32)
    fits = (expert_ids >= 0) & (expert_ids <= jnp.iinfo(jnp.int32).max)
    return jnp.where(fits, expert_ids.astype(jnp.int32), -1)


def _choose(router, logits, bias):
    """Return the ids of the best `top_k` experts for float32 logits."""
    if router.select != "scores":
        return lax.top_k(logits, router.top_k)[1]
    scores = _SCORES[router.score](logits)
    choice = scores if bias is None else scores + bias.astype(jnp.float32)[None, :]
    if router.groups_kept < router.num_groups:
        choice = _drop_groups(router, choice)
    return lax.top_k(choice, router.top_k)[1]


def _drop_groups(router, choice):
    """Set the scores of all experts outside the best groups to minus infinity."""
    t, e = choice.shape
    size = e // router.num_groups
    grouped = choice.reshape(t, router.num_groups, size)
    group_score = lax.top_k(grouped, min(2, size))[0].sum(axis=-1)
    kept = lax.top_k(group_score, router.groups_kept)[1]
    keep = jax.nn.one_hot(kept, router.num_groups, dtype=jnp.bool_).any(axis=-2)
    return jnp.where(keep[..., None], grouped, -jnp.inf).reshape(t, e)


def check_experts(router: Router, num_experts: int) -> None:
    """Check that the groups of `router` divide `num_experts` and keep at least `top_k` experts.

    Raises:
      ValueError: if they do not.
    """
    if num_experts % router.num_groups:
        raise ValueError(
            f"num_groups: expected a divisor of {num_experts}, the number of experts; got "
            f"{router.num_groups}"
        )
    eligible = num_experts // router.num_groups * router.groups_kept
    if router.top_k > eligible:
        raise ValueError(
            f"top_k: expected at most {eligible}, the number of experts in the kept groups "
            f"({router.groups_kept} of {router.num_groups}); got {router.top_k}"
        )
