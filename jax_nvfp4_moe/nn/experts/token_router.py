"""TokenRouter: the linear layer, the biases and the rule by which tokens choose their experts."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.nn.random_weights import check_rngs, random_matrix
from jax_nvfp4_moe.nn.variables import read_value, wrap_value
from jax_nvfp4_moe.numerics.arguments import check_kind, check_shape, check_size
from jax_nvfp4_moe.numerics.routing import Router, check_experts, weigh
from jax_nvfp4_moe.ops.dense import dense
from jax_nvfp4_moe.ops.moe import check_dtype
from jax_nvfp4_moe.ops.routing import route
from jax_nvfp4_moe.scheme import Target


class RouterCorrection(nnx.Variable):
    """A bias on the router's scores that changes which experts are chosen, but not their weights.

    Load balancing sets it during training. It is not an `nnx.Param`, so optimizers skip it.
    """


class TokenExperts(nnx.Variable):
    """The experts of each token id, for a router that only weighs them.

    It is not an `nnx.Param`, so optimizers skip it.
    """


class TokenRouter(nnx.Module):
    """Chooses the experts of each token, and computes their weights.

    ::

      logits = norm(x) @ weight.T + logit_bias + adapter(norm(x))
      logits = logit_cap * tanh(logits / logit_cap)
      expert_ids, expert_weights = ops.route(router, logits, correction_bias)
      expert_weights = expert_weights * scale[expert_ids]

    All parts but the weight are optional. Logits are computed in float32. With `token_experts`, the
    experts follow from the ids of the tokens, and the router only computes their weights.

    To train a router with few parameters, set its `adapter` to an `nnx.LoRA`. To use a router of
    your own, set ``moe.token_router`` to any module that maps tokens ``[..., h]`` to expert ids and
    expert weights.

    Attributes:
      weight: `nnx.Param` ``[e, h]``.
      correction_bias: `RouterCorrection` ``[e]``, or None.
      logit_bias: `nnx.Param` ``[e]``, or None.
      scale: `nnx.Param` ``[e]``, or None.
      token_experts: `TokenExperts` ``[v, k]``, or None.
      norm: module that maps ``[..., h]`` to ``[..., h]``, or None.
      logit_cap: static bound of the logits, or None.
      adapter: module that maps ``[..., h]`` to ``[..., e]``, which is added to the logits; None
        (default) for none.
      router: static `Router`, the rule that turns logits into experts.
      target: static `Target`, the device that the router was made for.
      dtype: static dtype to which tokens are cast.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jax_nvfp4_moe as nvfp4
      >>> moe = nvfp4.NVFP4MoE(8, 64, 32, top_k=2, rngs=nnx.Rngs(0))
      >>> moe.token_router.adapter = nnx.LoRA(64, 4, 8, rngs=nnx.Rngs(1))
      >>> x = jnp.ones((5, 64), jnp.bfloat16)
      >>> logits = moe.token_router.logits(x)
      >>> logits.shape, logits.dtype.name
      ((5, 8), 'float32')
      >>> expert_ids, expert_weights = moe.token_router(x)
      >>> expert_ids.shape, expert_weights.shape
      ((5, 2), (5, 2))

    Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated
    Mixture-of-Experts Layer", arXiv:1701.06538.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        *,
        top_k: int | None = None,
        router: Router | None = None,
        weight: Float[Array, "e h"] | None = None,
        correction_bias: Float[Array, " e"] | None = None,
        logit_bias: Float[Array, " e"] | None = None,
        scale: Float[Array, " e"] | None = None,
        token_experts: Int32[Array, "v k"] | None = None,
        norm: Callable | None = None,
        logit_cap: float | None = None,
        target: Target | None = None,
        dtype=jnp.bfloat16,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        """Make the router of `num_experts` experts.

        Arrays that you pass keep their dtype.

        Args:
          num_experts: number of experts, e.
          hidden: width of the tokens, h.
          top_k: number of experts per token; short for ``router=Router(top_k)``. Pass either
            `top_k` or `router`.
          router: `Router` that says how tokens choose experts.
          weight: float array ``[e, h]``. None draws random values from `rngs`: normal values of
            variance ``1 / h``.
          correction_bias: float array ``[e]``, added to the scores when experts are chosen, but not
            part of their weights (``e_score_correction_bias``). Defaults to None.
          logit_bias: float array ``[e]``, added to the logits, so that it affects both the choice
            and the weights (gpt-oss). Defaults to None.
          scale: float array ``[e]``, by which the weight of each chosen expert is multiplied at the
            end (Gemma 4). Defaults to None.
          token_experts: int32 ``[v, k]``, the experts of each token id (DeepSeek-V4). None, the
            default, lets the router choose experts.
          norm: module that maps ``x [..., h]`` to ``[..., h]``, which the router reads in place of
            `x`. Defaults to None.
          logit_cap: positive bound of the logits (Laguna). Defaults to None, for no bound.
          target: the device to run on. None takes JAX's default device.
          dtype: dtype to which tokens are cast: bfloat16 (the default), float16 or float32. Take
            that of the block.
          param_dtype: dtype of a random weight. Defaults to float32.
          rngs: source of a random weight, from its stream "params". Required if `weight` is None.

        Raises:
          TypeError: an argument has a wrong type.
          ValueError: shapes disagree, or `weight` and `rngs` are both None. Also if `top_k` is
            larger than `num_experts`, or if the groups of `router` do not divide the experts, or
            keep fewer than `top_k` of them.
        """
        self.router = one_router(top_k, router, num_experts)
        self.target, self.dtype = target or Target.current(), check_dtype(dtype)
        check_rngs(rngs, weight=weight)
        if weight is None:
            weight = random_matrix((num_experts, hidden), rngs).astype(param_dtype)
        parts = {
            "weight": weight,
            "correction_bias": correction_bias,
            "logit_bias": logit_bias,
            "scale": scale,
            "token_experts": token_experts,
        }
        check_parts(parts, num_experts, hidden, self.router)
        check_experts(self.router, num_experts)
        self.weight = nnx.Param(jnp.asarray(weight))
        self.correction_bias = wrap_value(RouterCorrection, correction_bias)
        self.logit_bias = wrap_value(nnx.Param, logit_bias)
        self.scale = wrap_value(nnx.Param, scale)
        self.token_experts = wrap_value(TokenExperts, token_experts)
        self.norm, self.logit_cap = norm, logit_cap
        self.adapter: Callable[..., Any] | None = nnx.data(None)

    def __call__(
        self, x: Float[Array, "... h"], token_ids: Int32[Array, "..."] | None = None
    ) -> tuple[Int32[Array, "... k"], Float[Array, "... k"]]:
        """Choose the experts of each token.

        Args:
          x: tokens ``[..., h]``; cast to the module's dtype.
          token_ids: int32 ``[...]``, the ids of the tokens. Required if the router has
            `token_experts`, and otherwise not used. Defaults to None.

        Returns:
          Expert ids, int32 ``[..., k]``, best expert first, and their weights, float32
          ``[..., k]``.

        Raises:
          ValueError: the router has `token_experts`, and `token_ids` is None or has another shape.
        """
        given = self._find_experts(x, token_ids)
        logits = self.logits(x.reshape(-1, x.shape[-1]))
        if given is None:
            bias = read_value(self.correction_bias)
            ids, weights = route(self.router, logits, bias, target=self.target)
        else:
            ids, weights = given, weigh(self.router, logits, given)
        if self.scale is not None:
            weights = weights * self.scale.get_value().astype(jnp.float32)[ids]
        lead = (*x.shape[:-1], self.router.top_k)
        return ids.reshape(lead), weights.reshape(lead)

    def logits(self, x: Float[Array, "... h"]) -> Float[Array, "... e"]:
        """Return the logits of all experts, such as for an auxiliary loss.

        On a GPU, bfloat16 tokens are not cast: tensor cores multiply them exactly, by bfloat16 or
        float32 weights, and sum in float32. On a CPU they are cast to float32, because XLA's
        bfloat16 dot has up to twice the error of its float32 dot.

        Args:
          x: tokens ``[..., h]``; cast to the module's dtype.

        Returns:
          float32 ``[..., e]``. Gradients flow to `x` and to all parameters of the router.
        """
        rows, weight = x.astype(self.dtype), self.weight.get_value()
        if self.norm is not None:
            rows = self.norm(rows)
        seen = rows
        if not (rows.dtype == jnp.bfloat16 and self.target.platform == "cuda"):
            rows, weight = rows.astype(jnp.float32), weight.astype(jnp.float32)
        logits = dense(rows, weight, bias=read_value(self.logit_bias), target=self.target)
        if self.adapter is not None:
            logits += self.adapter(seen).astype(logits.dtype)
        cap = self.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _find_experts(self, x, token_ids):
        """Return the experts of the tokens ``[t, k]``, or None if the router chooses them."""
        if self.token_experts is None:
            return None
        if token_ids is None or token_ids.shape != x.shape[:-1]:
            found = "None" if token_ids is None else f"shape {token_ids.shape}"
            raise ValueError(
                f"token_ids: expected shape {x.shape[:-1]}, because the experts of this block "
                f"depend on the ids of the tokens; got {found}"
            )
        return self.token_experts.get_value().at[token_ids.reshape(-1)].get(mode="clip")


