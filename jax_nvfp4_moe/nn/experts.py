"""The routed experts of one layer: NVFP4, FP8 or not quantized; on one device or over a mesh."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.backends.resolution import resolve_again
from jax_nvfp4_moe.nn.dense import NVFP4Param, find_activation_scaling
from jax_nvfp4_moe.nn.intermediates import record
from jax_nvfp4_moe.numerics.activations import ActivationCall
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams, check_moe_params
from jax_nvfp4_moe.ops.dense_moe import dense_moe
from jax_nvfp4_moe.ops.moe import check_dtype, check_input_scales, check_row_order, moe_mlp
from jax_nvfp4_moe.ops.preparation import convert, plan_experts
from jax_nvfp4_moe.parallel import (
    DISPATCHES,
    ExpertMesh,
    ShardedExperts,
    find_expert_mesh,
    run_dispatched,
    shard_experts,
)
from jax_nvfp4_moe.parallel.expert_mesh import EXPERT, check_row_scales
from jax_nvfp4_moe.parallel.placement import ExpertSlots, to_physical_ids
from jax_nvfp4_moe.parallel.streaming import on_shards
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Plan, Scheme, Target

AnyExperts = MoEParams | DenseExperts | ShardedExperts


@dataclasses.dataclass(frozen=True)
class ExpertOptions:
    """What the experts of a layer need to know, whatever their weights are; static.

    Attributes:
      top_k: experts of a token.
      activation: between the two products.
      weight_on_input: multiply the expert's input by its weight instead of its output (Llama-4).
      dtype: of the result; inputs are cast to it.
      dispatch, capacity: as for `NVFP4MoE`.

    Raises:
      ValueError: the dtype is not supported, or `dispatch` and `capacity` do not fit together.
    """

    top_k: int
    activation: ActivationCall
    weight_on_input: bool = False
    dtype: Any = jnp.bfloat16
    dispatch: str = "psum"
    capacity: int | None = None

    def __post_init__(self):
        """Check the fields."""
        object.__setattr__(self, "dtype", check_dtype(self.dtype))
        if self.dispatch not in DISPATCHES:
            raise ValueError(
                f"dispatch: expected one of {', '.join(DISPATCHES)}; got {self.dispatch!r}"
            )
        if self.capacity is not None and (self.dispatch != "all_to_all" or self.capacity < 1):
            raise ValueError(
                "capacity: expected None, or at least 1 with dispatch 'all_to_all'; "
                f"got {self.capacity} with {self.dispatch!r}"
            )


class RoutedTokens(NamedTuple):
    """What the experts of a layer read and give; what `nn.intermediates` records of them.

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


class RoutedExperts(nnx.Module):
    """The experts of one layer, called with tokens and the experts that each token chose.

    ``y[t] = sum_j expert_weights[t, j] * expert[expert_ids[t, j]](x[t])``

    Attributes:
      params: `NVFP4Param` of `MoEParams` in the layout of their plan, of `DenseExperts`, or of
        `ShardedExperts` of either.
      slots: `ExpertSlots`, or None. Where each expert is stored after `place_model` has replicated
        or moved it. None means that expert i is stored at index i.
      options: static `ExpertOptions`.
      scheme: static; how activations enter NVFP4 products, None for other weights.
      checkpoint_scheme: static; what the checkpoint says of the weights.
    """

    scheme: Scheme | None = None
    checkpoint_scheme: CheckpointScheme = None

    def __init__(self, params: AnyExperts, options: ExpertOptions):
        """Hold `params`, prepared and sharded already; subclasses see to both."""
        self.options = options
        self.params = NVFP4Param(params)
        self.slots: ExpertSlots | None = nnx.data(None)

    def __call__(
        self,
        x: Float[Array, "... h"],
        expert_ids: Int[Array, "... k"],
        expert_weights: Float[Array, "... k"],
    ) -> Float[Array, "... h"]:
        """Run the experts.

        Args:
          x: tokens; cast to the module's dtype, which the result has.
          expert_ids: an id of -1 or out of range contributes nothing.
          expert_weights: of the same shape.
        """
        with jax.named_scope("experts"):
            run, params = self.op(), self.params.get_value()
            if isinstance(params, ShardedExperts):
                run = functools.partial(
                    run_dispatched,
                    run,
                    dispatch=self.options.dispatch,
                    capacity=self.options.capacity,
                    scheme=self.scheme,
                    weight_on_input=self.options.weight_on_input,
                )
            ids = expert_ids.reshape(-1, expert_ids.shape[-1])
            y = run(
                x.reshape(-1, x.shape[-1]).astype(self.options.dtype),
                params,
                to_physical_ids(ids, self.slots),
                expert_weights.reshape(-1, expert_weights.shape[-1]),
            ).reshape(x.shape)
        record(self, RoutedTokens(x, expert_ids, expert_weights, y))
        return y

    def op(self) -> Callable:
        """Return the op: ``(x [t, h], params, expert_ids [t, k], expert_weights) -> [t, h]``."""
        raise NotImplementedError

    def replace_params(self, params: AnyExperts) -> None:
        """Take other weights of the same widths, such as those that `place_model` has ordered."""
        self.params = NVFP4Param(params)

    @property
    def expert_mesh(self) -> ExpertMesh | None:
        """The devices that the experts lie on; None for one device."""
        params = self.params.get_value()
        return params.expert_mesh if isinstance(params, ShardedExperts) else None


