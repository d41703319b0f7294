"""NVFP4MoE: a mixture-of-experts block whose routed experts are stored in NVFP4."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from jax_nvfp4_moe.nn.experts.routed_experts import (
    ExpertOptions,
    RoutedExperts,
    check_tokens,
    make_experts,
    quantize_kernels,
)
from jax_nvfp4_moe.nn.experts.token_router import TokenRouter, check_parts, one_router
from jax_nvfp4_moe.nn.intermediates import record
from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear
from jax_nvfp4_moe.nn.random_weights import check_rngs, random_matrix
from jax_nvfp4_moe.numerics.activations import ActivationCall, find_activation
from jax_nvfp4_moe.numerics.arguments import check_kind, check_size
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.numerics.routing import Router
from jax_nvfp4_moe.numerics.tensor import (
    DenseExperts,
    MoEParams,
    check_sizes,
    quantize,
    quantize_experts,
)
from jax_nvfp4_moe.ops.gating import add_gated, add_linear_gated
from jax_nvfp4_moe.parallel import find_expert_mesh, share_rows
from jax_nvfp4_moe.parallel.expert_mesh import (
    TENSOR,
    ExpertMesh,
    check_context,
    left_apart,
    replicate,
)
from jax_nvfp4_moe.parallel.tensor_parallel import TensorParallel, run_by_rows
from jax_nvfp4_moe.scheme import CheckpointScheme, Scheme, Target


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

    The router, the shared experts, their gate and the latent projections are optional. The routed
    experts are NVFP4. A checkpoint that mixes formats may also store them in FP8 or leave them
    unquantized.

    Quantized weights are stored as `NVFP4Param`, which is not an `nnx.Param`, so optimizers skip
    them. Gradients flow to the input and to the router.

    Attributes:
      experts: `RoutedExperts`. ``moe.experts(x, expert_ids, expert_weights)`` runs the routed
        experts alone. If the block has latent projections, `x` has the latent width.
      token_router: `nn.TokenRouter`, a module of your own, or None; see the constructor. You may
        replace it.
      shared_experts: module, or None; see the constructor.
      shared_gate: module, or None; see the constructor.
      latent: `LatentProjections`, or None.
      target: static `Target`, the device that the block was made for.
      dtype: static dtype of the result; inputs are cast to it.
      hidden: static width of the tokens, h.
      projection_names: static `ProjectionNames` of a block that was loaded alone, else None.

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
      >>> moe.router_logits(x).shape
      (5, 8)

    Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated
    Mixture-of-Experts Layer", arXiv:1701.06538; for shared experts DeepSeekMoE, arXiv:2401.06066.
    """

    projection_names: Any = None

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        *,
        top_k: int | None = None,
        router: Router | None = None,
        token_router: Callable | None = None,
        use_router: bool = True,
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
        checkpoint_scheme: CheckpointScheme | str = None,
        scheme: Scheme | str | None = None,
        target: Target | None = None,
        backend: str | Sequence[str] | None = None,
        dtype=jnp.bfloat16,
        param_dtype=jnp.float32,
        mesh: Mesh | ExpertMesh | None = None,
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
            `top_k` or `router`, unless `token_router` says how tokens choose experts.
          router: `Router` that says how tokens choose experts.
          token_router: `nn.TokenRouter`, or a module of your own that maps tokens ``[..., h]`` to
            expert ids and expert weights, both ``[..., k]``. None makes an `nn.TokenRouter` from
            the arguments whose names begin with ``router``, and from `token_experts`.
          use_router: whether the block has a router. Without one, call
            ``moe.experts(x, expert_ids, expert_weights)``. Defaults to True.
          activation: name of a row of `numerics.activations.ACTIVATIONS`, or the result of
            `find_activation`, which can change the parameters of a row. Defaults to "silu".
          params: weights of the routed experts. `MoEParams` (NVFP4) in any layout, or
            `DenseExperts` (FP8 or unquantized). None draws random NVFP4 weights from `rngs`.
          router_weight: float array ``[e, h]``, which keeps its dtype. None draws random values
            from `rngs`.
          router_bias: the `correction_bias` of `nn.TokenRouter`. Defaults to None.
          router_logit_bias: its `logit_bias`. Defaults to None.
          router_norm: its `norm`. Defaults to None.
          router_scale: its `scale`. Defaults to None.
          token_experts: its `token_experts`. Calls then take token ids. Defaults to None.
          shared_experts: module that maps ``x [..., h]`` to ``[..., h]``, added to the routed
            experts. Defaults to None.
          shared_gate: module that maps ``x [..., h]`` to ``[..., 1]``. Its sigmoid multiplies the
            output of `shared_experts`. Defaults to None.
          latent: `LatentProjections`, if the routed experts are narrower than `hidden`. Defaults to
            None.
          checkpoint_scheme: the scheme that the checkpoint declares for the experts. "w4a16" or
            "w4a4" with `MoEParams`, where None (default) means "w4a4" if `scheme` is "w4a4" and
            they have input scales, and "w4a16" otherwise. An `FP8ActivationScaling` or None
            (unquantized) with `DenseExperts`.
          scheme: the scheme to run. None chooses from `checkpoint_scheme` and the device;
            "checkpoint" takes `checkpoint_scheme`; otherwise a `Scheme` or its name.
          target: the device to run on. None takes the devices of `mesh`, or JAX's default device.
          backend: name of a backend, or a sequence of names to try in order. None chooses the first
            backend that can run the experts.
          dtype: dtype of the result, to which inputs are cast: bfloat16 (the default), float16 or
            float32.
          param_dtype: dtype of a random router weight. Defaults to float32.
          mesh: `jax.sharding.Mesh` with at least one of the axes `expert`, `tensor` and `data`. The
            routed experts are distributed along `expert`, and each expert is sharded along
            `tensor`; see `parallel.experts`. Tokens are sharded along `data`. The router is
            replicated, and so is everything along further axes. Or what `parallel.connect_peers`
            returned. None runs on one device.
          axis_names: names of the axes of `mesh` that are called something else, such as
            ``{"expert": "ep", "tensor": "tp", "data": "dp"}``. Defaults to None.
          dispatch: how tokens reach their experts over `mesh`; see `parallel.dispatch`. With "psum"
            (the default), every device runs its own experts on all tokens, and the results are
            summed. With "all_to_all", or "ragged" on GPUs, the tokens are sharded along `expert`
            and sent to their experts.
          capacity: largest number of rows that one shard sends to another in one round of
            "all_to_all". None sends all rows in one round.
          rngs: source of random weights, from its stream "params". Required if `params` is None, or
            if a router is made and `router_weight` is None. `nnx.bridge.to_linen` passes its own.

        Raises:
          TypeError: an argument has a wrong type.
          ValueError: shapes disagree, an argument is unknown, or a required weight and `rngs` are
            both None. Also if the router chooses more experts than there are, if `mesh` does not
            divide the sizes or lacks the axis that `dispatch` needs, or if `dispatch` is "ragged"
            on CPUs.
          NoBackendError: no backend can run the experts; the message lists the reason of each.
        """
        check_size("num_experts", num_experts)
        check_kind("router", router, Router, type(None))
        given = {
            "router_weight": router_weight,
            "router_bias": router_bias,
            "router_logit_bias": router_logit_bias,
            "router_norm": router_norm,
            "router_scale": router_scale,
            "token_experts": token_experts,
        }
        makes_router = use_router and token_router is None
        rule = _find_rule(top_k, router, token_router, use_router, given, num_experts)
        call = find_activation(activation)
        options = ExpertOptions(rule.top_k, call, rule.weight_on_input, dtype, dispatch, capacity)
        self.dtype, self.hidden = options.dtype, hidden
        width = hidden if latent is None else latent.width
        drawn = {"router_weight": router_weight} if makes_router else {}
        check_rngs(rngs, params=params, **drawn)
        check_kind("target", target, Target, type(None))
        block = 1 if isinstance(params, DenseExperts) else BLOCK
        check_size("hidden", hidden, block if latent is None else 1)
        check_size("latent.width", width, block)
        check_size("intermediate", intermediate, block)
        if params is None:
            params = _fresh_experts(num_experts, width, intermediate, call.row, rngs)
        check_kind("params", params, MoEParams, DenseExperts)
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
        if makes_router:
            how = {"target": self.target, "dtype": self.dtype, "param_dtype": param_dtype}
            token_router = _make_router(num_experts, hidden, rule, given, rngs=rngs, **how)
        self.token_router: Any = nnx.data(token_router)
        if self.experts.expert_mesh is not None and token_router is not None:
            whole = replicate(nnx.state(token_router), self.experts.expert_mesh)
            nnx.update(token_router, whole)
        self.shared_experts, self.shared_gate = shared_experts, shared_gate
        self.latent = latent

    @property
    def scheme(self) -> Scheme | None:
        """The scheme that the NVFP4 experts run; None if the experts are not NVFP4."""
        return self.experts.scheme

    @classmethod
    def from_dense(
        cls,
        gate: Float[Array, "e h n"] | None,
        up: Float[Array, "e h i"] | None,
        down: Float[Array, "e i h"],
        router_kernel: Float[Array, "h e"] | None,
        **options: Any,
    ) -> "NVFP4MoE":
        """Quantize the kernels of a mixture of experts as Flax models store them.

        Flax stores kernels as ``[inputs, outputs]`` and computes ``x @ kernel``. NVFP4 matrices are
        ``[outputs, inputs]``, so this method transposes the kernels. It quantizes the experts like
        `quantize_experts` and keeps the router unquantized.

        Args:
          gate: ``[e, h, i]`` in any float dtype, or None if the activation is not gated. If `up` is
            None, gate and up in one kernel: ``[e, h, 2i]``. All gate columns then come before all
            up columns, or they alternate if the activation is "swigluoai".
          up: ``[e, h, i]`` in any float dtype, or None; h and i are multiples of 16.
          down: ``[e, i, h]`` in any float dtype.
          router_kernel: ``[h, e]`` in any float dtype, which is stored in `param_dtype`. None makes
            a block without a router, or with the one that you pass as `token_router`. Without a
            router, call ``moe.experts(x, expert_ids, expert_weights)``.
          **options: keyword arguments of `quantize_experts`, such as ``algorithm="search"``,
            `gate_up_bias` or `down_input_scale`. Also those of the constructor other than `params`
            and `router_weight`, such as `top_k`.

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
          >>> moe = nvfp4.NVFP4MoE.from_dense(
          ...     gate, up, down, router_kernel, top_k=2, algorithm="search"
          ... )
          >>> moe(jnp.ones((5, 64), jnp.bfloat16)).shape
          (5, 64)
        """
        params, options = quantize_kernels(gate, up, down, options)
        e, h, i = params.num_experts, params.hidden, params.intermediate
        if router_kernel is None:
            options = {"use_router": "token_router" in options} | options
        else:
            weight = jnp.asarray(router_kernel, options.get("param_dtype", jnp.float32)).T
            if weight.shape != (e, h):
                raise ValueError(
                    f"router_kernel: expected shape {(h, e)} to go with down {(e, i, h)}, inputs "
                    f"before outputs as in Flax; got {weight.T.shape}"
                )
            options["router_weight"] = weight
        return cls(e, h, i, params=params, **options)

    @property
    def router(self) -> Router | None:
        """The static rule of `token_router`; None if it has none, as a module of your own."""
        return _rule_of(self.token_router)

    def route(
        self, x: Float[Array, "... h"], token_ids: Int32[Array, "..."] | None = None
    ) -> tuple[Int32[Array, "... k"], Float[Array, "... k"]]:
        """Choose the experts of each token, as `token_router` does.

        The argument `backend` of the constructor applies to the experts, not to the router.

        Args:
          x: tokens ``[..., h]``; cast to the module's dtype.
          token_ids: int32 ``[...]``, the ids of the tokens. Required if the router has
            `token_experts`, and otherwise not used. Defaults to None.

        Returns:
          Expert ids, int32 ``[..., k]``, best expert first, and their weights, float32
          ``[..., k]``.

        Raises:
          TypeError: `x` is no array.
          ValueError: the block has no router, or the width of `x` is not h. Also if the router has
            `token_experts`, and `token_ids` is None or has another shape.
        """
        self._check_tokens(x)
        with jax.named_scope("router"):
            router, expert_mesh = self._own_router(), self.experts.expert_mesh
            given = (x,) if token_ids is None else (x, token_ids)
            if expert_mesh is None or self.experts.options.dispatch == "psum":
                return router(*given)
            return _route_by_rows(router, expert_mesh, given)

    def _check_tokens(self, x):
        """Check that `x` is an array of tokens ``[..., h]``."""
        check_tokens("x", x, self.hidden)

    def router_logits(self, x: Float[Array, "... h"]) -> Float[Array, "... e"]:
        """Return the logits of all experts, such as for an auxiliary loss that balances them.

        Args:
          x: tokens ``[..., h]``; cast to the module's dtype.

        Returns:
          float32 ``[..., e]``, before the correction bias.

        Raises:
          ValueError: the block has no router.
        """
        return self._own_router().logits(x)

    def _own_router(self) -> Any:
        """Return `token_router`, after a check that there is one that can be called here."""
        if self.token_router is None:
            raise ValueError(
                "token_router: expected a router, but this block was made without one. Call "
                "moe.experts(x, expert_ids, expert_weights), or set moe.token_router"
            )
        check_context(jax.tree.leaves(self.experts.params.get_value())[0])
        return self.token_router

    def __call__(
        self, x: Float[Array, "... h"], token_ids: Int32[Array, "..."] | None = None
    ) -> Float[Array, "... h"]:
        """Run the whole block: router, routed experts, shared experts and latent projections.

        Args:
          x: tokens ``[..., h]``; cast to the module's dtype.
          token_ids: as for `route`.

        Returns:
          ``[..., h]`` in the module's dtype.

        Raises:
          TypeError: `x` is no array.
          ValueError: the width of `x` is not h. Also the errors of `route`.
        """
        self._check_tokens(x)
        x = x.astype(self.dtype)
        chosen = self.route(x) if token_ids is None else self.route(x, token_ids)
        own, on_mesh = x, self._spans_devices
        if on_mesh:
            # Without the barrier, XLA of jax 0.10 merges the first GEMM of the shared experts with
            # the GEMM of the router. It could then no longer overlap with the all-reduce, or the
            # combine, of the routed experts.
            own, chosen = jax.lax.optimization_barrier((x, chosen))
        together = self._mesh_of_one_sum
        with left_apart(together is not None):
            y = self._run_routed(x, chosen)
        if self.shared_experts is None:
            return y
        # Over a mesh the arrays are sharded, and a call of a kernel would gather them.
        plain_gate = None if on_mesh else self._find_plain_gate()
        with jax.named_scope("shared_experts"):
            with left_apart(together is not None):
                shared = self._on_own_tokens(self.shared_experts, own).astype(self.dtype)
            if plain_gate is not None:
                record(plain_gate, own)  # as the call of the module would
                weight = plain_gate.weight.get_value().reshape(-1)
                y = add_linear_gated(y, own, weight, shared, target=self.target)
            else:
                gate = self.shared_gate
                gate = None if gate is None else gate(own).astype(self.dtype)
                backend = "reference" if on_mesh else None
                y = add_gated(y, gate, shared, target=self.target, backend=backend)
        return y if together is None else together.add_up(y, TENSOR)

    def _run_routed(self, x, chosen):
        """Return the result of the routed experts, with the latent projections around them."""
        if self.latent is None:
            return self.experts(x, *chosen)
        inner = self.experts(self._on_own_tokens(self.latent.down, x), *chosen)
        return self._on_own_tokens(self.latent.up, inner).astype(self.dtype)

    @property
    def _mesh_of_one_sum(self) -> ExpertMesh | None:
        """The mesh whose devices add up routed and shared experts together, or None.

        Each device then has a term of both. The gate of the shared experts is the same on all
        devices. Along `expert`, devices share the routed experts alone.
        """
        mesh, shared = self.experts.expert_mesh, self.shared_experts
        if mesh is None or not mesh.is_inside or mesh.expert > 1 or self.latent is not None:
            return None
        if not isinstance(shared, TensorParallel) or shared.expert_mesh is None:
            return None
        return mesh if type(shared).finish is TensorParallel.finish else None

    @property
    def _spans_devices(self):
        """Whether the block runs on a mesh, and not in the program of one of its devices."""
        expert_mesh = self.experts.expert_mesh
        return expert_mesh is not None and not expert_mesh.is_inside

    def _find_plain_gate(self):
        """Return the gate if `add_linear_gated` can compute it from its weight, or None."""
        gate = self.shared_gate
        if not isinstance(gate, DenseLinear) or gate.dtype != self.dtype:
            return None
        if gate.bias is not None or gate.adapter is not None:
            return None
        return gate if gate.weight.get_value().shape[0] == 1 else None

    def _on_own_tokens(self, module, x):
        """Return ``module(x)``; if dispatch shards the tokens, each device runs its own tokens."""
        expert_mesh = self.experts.expert_mesh
        if (
            expert_mesh is None
            or expert_mesh.expert == 1
            or self.experts.options.dispatch == "psum"
        ):
            return module(x)
        return run_by_rows(module, expert_mesh, x)


def _rule_of(token_router) -> Router | None:
    """Return the rule of a router; None if it is a module that has none, or if there is none."""
    rule = getattr(token_router, "router", None)
    return rule if isinstance(rule, Router) else None


# Argument of `TokenRouter` -> the argument of `NVFP4MoE` that stands for it.
_ROUTER_PARTS = {
    "weight": "router_weight",
    "correction_bias": "router_bias",
    "logit_bias": "router_logit_bias",
    "scale": "router_scale",
    "token_experts": "token_experts",
}


def _find_rule(top_k, router, token_router, use_router, given, num_experts) -> Router:
    """Return the rule of the router, of which the experts need the number of experts per token.

    Raises:
      ValueError: arguments of the router contradict each other.
    """
    if use_router and token_router is None:
        return one_router(top_k, router, num_experts)
    extra = [name for name, value in given.items() if value is not None]
    if extra or (token_router is not None and not use_router):
        raise ValueError(
            f"{', '.join(extra) or 'token_router'}: expected None, because "
            + ("use_router is False" if not use_router else "token_router has these parts itself")
        )
    rule = _rule_of(token_router)
    if rule is not None:
        if (top_k, router) != (None, None):
            raise ValueError(
                "top_k, router: expected None, because token_router has a rule of its own; got "
                f"{top_k} and {router}"
            )
        return rule
    if token_router is None and (top_k, router) == (None, None):
        return Router(1)
    return one_router(top_k, router, num_experts)


def _make_router(num_experts, hidden, rule, given, **how) -> TokenRouter:
    """Return the router of the arguments `given`, with messages that name those arguments."""
    parts = {part: given[name] for part, name in _ROUTER_PARTS.items()}
    check_parts(parts, num_experts, hidden, rule, _ROUTER_PARTS)
    how |= {"norm": given["router_norm"]}
    return TokenRouter(num_experts, hidden, router=rule, **parts, **how)


def _route_by_rows(router, expert_mesh, given):
    """Return ``router(*given)``; each device computes the rows that dispatch gives it."""
    lead = given[0].shape[:-1]
    rows = [part.reshape(math.prod(lead), *part.shape[len(lead) :]) for part in given]
    leaves, tree = jax.tree.flatten(router)

    def run(rows, *leaves):
        return tree.unflatten(leaves)(*rows)

    found = share_rows(run, expert_mesh, rows, *leaves)
    return tuple(part.reshape(*lead, part.shape[-1]) for part in found)


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


def expert_blocks(model: nnx.Module) -> Iterator[tuple[str, NVFP4MoE]]:
    """Yield each expert block with its path, such as "layers.3.mlp", in the order of the layers."""
    found = [(path, part) for path, part in nnx.iter_modules(model) if isinstance(part, NVFP4MoE)]
    # Layer indices are compared as numbers. As text, layer 10 would come before layer 2.
    for path, block in sorted(found, key=lambda pair: [(isinstance(p, str), p) for p in pair[0]]):
        yield ".".join(map(str, path)), block


def experts_path(block: str) -> str:
    """Return the path of the routed experts in the block at the path `block`."""
    return f"{block}.experts" if block else "experts"
