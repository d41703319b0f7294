"""NVFP4MoE: a mixture-of-experts block with NVFP4 experts."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Int32

from jax_nvfp4_moe.nn.dense import NVFP4Param
from jax_nvfp4_moe.nn.intermediates import record
from jax_nvfp4_moe.nn.linear import (
    QuantizedModule,
    check_rngs,
    check_shape,
    random_matrix,
    read_value,
    wrap_value,
)
from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.numerics.tensor import (
    DenseExperts,
    MoEParams,
    check_sizes,
    quantize,
    quantize_experts,
)
from jax_nvfp4_moe.ops.dense import dense
from jax_nvfp4_moe.ops.dense_moe import dense_moe
from jax_nvfp4_moe.ops.moe import check_input_scales, check_row_order, moe_mlp
from jax_nvfp4_moe.ops.preparation import find_moe_layout, prepare
from jax_nvfp4_moe.ops.routing import route
from jax_nvfp4_moe.parallel import (
    DISPATCHES,
    ShardedExperts,
    find_expert_mesh,
    run_dispatched,
    shard_experts,
    share_rows,
)
from jax_nvfp4_moe.parallel.expert_mesh import EXPERT, check_context, check_row_scales, replicate
from jax_nvfp4_moe.parallel.placement import ExpertSlots, to_physical_ids
from jax_nvfp4_moe.parallel.tensor_parallel import run_by_rows
from jax_nvfp4_moe.scheme import (
    CheckpointScheme,
    FP8ActivationScaling,
    Problem,
    Scheme,
    Target,
    rounds_to_fp8,
)


class RoutedTokens(NamedTuple):
    """What the routed experts of a block read and give; what `nn.intermediates` records of a block.

    Attributes:
      x: tokens ``[..., h]``.
      expert_ids, expert_weights: ``[..., k]``; ids are those of the checkpoint, wherever the
        experts are stored.
      y: what the experts give, ``[..., h]``; None where nobody has run them.
    """

    x: jax.Array
    expert_ids: jax.Array
    expert_weights: jax.Array
    y: jax.Array | None = None


class RouterCorrection(nnx.Variable):
    """A bias that moves the choice of experts alone; set by load balancing, not by gradients."""


class NVFP4MoE(QuantizedModule):
    """A mixture-of-experts block with NVFP4 experts, or such as a mixed checkpoint has beside them.

    ``y = latent_out(experts(latent_in(x), *route(x))) + shared_gate * shared_experts(x)``, each
    part but the router and the experts optional.

    Attributes:
      params: `NVFP4Param` of `MoEParams`, in the layout of its backend, of `DenseExperts`, or of
        `ShardedExperts` of either.
      router_weight: `nnx.Param` ``[e, h]``; router logits are float32.
      router_logit_bias: `nnx.Param` ``[e]``, part of the logits, or None.
      router_bias: `RouterCorrection` ``[e]``, or None.
      slots: `ExpertSlots`, or None. Where each expert is stored after `place_model` has replicated
        or moved it. None means that expert i is stored at index i.
      router: static `numerics.routing.Router`.
      activation: static `numerics.activations.ActivationCall`.
      scheme, target, dtype: static; see the constructor.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        *,
        top_k: int | None = None,
        router: Router | None = None,
        activation: str = "silu",
        alpha: float | None = None,
        beta: float | None = None,
        limit: float | None = None,
        params: MoEParams | DenseExperts | ShardedExperts | None = None,
        router_weight: Float[Array, "e h"] | None = None,
        router_bias: Float[Array, " e"] | None = None,
        router_logit_bias: Float[Array, " e"] | None = None,
        shared_experts: Callable | None = None,
        shared_gate: Callable | None = None,
        latent: int | None = None,
        latent_in: Callable | None = None,
        latent_out: Callable | None = None,
        checkpoint_scheme: CheckpointScheme | str = Scheme.W4A16,
        scheme: Scheme | str | None = None,
        target: Target | None = None,
        backend: str | None = None,
        dtype=jnp.bfloat16,
        mesh: Mesh | None = None,
        dispatch: str = "psum",
        capacity: int | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        """Make a block of `num_experts` experts `intermediate` wide, on tokens `hidden` wide.

        Args:
          num_experts, hidden, intermediate: sizes; the last two multiples of 16.
          top_k: experts per token; short for ``router=Router(top_k)``.
          router: how tokens choose; one of `top_k` and `router` is needed.
          activation, alpha, beta, limit: as for `ops.moe_mlp`.
          params: the experts; random where None, which needs `rngs`.
          router_weight: ``[e, h]``; random where None, which needs `rngs`.
          router_bias: correction of the choice ``[e]`` (e_score_correction_bias), or None; the
            weights do not see it.
          router_logit_bias: added to the logits ``[e]``, so that choice and weights see it
            (gpt-oss), or None.
          shared_experts: called with `x [..., h]`, added to the routed experts.
          shared_gate: called with `x`; its sigmoid ``[..., 1]`` multiplies the shared experts.
          latent: width that the routed experts see where it is not `hidden`.
          latent_in, latent_out: ``[..., h] -> [..., latent]`` and back; needed with `latent`.
          checkpoint_scheme: what the checkpoint says of the experts: "w4a16" or "w4a4"; an
            `FP8ActivationScaling`, or None for a float dtype, with `DenseExperts`.
          scheme, target, backend: as for `ops.moe_mlp`.
          dtype: of the result; inputs are cast to it.
          mesh: shares the experts out along its axis `expert` and cuts each along `tensor`, see
            `parallel.experts`; what else the block has is whole on every device. None for one
            device, or with `params` that are sharded already.
          dispatch: over a mesh, "psum" where all devices have all tokens; "all_to_all", or "ragged"
            on GPUs, where tokens are shared out along `expert`, see `parallel.dispatch`.
          capacity: rows of "all_to_all" for each pair of shards in one round; None for one round.
          rngs: where random weights come from (stream "params"); required without `params` or
            `router_weight`. `nnx.bridge.to_linen` passes its own.

        Raises:
          ValueError: sizes disagree, an argument is unknown, `mesh` does not divide the sizes or
            lacks the axis that `dispatch` needs, or weights and `rngs` are both missing.
          NoBackendError: no backend fits.
        """
        if mesh is not None:
            target = target or find_expert_mesh(mesh).target
        self._settle(checkpoint_scheme, scheme, target, backend, dtype)
        self.router = _one_router(top_k, router)
        self.dispatch, self.capacity = _check_dispatch(dispatch, capacity), capacity
        self.activation = find_activation(activation, alpha, beta, limit)
        if (latent is None) != (latent_in is None) or (latent is None) != (latent_out is None):
            raise ValueError("latent: expected latent, latent_in and latent_out together or none")
        width = hidden if latent is None else latent
        check_rngs(rngs, params=params, router_weight=router_weight)
        if params is None:
            params = _fresh_experts(num_experts, width, intermediate, self.activation.row, rngs)
        check_sizes(params, num_experts, width, intermediate)
        stored = params.stacked if isinstance(params, ShardedExperts) else params
        if isinstance(stored, DenseExperts) != (self.scheme is None):
            raise ValueError(
                f"checkpoint_scheme: expected an FP8ActivationScaling or None with DenseExperts "
                f"alone, got {checkpoint_scheme} with "
                f"{type(stored).__name__}"
            )
        check_row_order(stored, self.activation)
        check_input_scales("params", stored, self.scheme)
        params = self._prepared(params, mesh)
        self.params = NVFP4Param(params)
        if router_weight is None:
            router_weight = random_matrix((num_experts, hidden), rngs).astype(self.dtype)
        check_shape("router_weight", router_weight.shape, (num_experts, hidden))
        biases = {"router_bias": router_bias, "router_logit_bias": router_logit_bias}
        for name, bias in biases.items():
            check_shape(name, (num_experts,) if bias is None else bias.shape, (num_experts,))
        if isinstance(params, ShardedExperts):
            router_weight = replicate(router_weight, params.expert_mesh)
            biases = replicate(biases, params.expert_mesh)
        self.router_weight = nnx.Param(router_weight)
        self.router_bias = wrap_value(RouterCorrection, biases["router_bias"])
        self.router_logit_bias = wrap_value(nnx.Param, biases["router_logit_bias"])
        self.shared_experts, self.shared_gate = shared_experts, shared_gate
        self.latent_in, self.latent_out = latent_in, latent_out
        self.slots: ExpertSlots | None = nnx.data(None)

    def _prepared(self, params, mesh):
        """Return the experts as the op takes them: in their layout, and over `mesh`."""
        how = self._op_arguments()
        if mesh is not None and not isinstance(params, ShardedExperts):
            nvfp4 = isinstance(params, MoEParams)
            params = shard_experts(
                params,
                find_expert_mesh(mesh),
                layout=find_moe_layout(params, **how) if nvfp4 else None,
                interleaved=self.activation.row.interleaved,
            )
        if isinstance(params, ShardedExperts):
            _check_dispatch_axis(self.dispatch, params.expert_mesh)
            check_row_scales(params.expert_mesh, self.scheme or self._activations())
            return params
        return prepare(params, **how) if isinstance(params, MoEParams) else params

    def route(
        self, x: Float[Array, "... h"]
    ) -> tuple[Int32[Array, "... k"], Float[Array, "... k"]]:
        """Choose the experts of each token, best first, and their float32 weights.

        Logits are ``x @ router_weight.T + router_logit_bias`` in float32; see
        `numerics.routing.route` for what follows. The block's `backend` is that of its experts and
        does not apply to the router.
        """
        with jax.named_scope("router"):
            rows = x.reshape(-1, x.shape[-1]).astype(self.dtype)
            parts = self.router_weight, self.router_bias, self.router_logit_bias
            run, values = self._route_rows, [read_value(part) for part in parts]
            check_context(values[0])
            params = self.params.get_value()
            if isinstance(params, ShardedExperts) and self.dispatch != "psum":
                run = functools.partial(share_rows, run, params.expert_mesh)
            ids, weights = run(rows, *values)
            lead = (*x.shape[:-1], self.router.top_k)
            return ids.reshape(lead), weights.reshape(lead)

    def _route_rows(self, rows, weight, bias, logit_bias):
        """Choose the experts of ``rows [t, h]``.

        A GPU sums exact products of bfloat16 in float32, so both operands go in as they are. XLA's
        CPU dot of bfloat16 loses up to twice as much as that of float32.
        """
        if not (rows.dtype == weight.dtype == jnp.bfloat16 and self.target.platform == "cuda"):
            rows, weight = rows.astype(jnp.float32), weight.astype(jnp.float32)
        logits = dense(rows, weight)
        if logit_bias is not None:
            logits += logit_bias.astype(jnp.float32)[None, :]
        return route(self.router, logits, bias, target=self.target)

    def experts(
        self,
        x: Float[Array, "... h"],
        expert_ids: Int[Array, "... k"],
        expert_weights: Float[Array, "... k"],
    ) -> Float[Array, "... h"]:
        """Run the routed experts alone; `ops.moe_mlp` with this block's weights.

        Args:
          x: tokens, as wide as the experts: ``latent`` where there is one.
          expert_ids: an id of -1 or out of range contributes nothing.
          expert_weights: of the same shape.
        """
        call = self.activation
        run: Callable = moe_mlp
        how = self._op_arguments()
        if self.scheme is None:
            run, how = dense_moe, {"activations": self._activations()}
        with jax.named_scope("experts"):
            params = self.params.get_value()
            run = functools.partial(
                run,
                activation=call.name,
                alpha=call.alpha if call.row.parametrised else None,
                beta=call.beta if call.row.parametrised else None,
                limit=call.limit,
                weight_on_input=self.router.weight_on_input,
                **how,
            )
            if isinstance(params, ShardedExperts):
                run = functools.partial(
                    run_dispatched,
                    run,
                    dispatch=self.dispatch,
                    capacity=self.capacity,
                    scheme=self.scheme,
                    weight_on_input=self.router.weight_on_input,
                )
            y = run(
                x.reshape(-1, x.shape[-1]).astype(self.dtype),
                params,
                to_physical_ids(expert_ids.reshape(-1, expert_ids.shape[-1]), self.slots),
                expert_weights.reshape(-1, expert_weights.shape[-1]),
            ).reshape(x.shape)
        record(self, RoutedTokens(x, expert_ids, expert_weights, y))
        return y

    def _activations(self) -> FP8ActivationScaling:
        """Return how the inputs of FP8 experts are rounded."""
        rounds = isinstance(self.checkpoint_scheme, FP8ActivationScaling) and rounds_to_fp8(
            self.requested_scheme, self.target
        )
        return (
            FP8ActivationScaling(self.checkpoint_scheme) if rounds else FP8ActivationScaling.WEIGHTS
        )

    def __call__(self, x: Float[Array, "... h"]) -> Float[Array, "... h"]:
        """Run the whole block; `x` is cast to the module's dtype, which the result has."""
        x = x.astype(self.dtype)
        chosen = self.route(x)
        own = x
        if isinstance(self.params.get_value(), ShardedExperts):
            # Or XLA joins the first product of the shared experts with the router's, and the sum
            # over the devices, or the way back of the rows, has less work to hide behind.
            own, chosen = jax.lax.optimization_barrier((x, chosen))
        if self.latent_in is None or self.latent_out is None:
            y = self.experts(x, *chosen)
        else:
            inner = self.experts(self._beside_experts(self.latent_in, x), *chosen)
            y = self._beside_experts(self.latent_out, inner).astype(self.dtype)
        if self.shared_experts is None:
            return y
        with jax.named_scope("shared_experts"):
            shared = self._beside_experts(self.shared_experts, own)
            if self.shared_gate is not None:
                shared = jax.nn.sigmoid(self.shared_gate(own)) * shared
        return y + shared.astype(self.dtype)

    def _beside_experts(self, module, x):
        """Return ``module(x)``, by each device on its own tokens where dispatch shares them out."""
        params = self.params.get_value()
        shared_out = isinstance(params, ShardedExperts) and self.dispatch != "psum"
        if shared_out and params.expert_mesh.expert > 1:
            return run_by_rows(module, params.expert_mesh, x)
        return module(x)

    def own_problem(self) -> tuple[Problem, CheckpointScheme, str | None, str | None]:
        """Return what the routed experts ask of a backend."""
        params = self.params.get_value()
        sizes = params.num_experts, params.intermediate
        if isinstance(params, ShardedExperts):
            sizes = params.local_experts, params.local_intermediate
        problem = Problem(
            "moe_mlp",
            self.scheme,
            self.target,
            self.dtype.name,
            sizes[0],
            self.router.top_k,
            params.hidden,
            sizes[1],
            self.activation.name,
        )
        return problem, self.checkpoint_scheme, self.requested_scheme, self.backend