class NVFP4Experts(RoutedExperts):
    """Experts in NVFP4.

    Attributes:
      plan: static; the scheme, the kernel and the layout of `params`. The call follows it.
    """

    def __init__(
        self,
        params: AnyExperts,
        options: ExpertOptions,
        *,
        checkpoint_scheme: Scheme | str = Scheme.W4A16,
        scheme: Scheme | str | None = None,
        target: Target | None = None,
        backend: str | Sequence[str] | None = None,
        expert_mesh: ExpertMesh | None = None,
    ):
        """Plan the layer, and put `params` into the layout of its kernel.

        Args:
          params: `MoEParams` in any layout, or over a mesh already.
          options: what all experts need to know.
          checkpoint_scheme: what the checkpoint says of the weights, "w4a16" or "w4a4".
          scheme, target, backend: as for `ops.moe_mlp`.
          expert_mesh: the devices that share the experts; None for one device, or for those of
            `params`.

        Raises:
          ValueError: the weights do not go with the scheme, the activation or the mesh.
          NoBackendError: no backend fits.
        """
        if isinstance(params, ShardedExperts):
            expert_mesh = params.expert_mesh
        self.plan: Plan = plan_experts(
            params,
            checkpoint_scheme=checkpoint_scheme,
            scheme=scheme,
            target=target,
            backend=backend,
            dtype=options.dtype,
            top_k=options.top_k,
            activation=options.activation.name,
            shards=(expert_mesh.expert, expert_mesh.tensor) if expert_mesh else (1, 1),
        )
        self.scheme, self.checkpoint_scheme = self.plan.scheme, self.plan.checkpoint_scheme
        stored = params.stacked if isinstance(params, ShardedExperts) else params
        check_row_order(stored, options.activation)
        check_input_scales("params", stored, self.scheme)
        interleaved = options.activation.row.interleaved
        super().__init__(_prepare(params, self.plan, expert_mesh, interleaved), options)

    def op(self) -> Callable:
        """Return `ops.moe_mlp` with the plan that `params` were prepared for."""
        return functools.partial(
            moe_mlp,
            plan=self.plan,
            activation=self.options.activation,
            weight_on_input=self.options.weight_on_input,
        )

    def replace_params(self, params: AnyExperts) -> None:
        """Take other weights of the same widths, and plan for their number."""
        sharded = isinstance(params, ShardedExperts)
        count = params.local_experts if sharded else params.num_experts
        self.plan = resolve_again(self.plan, num_experts=count)
        mesh = params.expert_mesh if sharded else None
        self.params = NVFP4Param(_prepare(params, self.plan, mesh, False))


class FP8Experts(RoutedExperts):
    """Experts in FP8, which run as plain XLA.

    Attributes:
      activations: static; how the inputs of both products are rounded.
    """

    def __init__(
        self,
        params: AnyExperts,
        options: ExpertOptions,
        *,
        checkpoint_scheme: FP8ActivationScaling | str,
        scheme: Scheme | str | None = None,
        target: Target | None = None,
        expert_mesh: ExpertMesh | None = None,
    ):
        """Settle how activations are rounded, and lay `params` out over the mesh.

        Args:
          params: `DenseExperts`, or over a mesh already.
          options: what all experts need to know.
          checkpoint_scheme: what the checkpoint says of activations.
          scheme, target: activations are rounded where `scheme.rounds_to_fp8` says so.
          expert_mesh: as for `NVFP4Experts`.

        Raises:
          ValueError: the weights do not go with the activation or the mesh.
        """
        self.checkpoint_scheme = FP8ActivationScaling(checkpoint_scheme)
        self.activations = find_activation_scaling(self.checkpoint_scheme, scheme, target)
        super().__init__(_shard(params, expert_mesh, options, self.activations), options)

    def op(self) -> Callable:
        """Return `ops.dense_moe` with this rounding."""
        return functools.partial(
            dense_moe,
            activations=self.activations,
            activation=self.options.activation,
            weight_on_input=self.options.weight_on_input,
        )


