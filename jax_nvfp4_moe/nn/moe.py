"""NVFP4MoE: a mixture-of-experts block with NVFP4 experts."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.nn.experts import ExpertOptions, RoutedExperts, make_experts
from jax_nvfp4_moe.nn.linear import (
    check_rngs,
    check_shape,
    random_matrix,
    read_value,
    wrap_value,
)
from jax_nvfp4_moe.numerics.activations import ActivationCall, find_activation
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.numerics.tensor import (
    DenseExperts,
    MoEParams,
    check_sizes,
    quantize,
    quantize_experts,
)
from jax_nvfp4_moe.ops.dense import dense
from jax_nvfp4_moe.ops.routing import route
from jax_nvfp4_moe.parallel import find_expert_mesh, share_rows
from jax_nvfp4_moe.parallel.expert_mesh import check_context, replicate
from jax_nvfp4_moe.parallel.tensor_parallel import run_by_rows
from jax_nvfp4_moe.scheme import CheckpointScheme, Scheme, Target


class RouterCorrection(nnx.Variable):
    """A bias that moves the choice of experts alone; set by load balancing, not by gradients."""


class LatentProjections(nnx.Module):
    """Projections around routed experts that are narrower than the tokens.

    Attributes:
      width: static; of what the routed experts see.
      down, up: called with ``[..., h]`` and with ``[..., width]``, and give the other.
    """

    def __init__(self, width: int, down: Callable[..., Any], up: Callable[..., Any]):
        """Hold the two projections."""
        self.width, self.down, self.up = width, down, up


class NVFP4MoE(nnx.Module):
    """A mixture-of-experts block: a router, its experts, shared experts, latent projections.

    With ``shared(x) = sigmoid(shared_gate(x)) * shared_experts(x)``::

      y = latent.up(experts(latent.down(x), *route(x))) + shared(x)

    Shared experts, their gate and latent projections are optional. The experts are NVFP4, or such
    as a mixed checkpoint has beside them: FP8, or not quantized.

    Attributes:
      experts: `nn.experts.RoutedExperts`; ``moe.experts(x, expert_ids, expert_weights)`` runs the
        routed experts alone, on what is as wide as they are.
      router_weight: `nnx.Param` ``[e, h]``; router logits are float32.
      router_logit_bias: `nnx.Param` ``[e]``, part of the logits, or None.
      router_bias: `RouterCorrection` ``[e]``, or None.
      shared_experts, shared_gate, latent: see the constructor.
      router: static `numerics.routing.Router`.
      target, dtype: static; see the constructor.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        *,
        top_k: int | None = None,
        router: Router | None = None,
        activation: str | ActivationCall = "silu",
        params: MoEParams | DenseExperts | None = None,
        router_weight: Float[Array, "e h"] | None = None,
        router_bias: Float[Array, " e"] | None = None,
        router_logit_bias: Float[Array, " e"] | None = None,
        shared_experts: Callable | None = None,
        shared_gate: Callable | None = None,
        latent: LatentProjections | None = None,
        checkpoint_scheme: CheckpointScheme | str = Scheme.W4A16,
        scheme: Scheme | str | None = None,
        target: Target | None = None,
        backend: str | Sequence[str] | None = None,
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
          activation: name of a row of `numerics.activations.ACTIVATIONS`, or what
            `find_activation` returns for one with other parameters than its row's.
          params: the experts; random where None, which needs `rngs`.
          router_weight: ``[e, h]``; random where None, which needs `rngs`.
          router_bias: correction of the choice ``[e]`` (e_score_correction_bias), or None; the
            weights do not see it.
          router_logit_bias: added to the logits ``[e]``, so that choice and weights see it
            (gpt-oss), or None.
          shared_experts: called with `x [..., h]`, added to the routed experts.
          shared_gate: called with `x`; its sigmoid ``[..., 1]`` multiplies the shared experts.
          latent: projections to the width that the routed experts see, where it is not `hidden`.
          checkpoint_scheme: what the checkpoint says of the experts: "w4a16" or "w4a4"; an
            `FP8ActivationScaling`, or None for a float dtype, with `DenseExperts`.
          scheme, target, backend: as for `ops.moe_mlp`.
          dtype: of the result; inputs are cast to it.
          mesh: divides the experts among devices along its axis `expert`, and each along `tensor`,
            see `parallel.experts`; all else in the block is replicated. None for one device.
          dispatch: over a mesh, "psum" where all devices have all tokens; "all_to_all", or "ragged"
            on GPUs, where tokens are divided along `expert`, see `parallel.dispatch`.
          capacity: rows of "all_to_all" for each pair of shards in one round; None for one round.
          rngs: where random weights come from (stream "params"); required without `params` or
            `router_weight`. `nnx.bridge.to_linen` passes its own.

        Raises:
          ValueError: sizes disagree, an argument is unknown, `mesh` does not divide the sizes or
            lacks the axis that `dispatch` needs, or weights and `rngs` are both missing.
          NoBackendError: no backend fits.
        """
        self.router = _one_router(top_k, router)
        call = find_activation(activation)
        options = ExpertOptions(
            self.router.top_k, call, self.router.weight_on_input, dtype, dispatch, capacity
        )
        self.dtype = options.dtype
        width = hidden if latent is None else latent.width
        check_rngs(rngs, params=params, router_weight=router_weight)
        if params is None:
            params = _fresh_experts(num_experts, width, intermediate, call.row, rngs)
        check_sizes(params, num_experts, width, intermediate)
        if mesh is not None:
            target = target or find_expert_mesh(mesh).target
        self.target = target or Target.current()
        self.experts: RoutedExperts = make_experts(
            params,
            options,
            checkpoint_scheme=checkpoint_scheme,
            scheme=scheme,
            target=self.target,
            backend=backend,
            mesh=mesh,
        )
        if router_weight is None:
            router_weight = random_matrix((num_experts, hidden), rngs).astype(self.dtype)
        check_shape("router_weight", router_weight.shape, (num_experts, hidden))
        biases = {"router_bias": router_bias, "router_logit_bias": router_logit_bias}
        for name, bias in biases.items():
            check_shape(name, (num_experts,) if bias is None else bias.shape, (num_experts,))
        if (expert_mesh := self.experts.expert_mesh) is not None:
            router_weight = replicate(router_weight, expert_mesh)
            biases = replicate(biases, expert_mesh)
        self.router_weight = nnx.Param(router_weight)
        self.router_bias = wrap_value(RouterCorrection, biases["router_bias"])
        self.router_logit_bias = wrap_value(nnx.Param, biases["router_logit_bias"])
        self.shared_experts, self.shared_gate = shared_experts, shared_gate
        self.latent = latent

    @property
    def scheme(self) -> Scheme | None:
        """How activations enter the routed experts' NVFP4 products; None for other weights."""
        return self.experts.scheme

    @classmethod
    def from_dense(
        cls,
        gate: Float[Array, "e h i"] | None,
        up: Float[Array, "e h i"],
        down: Float[Array, "e i h"],
        router_kernel: Float[Array, "h e"],
        **options: Any,
    ) -> "NVFP4MoE":
        """Quantize the kernels of a mixture of experts as Flax models store them.

        Flax stores kernels as ``[inputs, outputs]`` and computes ``x @ kernel``; NVFP4 matrices are
        ``[outputs, inputs]``. This method transposes, and quantizes the experts as
        `quantize_experts` does; the router is not quantized::

          moe = NVFP4MoE.from_dense(gate, up, down, router.kernel[...], top_k=2)

        Args:
          gate: ``[e, h, i]`` in any float dtype; None where the activation is not gated.
          up: ``[e, h, i]``; h and i are multiples of 16.
          down: ``[e, i, h]``.
          router_kernel: ``[h, e]``.
          options: keyword arguments of the constructor other than `params` and `router_weight`,
            such as `top_k`.

        Raises:
          ValueError: shapes disagree, or are no multiples of 16; also as the constructor.
        """
        kernels = {"gate": gate, "up": up, "down": down, "router_kernel": router_kernel}
        shapes = {name: jnp.shape(array) for name, array in kernels.items() if array is not None}
        if len(shapes["up"]) != 3:
            raise ValueError(f"up: expected [experts, inputs, outputs], got shape {shapes['up']}")
        e, h, i = shapes["up"]
        wanted = {"gate": (e, h, i), "down": (e, i, h), "router_kernel": (h, e)}
        for name, shape in wanted.items():
            if shapes.get(name, shape) != shape:
                raise ValueError(
                    f"{name}: expected shape {shape} to go with up {shapes['up']}, inputs before "
                    f"outputs as in Flax; got {shapes[name]}"
                )
        params = quantize_experts(*(_transpose(kernel) for kernel in (gate, up, down)))
        weight = jnp.asarray(router_kernel).T
        return cls(e, h, i, params=params, router_weight=weight, **options)

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
            expert_mesh = self.experts.expert_mesh
            if expert_mesh is not None and self.experts.options.dispatch != "psum":
                run = functools.partial(share_rows, run, expert_mesh)
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

    def __call__(self, x: Float[Array, "... h"]) -> Float[Array, "... h"]:
        """Run the whole block; `x` is cast to the module's dtype, which the result has."""
        x = x.astype(self.dtype)
        chosen = self.route(x)
        own = x
        if self.experts.expert_mesh is not None:
            # Or XLA joins the first product of the shared experts with the router's, and the sum
            # over the devices, or the way back of the rows, has less work to hide behind.
            own, chosen = jax.lax.optimization_barrier((x, chosen))
        if self.latent is None:
            y = self.experts(x, *chosen)
        else:
            inner = self.experts(self._beside_experts(self.latent.down, x), *chosen)
            y = self._beside_experts(self.latent.up, inner).astype(self.dtype)
        if self.shared_experts is None:
            return y
        with jax.named_scope("shared_experts"):
            shared = self._beside_experts(self.shared_experts, own)
            if self.shared_gate is not None:
                shared = jax.nn.sigmoid(self.shared_gate(own)) * shared
        return y + shared.astype(self.dtype)

    def _beside_experts(self, module, x):
        """Return ``module(x)``, by each device on its own tokens where dispatch divides them."""
        expert_mesh = self.experts.expert_mesh
        if (
            expert_mesh is None
            or expert_mesh.expert == 1
            or self.experts.options.dispatch == "psum"
        ):
            return module(x)
        return run_by_rows(module, expert_mesh, x)


def _one_router(top_k, router):
    if (top_k is None) == (router is None):
        raise ValueError(f"router: expected one of top_k and router, got {top_k} and {router}")
    return Router(top_k) if router is None else router


def _transpose(kernel):
    return None if kernel is None else jnp.swapaxes(jnp.asarray(kernel), 1, 2)


def _fresh_experts(num_experts, hidden, intermediate, row, rngs):
    """Return random experts, gate and up with a global scale each, as exporters make them.

    Where their rows alternate, with one for both.
    """
    first = random_matrix((num_experts, 2 if row.gated else 1, intermediate, hidden), rngs)
    down = random_matrix((num_experts, hidden, intermediate), rngs)
    if row.interleaved:
        return MoEParams(quantize(first.reshape(num_experts, -1, hidden)), quantize(down))
    return quantize_experts(first[:, 0] if row.gated else None, first[:, -1], down)