def one_router(top_k: int | None, router: Router | None, num_experts: int) -> Router:
    """Return `router`, or the router that `top_k` stands for.

    Raises:
      TypeError: `router` is no `Router`, or `num_experts` no integer.
      ValueError: both are None, or neither is. Also if more experts are chosen than there are.
    """
    check_size("num_experts", num_experts)
    check_kind("router", router, Router, type(None))
    if (top_k is None) == (router is None):
        raise ValueError(
            "router: expected one of top_k and router, and None for the other; "
            f"got {top_k} and {router}"
        )
    rule = Router(top_k) if top_k is not None else router
    assert rule is not None
    if rule.top_k > num_experts:
        raise ValueError(f"top_k: expected at most num_experts = {num_experts}, got {rule.top_k}")
    return rule


def check_parts(
    parts: Mapping[str, jax.Array | None],
    num_experts: int,
    hidden: int,
    router: Router,
    names: Mapping[str, str] | None = None,
) -> None:
    """Check the shapes of the parts of a router.

    Args:
      parts: argument of `TokenRouter` -> array, or None.
      num_experts: number of experts.
      hidden: width of the tokens.
      router: the rule of the router.
      names: argument of `TokenRouter` -> how messages call it. None (default) for the same name.

    Raises:
      ValueError: a shape is wrong; names the first such part.
    """
    table = parts.get("token_experts")
    shapes = {
        "weight": (num_experts, hidden),
        "token_experts": None if table is None else (table.shape[0], router.top_k),
    }
    for part, array in parts.items():
        if array is not None:
            name = part if names is None else names[part]
            check_shape(name, array.shape, shapes.get(part, (num_experts,)))