class UnquantizedExperts(RoutedExperts):
    """Experts in a float dtype, which run as plain XLA."""

    def __init__(
        self,
        params: AnyExperts,
        options: ExpertOptions,
        *,
        expert_mesh: ExpertMesh | None = None,
    ):
        """Lay `params` out over the mesh; arguments and errors are those of `FP8Experts`."""
        super().__init__(_shard(params, expert_mesh, options, None), options)

    def op(self) -> Callable:
        """Return `ops.dense_moe`."""
        return functools.partial(
            dense_moe,
            activation=self.options.activation,
            weight_on_input=self.options.weight_on_input,
        )


def make_experts(
    params: AnyExperts,
    options: ExpertOptions,
    *,
    checkpoint_scheme: CheckpointScheme | str = Scheme.W4A16,
    scheme: Scheme | str | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
    mesh: Mesh | None = None,
) -> RoutedExperts:
    """Make the experts that `params` and `checkpoint_scheme` ask for.

    Args:
      params: `MoEParams`, or `DenseExperts` with an `FP8ActivationScaling` or None as
        `checkpoint_scheme`; or either over a mesh already.
      options: what all experts need to know.
      checkpoint_scheme, scheme, target, backend, mesh: as for `NVFP4MoE`.

    Raises:
      ValueError: `checkpoint_scheme` does not go with `params`; also as the modules.
      NoBackendError: no backend fits.
    """
    expert_mesh = None if mesh is None else find_expert_mesh(mesh)
    if isinstance(params, ShardedExperts):
        expert_mesh = params.expert_mesh
    if expert_mesh is not None:
        _check_dispatch_axis(options.dispatch, expert_mesh)
        target = target or expert_mesh.target
    stored = params.stacked if isinstance(params, ShardedExperts) else params
    dense = checkpoint_scheme is None or checkpoint_scheme in list(FP8ActivationScaling)
    if isinstance(stored, DenseExperts) != dense:
        raise ValueError(
            "checkpoint_scheme: expected an FP8ActivationScaling or None with DenseExperts alone, "
            f"got {checkpoint_scheme} with {type(stored).__name__}"
        )
    if checkpoint_scheme is None:
        return UnquantizedExperts(params, options, expert_mesh=expert_mesh)
    how = {"checkpoint_scheme": checkpoint_scheme, "scheme": scheme, "target": target}
    if dense:
        return FP8Experts(params, options, **how, expert_mesh=expert_mesh)
    return NVFP4Experts(params, options, **how, backend=backend, expert_mesh=expert_mesh)


def _check_dispatch_axis(dispatch, expert_mesh):
    if dispatch != "psum" and EXPERT not in expert_mesh.axes:
        raise ValueError(
            f"dispatch: {dispatch!r} sends tokens along the mesh axis '{EXPERT}', which is missing "
            f"in {dict(expert_mesh.mesh.shape)}. Add the axis, or use dispatch='psum'"
        )


def _prepare(params: Any, plan: Plan, expert_mesh: ExpertMesh | None, interleaved: bool):
    """Return NVFP4 experts over their mesh, in the layout of `plan`."""
    if expert_mesh is None:
        check_moe_params(params)
        return convert(params, plan.layout)
    check_row_scales(expert_mesh, plan.scheme)
    if not isinstance(params, ShardedExperts):
        return shard_experts(params, expert_mesh, layout=plan.layout, interleaved=interleaved)
    stored: Any = params.stacked
    if stored.layout == plan.layout:
        return params
    to_layout = on_shards(lambda own: own.to_layout(plan.layout), expert_mesh)
    return dataclasses.replace(params, stacked=jax.jit(to_layout)(params.stacked))


def _shard(params, expert_mesh, options, activations):
    """Return experts that are not NVFP4 over their mesh."""
    if isinstance(params, ShardedExperts):
        expert_mesh = params.expert_mesh
    if expert_mesh is None:
        return params
    check_row_scales(expert_mesh, activations)
    if isinstance(params, ShardedExperts):
        return params
    return shard_experts(params, expert_mesh, interleaved=options.activation.row.interleaved)