def _one_router(top_k, router):
    if (top_k is None) == (router is None):
        raise ValueError(f"router: expected one of top_k and router, got {top_k} and {router}")
    return Router(top_k) if router is None else router


def _check_dispatch(dispatch, capacity):
    if dispatch not in DISPATCHES:
        raise ValueError(f"dispatch: expected one of {', '.join(DISPATCHES)}; got {dispatch!r}")
    if capacity is not None and (dispatch != "all_to_all" or capacity < 1):
        raise ValueError(
            "capacity: expected None, or at least 1 with dispatch 'all_to_all'; "
            f"got {capacity} with {dispatch!r}"
        )
    return dispatch


def _check_dispatch_axis(dispatch, expert_mesh):
    if dispatch != "psum" and EXPERT not in expert_mesh.axes:
        raise ValueError(
            f"dispatch: {dispatch!r} sends tokens along the mesh axis '{EXPERT}', which is missing "
            f"in {dict(expert_mesh.mesh.shape)}. Add the axis, or use dispatch='psum'"
        )


def _fresh_experts(num_experts, hidden, intermediate, row, rngs):
    """Return random experts, gate and up with a global scale each, as exporters make them.

    Where their rows alternate, with one for both.
    """
    first = random_matrix((num_experts, 2 if row.gated else 1, intermediate, hidden), rngs)
    down = random_matrix((num_experts, hidden, intermediate), rngs)
    if row.interleaved:
        return MoEParams(quantize(first.reshape(num_experts, -1, hidden)), quantize(down))
    return quantize_experts(first[:, 0] if row.gated else None, first[:, -1], down)
