"""NVFP4MoE: a mixture-of-experts block whose routed experts are stored in NVFP4."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.nn.dense import DenseLinear
from jax_nvfp4_moe.nn.experts import ExpertOptions, RoutedExperts, make_experts
from jax_nvfp4_moe.nn.intermediates import record
from jax_nvfp4_moe.nn.linear import (
    check_rngs,
    check_shape,
    random_matrix,
    read_value,
    wrap_value,
)
from jax_nvfp4_moe.numerics.activations import ActivationCall, find_activation
from jax_nvfp4_moe.numerics.routing import Router, weigh
from jax_nvfp4_moe.numerics.tensor import (
    DenseExperts,
    MoEParams,
    check_sizes,
    quantize,
    quantize_experts,
)
from jax_nvfp4_moe.ops.dense import dense
from jax_nvfp4_moe.ops.gating import add_gated, add_linear_gated
from jax_nvfp4_moe.ops.routing import route
from jax_nvfp4_moe.parallel import find_expert_mesh, share_rows
from jax_nvfp4_moe.parallel.expert_mesh import check_context, replicate
from jax_nvfp4_moe.parallel.tensor_parallel import run_by_rows
from jax_nvfp4_moe.scheme import CheckpointScheme, Scheme, Target


class RouterCorrection(nnx.Variable):
    """A bias on the router's scores that changes which experts are chosen, but not their weights.

    Load balancing sets it during training. It is not an `nnx.Param`, so optimizers skip it.
    """


class TokenExperts(nnx.Variable):
    """The experts of each token id, for a router that only weighs them.

    It is not an `nnx.Param`, so optimizers skip it.
    """


class LatentProjections(nnx.Module):
    """Modules around the routed experts, such as projections to experts narrower than the tokens.

    They may also be norms, with ``l = h``.

    Attributes:
      width: static int, the width l that the routed experts see.
      down: module that maps ``[..., h]`` to ``[..., l]``.
      up: module that maps ``[..., l]`` to ``[..., h]``.
    """

    def __init__(self, width: int, down: Callable[..., Any], up: Callable[..., Any]):
        """Hold the two projections.

        Args:
          width: the width l that the routed experts see.
          down: module that maps ``[..., h]`` to ``[..., l]``.
          up: module that maps ``[..., l]`` to ``[..., h]``.
        """
        self.width, self.down, self.up = width, down, up


class NVFP4MoE(nnx.Module):
    """A mixture-of-experts block: router, routed experts, shared experts and latent projections.

    With ``shared(x) = sigmoid(shared_gate(x)) * shared_experts(x)``::

      expert_ids, expert_weights = route(x)
      y = latent.up(experts(latent.down(x), expert_ids, expert_weights)) + shared(x)

    The shared experts, their gate and the latent projections are optional, and so are the norm and
    the factors of the router. The routed experts are NVFP4. A checkpoint that mixes formats may
    also store them in FP8 or leave them unquantized.

    Quantized weights are stored as `NVFP4Param`, which is not an `nnx.Param`, so optimizers skip
    them. Gradients flow to the input and to the router.

    Attributes:
      experts: `nn.experts.RoutedExperts`. ``moe.experts(x, expert_ids, expert_weights)`` runs the
        routed experts alone. If the block has latent projections, `x` has the latent width.
      router_weight: `nnx.Param` ``[e, h]``. Router logits are computed in float32.
      router_bias: `RouterCorrection` ``[e]``, or None.
      router_logit_bias: `nnx.Param` ``[e]``, or None.
      router_norm: module, or None; see the constructor.
      router_scale: `nnx.Param` ``[e]``, or None.
      token_experts: `TokenExperts` ``[v, k]``, or None.
      shared_experts: module, or None; see the constructor.
      shared_gate: module, or None; see the constructor.
      latent: `LatentProjections`, or None.
      router: static `numerics.routing.Router`, which says how tokens choose experts.
      target: static `Target`, the device that the block was made for.
      dtype: static dtype of the result; inputs are cast to it.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jax_nvfp4_moe as nvfp4
      >>> moe = nvfp4.NVFP4MoE(8, 64, 32, top_k=2, rngs=nnx.Rngs(0))
      >>> x = jnp.ones((5, 64), jnp.bfloat16)
      >>> moe(x).shape
      (5, 64)
      >>> expert_ids, expert_weights = moe.route(x)
      >>> moe.experts(x, expert_ids, expert_weights).shape
      (5, 64)

    Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated
    Mixture-of-Experts Layer", arXiv:1701.06538; for shared experts DeepSeekMoE, arXiv:2401.06066.
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
        router_norm: Callable | None = None,
        router_scale: Float[Array, " e"] | None = None,
        token_experts: Int32[Array, "v k"] | None = None,
        shared_experts: Callable | None = None,
        shared_gate: Callable | None = None,
        latent: LatentProjections | None = None,
        checkpoint_scheme: CheckpointScheme | str = Scheme.W4A16,
        scheme: Scheme | str | None = None,
        target: Target | None = None,
        backend: str | Sequence[str] | None = None,
        dtype=jnp.bfloat16,
        mesh: Mesh | None = None,
        axis_names: Mapping[str, str] | None = None,
        dispatch: str = "psum",
        capacity: int | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        """Make a block of `num_experts` experts.

        Args:
          num_experts: number of routed experts, e.
          hidden: width of the tokens, h; a multiple of 16.
          intermediate: width between the two products of an expert, i; a multiple of 16.
          top_k: number of experts per token; short for ``router=Router(top_k)``. Pass either
            `top_k` or `router`.
          router: `Router` that says how tokens choose experts.
          activation: name of a row of `numerics.activations.ACTIVATIONS`, or the result of
            `find_activation`, which can change the parameters of a row. Defaults to "silu".
          params: weights of the routed experts. `MoEParams` (NVFP4) in any layout, or
            `DenseExperts` (FP8 or unquantized). None draws random NVFP4 weights from `rngs`.
          router_weight: float array ``[e, h]``. None draws random values from `rngs`.
          router_bias: float array ``[e]``, added to the scores when experts are chosen, but not
            part of their weights (``e_score_correction_bias``). Defaults to None.
          router_logit_bias: float array ``[e]``, added to the logits, so that it affects both the
            choice and the weights (gpt-oss). Defaults to None.
          router_norm: module that maps ``x [..., h]`` to ``[..., h]``, which the router reads in
            place of `x`. Defaults to None.
          router_scale: float array ``[e]``, by which the weight of each chosen expert is multiplied
            at the end (Gemma 4). Defaults to None.
          token_experts: int32 ``[v, k]``, the experts of each token id (DeepSeek-V4). Calls then
            take token ids, and the router computes the weights of these experts alone. None, the
            default, lets the router choose experts.
          shared_experts: module that maps ``x [..., h]`` to ``[..., h]``, added to the routed
            experts. Defaults to None.
          shared_gate: module that maps ``x [..., h]`` to ``[..., 1]``. Its sigmoid multiplies the
            output of `shared_experts`. Defaults to None.
          latent: `LatentProjections`, if the routed experts are narrower than `hidden`. Defaults to
            None.
          checkpoint_scheme: the scheme that the checkpoint declares for the experts. "w4a16" (the
            default) or "w4a4" with `MoEParams`; an `FP8ActivationScaling` or None (unquantized)
            with `DenseExperts`.
          scheme: the scheme to run. None chooses from `checkpoint_scheme` and the device;
            "checkpoint" takes `checkpoint_scheme`; otherwise a `Scheme` or its name.
          target: the device to run on. None takes the devices of `mesh`, or JAX's default device.
          backend: name of a backend, or a sequence of names to try in order. None chooses the first
            backend that can run the experts.
          dtype: dtype of the result, to which inputs are cast: bfloat16 (the default), float16 or
            float32.
          mesh: `jax.sharding.Mesh` with at least one of the axes `expert`, `tensor` and `data`. The
            routed experts are distributed along `expert`, and each expert is divided along
            `tensor`; see `parallel.experts`. Tokens are divided along `data`. The router is
            replicated, and so is everything along further axes. None runs on one device.
          axis_names: names of the axes of `mesh` that are called something else, such as
            ``{"expert": "ep", "tensor": "tp", "data": "dp"}``. Defaults to None.
          dispatch: how tokens reach their experts over `mesh`; see `parallel.dispatch`. With "psum"
            (the default), every device runs its own experts on all tokens, and the results are
            summed. With "all_to_all", or "ragged" on GPUs, the tokens are divided along `expert`
            and sent to their experts.
          capacity: largest number of rows that one shard sends to another in one round of
            "all_to_all". None sends all rows in one round.
          rngs: source of random weights, from its stream "params". Required if `params` or
            `router_weight` is None. `nnx.bridge.to_linen` passes its own.

        Raises:
          ValueError: shapes disagree, an argument is unknown, or a required weight and `rngs` are
            both None. Also if `mesh` does not divide the sizes or lacks the axis that `dispatch`
            needs.
          NoBackendError: no backend can run the experts; the message lists the reason of each.
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
            target = target or find_expert_mesh(mesh, axis_names).target
        self.target = target or Target.current()
        self.experts: RoutedExperts = make_experts(
            params,
            options,
            checkpoint_scheme=checkpoint_scheme,
            scheme=scheme,
            target=self.target,
            backend=backend,
            mesh=mesh,
            axis_names=axis_names,
        )
        if router_weight is None:
            router_weight = random_matrix((num_experts, hidden), rngs).astype(self.dtype)
        check_shape("router_weight", router_weight.shape, (num_experts, hidden))
        each = {
            "router_bias": router_bias,
            "router_logit_bias": router_logit_bias,
            "router_scale": router_scale,
        }
        for name, values in each.items():
            check_shape(name, (num_experts,) if values is None else values.shape, (num_experts,))
        if token_experts is not None:
            shape = (token_experts.shape[0], self.router.top_k)
            check_shape("token_experts", token_experts.shape, shape)
            each["token_experts"] = token_experts
        if (expert_mesh := self.experts.expert_mesh) is not None:
            router_weight = replicate(router_weight, expert_mesh)
            each = replicate(each, expert_mesh)
        self.router_weight = nnx.Param(router_weight)
        self.router_bias = wrap_value(RouterCorrection, each["router_bias"])
        self.router_logit_bias = wrap_value(nnx.Param, each["router_logit_bias"])
        self.router_scale = wrap_value(nnx.Param, each["router_scale"])
        self.token_experts = wrap_value(TokenExperts, each.get("token_experts"))
        self.router_norm = router_norm
        self.shared_experts, self.shared_gate = shared_experts, shared_gate
        self.latent = latent

    @property
    def scheme(self) -> Scheme | None:
        """The scheme that the NVFP4 experts run; None if the experts are not NVFP4."""
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

        Flax stores kernels as ``[inputs, outputs]`` and computes ``x @ kernel``. NVFP4 matrices are
        ``[outputs, inputs]``, so this method transposes the kernels. It quantizes the experts like
        `quantize_experts` and keeps the router unquantized.

        Args:
          gate: ``[e, h, i]`` in any float dtype, or None if the activation is not gated.
          up: ``[e, h, i]`` in any float dtype; h and i are multiples of 16.
          down: ``[e, i, h]`` in any float dtype.
          router_kernel: ``[h, e]`` in any float dtype.
          **options: keyword arguments of the constructor other than `params` and `router_weight`,
            such as `top_k`.

        Returns:
          An `NVFP4MoE` of e experts, with ``hidden = h`` and ``intermediate = i``.

        Raises:
          ValueError: shapes disagree, or h or i is not a multiple of 16. Also the errors of the
            constructor.
          NoBackendError: no backend can run the experts.

        Example:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> import jax_nvfp4_moe as nvfp4
          >>> keys = jax.random.split(jax.random.key(0), 4)
          >>> gate, up = (jax.random.normal(key, (8, 64, 32)) for key in keys[:2])
          >>> down = jax.random.normal(keys[2], (8, 32, 64))
          >>> router_kernel = jax.random.normal(keys[3], (64, 8))
          >>> moe = nvfp4.NVFP4MoE.from_dense(gate, up, down, router_kernel, top_k=2)
          >>> moe(jnp.ones((5, 64), jnp.bfloat16)).shape
          (5, 64)
        """
        kernels = {"gate": gate, "up": up, "down": down, "router_kernel": router_kernel}
        shapes = {name: jnp.shape(array) for name, array in kernels.items() if array is not None}
        if len(shapes["up"]) != 3:
            raise ValueError(
                f"up: expected three axes, [experts, inputs, outputs]; got shape {shapes['up']}"
            )
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
        self, x: Float[Array, "... h"], token_ids: Int32[Array, "..."] | None = None
    ) -> tuple[Int32[Array, "... k"], Float[Array, "... k"]]:
        """Choose the experts of each token.

        The logits are ``router_norm(x) @ router_weight.T + router_logit_bias`` in float32.
        `numerics.routing.route` turns them into experts and weights, which `router_scale`
        multiplies. The argument `backend` of the constructor applies to the experts, not to the
        router.

        Args:
          x: tokens ``[..., h]``; cast to the module's dtype.
          token_ids: int32 ``[...]``, the ids of the tokens. Required if the block has
            `token_experts`, and otherwise not used. Defaults to None.

        Returns:
          Expert ids, int32 ``[..., k]``, best expert first, and their weights, float32
          ``[..., k]``.

        Raises:
          ValueError: the block has `token_experts`, and `token_ids` is None or has another shape.
        """
        with jax.named_scope("router"):
            given = self._find_experts(x, token_ids)
            rows = x.reshape(-1, x.shape[-1]).astype(self.dtype)
            if self.router_norm is not None:
                rows = self.router_norm(rows)
            parts = (
                self.router_weight,
                self.router_bias,
                self.router_logit_bias,
                self.router_scale,
            )
            run, values = self._route_rows, [read_value(part) for part in parts]
            check_context(values[0])
            expert_mesh = self.experts.expert_mesh
            if expert_mesh is not None and self.experts.options.dispatch != "psum":
                run = functools.partial(share_rows, run, expert_mesh)
            ids, weights = run((rows, given), *values)
            lead = (*x.shape[:-1], self.router.top_k)
            return ids.reshape(lead), weights.reshape(lead)

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

    def _route_rows(self, rows, weight, bias, logit_bias, scale):
        """Choose the experts of `rows`: tokens ``[t, h]``, and their experts if they are known.

        On a GPU, bfloat16 rows are not cast: tensor cores multiply them exactly, by bfloat16 or
        float32 weights, and sum in float32. On a CPU they are cast to float32, because XLA's
        bfloat16 dot has up to twice the error of its float32 dot.
        """
        rows, given = rows
        if not (rows.dtype == jnp.bfloat16 and self.target.platform == "cuda"):
            rows, weight = rows.astype(jnp.float32), weight.astype(jnp.float32)
        logits = dense(rows, weight, bias=logit_bias, target=self.target)
        if given is None:
            ids, weights = route(self.router, logits, bias, target=self.target)
        else:
            ids, weights = given, weigh(self.router, logits, given)
        return ids, weights if scale is None else weights * scale.astype(jnp.float32)[ids]

    def __call__(
        self, x: Float[Array, "... h"], token_ids: Int32[Array, "..."] | None = None
    ) -> Float[Array, "... h"]:
        """Run the whole block: router, routed experts, shared experts and latent projections.

        Args:
          x: tokens ``[..., h]``; cast to the module's dtype.
          token_ids: as for `route`.

        Returns:
          ``[..., h]`` in the module's dtype.
        """
        x = x.astype(self.dtype)
        chosen = self.route(x) if token_ids is None else self.route(x, token_ids)
        own = x
        if self.experts.expert_mesh is not None:
            # Without the barrier, XLA of jax 0.10 merges the first GEMM of the shared experts with
            # the GEMM of the router. It could then no longer overlap with the all-reduce, or the
            # combine, of the routed experts.
            own, chosen = jax.lax.optimization_barrier((x, chosen))
        if self.latent is None:
            y = self.experts(x, *chosen)
        else:
            inner = self.experts(self._beside_experts(self.latent.down, x), *chosen)
            y = self._beside_experts(self.latent.up, inner).astype(self.dtype)
        if self.shared_experts is None:
            return y
        # Over a mesh the arrays are sharded, and a call of a kernel would gather them.
        on_mesh = self.experts.expert_mesh is not None
        plain_gate = None if on_mesh else self._find_plain_gate()
        with jax.named_scope("shared_experts"):
            shared = self._beside_experts(self.shared_experts, own).astype(self.dtype)
            if plain_gate is not None:
                record(plain_gate, own)  # as the call of the module would
                weight = plain_gate.weight.get_value().reshape(-1)
                return add_linear_gated(y, own, weight, shared, target=self.target)
            gate = None if self.shared_gate is None else self.shared_gate(own).astype(self.dtype)
        return add_gated(
            y, gate, shared, target=self.target, backend="reference" if on_mesh else None
        )

    def _find_plain_gate(self):
        """Return the gate if `add_linear_gated` can compute it from its weight, or None."""
        gate = self.shared_gate
        if not isinstance(gate, DenseLinear) or gate.bias is not None or gate.dtype != self.dtype:
            return None
        return gate if gate.weight.get_value().shape[0] == 1 else None

    def _beside_experts(self, module, x):
        """Return ``module(x)``; if dispatch divides the tokens, each device runs its own tokens."""
        expert_mesh = self.experts.expert_mesh
        if (
            expert_mesh is None
            or expert_mesh.expert == 1
            or self.experts.options.dispatch == "psum"
        ):
            return module(x)
        return run_by_rows(module, expert_mesh, x)


def _one_router(top_k, router):
    """Return `router`, or the router that `top_k` stands for."""
    if (top_k is None) == (router is None):
        raise ValueError(
            "router: expected one of top_k and router, and None for the other; "
            f"got {top_k} and {router}"
        )
    return Router(top_k) if router is None else router


def _transpose(kernel):
    """Return kernels ``[e, inputs, outputs]`` as ``[e, outputs, inputs]``; None stays None."""
    return None if kernel is None else jnp.swapaxes(jnp.asarray(kernel), 1, 2)


def _fresh_experts(num_experts, hidden, intermediate, row, rngs):
    """Return random experts in NVFP4.

    Gate and up get a global scale each, as in exported checkpoints. If their rows alternate, a
    matrix can have only one global scale, so both share it.
    """
    first = random_matrix((num_experts, 2 if row.gated else 1, intermediate, hidden), rngs)
    down = random_matrix((num_experts, hidden, intermediate), rngs)
    if row.interleaved:
        return MoEParams(quantize(first.reshape(num_experts, -1, hidden)), quantize(down))
    return quantize_experts(first[:, 0] if row.gated else None, first[:, -1], down)
