"""Routers: from router logits to the experts of each token and their weights; float32 jnp.

| family | `Router` |
|---|---|
| Qwen3-MoE, Mixtral (softmax, top-k, renormalise) | ``Router(top_k)`` |
| softmax, top-k, weights as they are | ``Router(top_k, renormalize=False)`` |
| gpt-oss (top-k of the logits, softmax over those) | ``Router(top_k, select="logits")`` |
| DeepSeek-V3, GLM, Kimi-K2, Nemotron-3, MiniMax | ``Router(top_k, score="sigmoid", ...)`` |
| DeepSeek-V4 | ``Router(top_k, score="sqrt_softplus")`` |
| Llama-4 (top-1, sigmoid, weight on input) | ``Router(1, score="sigmoid", select="logits", ...)`` |

A correction bias moves the choice of experts but not their weights. A bias of the router's own
linear, as gpt-oss has it, is part of the logits that come in.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

_SCORES = {
    "softmax": lambda logits: jax.nn.softmax(logits, axis=-1),
    "sigmoid": jax.nn.sigmoid,
    "sqrt_softplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}
_SELECT = ("scores", "logits")


@dataclasses.dataclass(frozen=True)
class Router:
    """How a layer turns logits into experts; static, so it may be a field of any module.

    Attributes:
      top_k: experts per token.
      score: "softmax", "sigmoid" or "sqrt_softplus".
      renormalize: whether the chosen weights are divided by their sum.
      select: "scores" chooses by score (plus correction bias) over all experts; "logits" chooses
        by logit and scores only the chosen ones.
      num_groups, groups_kept: experts stand in equal groups; only those of the `groups_kept` best
        groups are eligible. A group counts as its two best (biased) scores together.
      scaling: the weights are multiplied by it at the end (routed_scaling_factor).
      weight_on_input: whether the weight multiplies the expert's input instead of its output.

    Raises:
      ValueError: a field is out of range; names it.
    """

    top_k: int
    score: str = "softmax"
    renormalize: bool = True
    select: str = "scores"
    num_groups: int = 1
    groups_kept: int = 1
    scaling: float = 1.0
    weight_on_input: bool = False

    def __post_init__(self):
        """Check the fields against their ranges."""
        if self.score not in _SCORES:
            raise ValueError(f"score: expected one of {sorted(_SCORES)}, got {self.score!r}")
        if self.select not in _SELECT:
            raise ValueError(f"select: expected one of {_SELECT}, got {self.select!r}")
        if self.top_k < 1:
            raise ValueError(f"top_k: expected at least 1, got {self.top_k}")
        if not 1 <= self.groups_kept <= self.num_groups:
            raise ValueError(
                f"groups_kept: expected 1 to num_groups={self.num_groups}, got {self.groups_kept}"
            )


# DeepSeek divides by (sum + 1e-20), so that tokens whose scores all underflow stay finite.
_TINY = 1e-20


def route(
    router: Router, logits: Float[Array, "t e"], bias: Float[Array, " e"] | None = None
) -> tuple[Int32[Array, "t top_k"], Float[Array, "t top_k"]]:
    """Choose `top_k` experts for each token, best first, and their weights.

    ``weights = scaling * s[ids] / sum(s[ids])`` with ``s = score(logits)`` and ``ids`` the largest
    ``s + bias`` among the eligible groups; see `Router` for the other forms. Ties go to the lower
    expert id.

    Args:
      router: how to route.
      logits: ``[t, e]``; computed in float32.
      bias: score correction ``[e]`` (e_score_correction_bias), or None.

    Returns:
      expert_ids int32 ``[t, top_k]`` and expert_weights float32 ``[t, top_k]``.

    Raises:
      ValueError: there are fewer experts than `top_k`, or they do not fill the groups.

    Source: the routers of the models named in the table of this module, as their reference
    implementations compute them.
    """
    logits = logits.astype(jnp.float32)
    check_experts(router, logits.shape[-1])
    ids = _choose(router, logits, bias)
    return ids, weigh(router, logits, ids)


def weigh(
    router: Router, logits: Float[Array, "t e"], ids: Int32[Array, "t top_k"]
) -> Float[Array, "t top_k"]:
    """Return the weights of the experts `ids`; all that gradients see of `route`."""
    if router.select == "logits":
        return _SCORES[router.score](jnp.take_along_axis(logits, ids, axis=-1)) * router.scaling
    weights = jnp.take_along_axis(_SCORES[router.score](logits), ids, axis=-1)
    if router.renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _TINY)
    return weights * router.scaling


def narrow_ids(expert_ids: Int[Array, "..."]) -> Int32[Array, "..."]:
    """Return expert ids as int32; an id that does not fit becomes -1, which is no expert.

    A cast alone would wrap around: expert 0 of an id of ``2**32``.
    """
    if expert_ids.dtype.itemsize <= 4:  # uint32 past the largest int32 becomes negative
        return expert_ids.astype(jnp.int32)
    fits = (expert_ids >= 0) & (expert_ids <= jnp.iinfo(jnp.int32).max)
    return jnp.where(fits, expert_ids.astype(jnp.int32), -1)


def _choose(router, logits, bias):
    """Return the ids of the best experts, float32 logits given."""
    if router.select == "logits":
        return lax.top_k(logits, router.top_k)[1]
    scores = _SCORES[router.score](logits)
    choice = scores if bias is None else scores + bias.astype(jnp.float32)[None, :]
    if router.groups_kept < router.num_groups:
        choice = _drop_groups(router, choice)
    return lax.top_k(choice, router.top_k)[1]


def _drop_groups(router, choice):
    """Put the experts of all but the best groups out of reach."""
    t, e = choice.shape
    size = e // router.num_groups
    grouped = choice.reshape(t, router.num_groups, size)
    group_score = lax.top_k(grouped, min(2, size))[0].sum(axis=-1)
    kept = lax.top_k(group_score, router.groups_kept)[1]
    keep = jax.nn.one_hot(kept, router.num_groups, dtype=jnp.bool_).any(axis=-2)
    return jnp.where(keep[..., None], grouped, -jnp.inf).reshape(t, e)


def check_experts(router: Router, num_experts: int) -> None:
    """Check that the experts fill the groups of `router` and are enough for it.

    Raises:
      ValueError: they do not, or are not.
    """
    if num_experts % router.num_groups:
        raise ValueError(
            f"num_groups: expected a divisor of {num_experts} experts, got {router.num_groups}"
        )
    eligible = num_experts // router.num_groups * router.groups_kept
    if router.top_k > eligible:
        raise ValueError(f"top_k: expected at most {eligible} eligible experts, got {router.top_k}")
