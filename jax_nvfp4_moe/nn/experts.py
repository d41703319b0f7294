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
from jax_nvfp4_moe.numerics.routing import narrow_ids
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams, check_moe_params
from jax_nvfp4_moe.ops.dense_moe import dense_moe
from jax_nvfp4_moe.ops.moe import check_dtype, check_input_scales, check_row_order, moe_mlp
from jax_nvfp4_moe.ops.preparation import convert, plan_experts
from jax_nvfp4_moe.parallel import (
    DISPATCHES,
    ExpertMesh,
    find_expert_mesh,
    run_dispatched,
    shard_experts,
)
from jax_nvfp4_moe.parallel.expert_mesh import EXPERT, check_row_scales
from jax_nvfp4_moe.parallel.experts import convert_shards, expert_layout
from jax_nvfp4_moe.parallel.placement import ExpertSlots, to_physical_ids
from jax_nvfp4_moe.parallel.shard_spec import find_layout, mark
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Plan, Scheme, Target

AnyExperts = MoEParams | DenseExperts


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
      params: `NVFP4Param` of `MoEParams` in the layout of their plan, or of `DenseExperts`; on a
        mesh global arrays, see `parallel.experts`.
      slots: `ExpertSlots`, or None. Where each expert is stored after `place_model` has replicated
        or moved it. None means that expert i is stored at index i.
      options: static `ExpertOptions`.
      expert_mesh: static; the devices that share the experts, None for one device.
      scheme: static; how activations enter NVFP4 products, None for other weights.
      checkpoint_scheme: static; what the checkpoint says of the weights.
    """

    scheme: Scheme | None = None
    checkpoint_scheme: CheckpointScheme = None

    def __init__(
        self,
        params: AnyExperts,
        options: ExpertOptions,
        *,
        expert_mesh: ExpertMesh | None = None,
        layout: str | None = None,
    ):
        """Divide `params`, the whole layer, over a mesh.

        Args:
          params: canonical, or prepared already where there is no mesh.
          options: what all experts need to know.
          expert_mesh: the devices that share the experts; None for one device.
          layout: that each shard's part takes; canonical where None.
        """
        self.options, self.expert_mesh, divided = options, expert_mesh, None
        if expert_mesh is not None:
            how = {"interleaved": options.activation.row.interleaved}
            divided = expert_layout(params, expert_mesh, **how)
            params = shard_experts(params, expert_mesh, layout=layout, **how)
        self.params = NVFP4Param(params)
        mark(self.params, divided)
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
            if self.expert_mesh is not None:
                run = functools.partial(
                    run_dispatched,
                    run,
                    expert_mesh=self.expert_mesh,
                    dispatch=self.options.dispatch,
                    capacity=self.options.capacity,
                    scheme=self.scheme,
                    weight_on_input=self.options.weight_on_input,
                )
            ids = narrow_ids(expert_ids.reshape(-1, expert_ids.shape[-1]))
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
        """Take other weights of the same widths, such as those that `place_model` has ordered.

        Args:
          params: in the layout of the old ones; on a mesh global arrays divided as they are.
        """
        divided = find_layout(self.params)
        self.params = NVFP4Param(params)
        mark(self.params, divided)


class NVFP4Experts(RoutedExperts):
    """Experts in NVFP4.

    Attributes:
      plan: static; the scheme, the kernel and the layout of `params`. The call follows it.
    """

    def __init__(
        self,
        params: MoEParams,
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
          params: `MoEParams` of the whole layer, in any layout.
          options: what all experts need to know.
          checkpoint_scheme: what the checkpoint says of the weights, "w4a16" or "w4a4".
          scheme, target, backend: as for `ops.moe_mlp`.
          expert_mesh: the devices that share the experts; None for one device.

        Raises:
          ValueError: the weights do not go with the scheme, the activation or the mesh.
          NoBackendError: no backend fits.
        """
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
        check_row_order(params, options.activation)
        check_input_scales("params", params, self.scheme)
        if expert_mesh is None:
            check_moe_params(params)
            params = convert(params, self.plan.layout)
        else:
            check_row_scales(expert_mesh, self.scheme)
        super().__init__(params, options, expert_mesh=expert_mesh, layout=self.plan.layout)

    def op(self) -> Callable:
        """Return `ops.moe_mlp` with the plan that `params` were prepared for."""
        return functools.partial(
            moe_mlp,
            plan=self.plan,
            activation=self.options.activation,
            weight_on_input=self.options.weight_on_input,
        )

    def replace_params(self, params: Any) -> None:
        """Take other weights of the same widths, and plan for their number."""
        shards = 1 if self.expert_mesh is None else self.expert_mesh.expert
        self.plan = resolve_again(self.plan, num_experts=params.num_experts // shards)
        if self.expert_mesh is None:
            params = convert(params, self.plan.layout)
        else:
            params = convert_shards(params, self.expert_mesh, self.plan.layout)
        super().replace_params(params)


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
          params: `DenseExperts` of the whole layer.
          options: what all experts need to know.
          checkpoint_scheme: what the checkpoint says of activations.
          scheme, target: activations are rounded where `scheme.rounds_to_fp8` says so.
          expert_mesh: as for `NVFP4Experts`.

        Raises:
          ValueError: the weights do not go with the activation or the mesh.
        """
        self.checkpoint_scheme = FP8ActivationScaling(checkpoint_scheme)
        self.activations = find_activation_scaling(self.checkpoint_scheme, scheme, target)
        if expert_mesh is not None:
            check_row_scales(expert_mesh, self.activations)
        super().__init__(params, options, expert_mesh=expert_mesh)

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

    def op(self) -> Callable:
        """Return `ops.dense_moe`."""
        return functools.partial(
            dense_moe,
            activation=self.options.activation,
            weight_on_input=self.options.weight_on_input,
        )


def make_experts(
    params: Any,
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
      params: the whole layer: `MoEParams`, or `DenseExperts` with an `FP8ActivationScaling` or None
        as `checkpoint_scheme`.
      options: what all experts need to know.
      checkpoint_scheme, scheme, target, backend, mesh: as for `NVFP4MoE`.

    Raises:
      ValueError: `checkpoint_scheme` does not go with `params`; also as the modules.
      NoBackendError: no backend fits.
    """
    expert_mesh = None if mesh is None else find_expert_mesh(mesh)
    if expert_mesh is not None:
        _check_dispatch_axis(options.dispatch, expert_mesh)
        target = target or expert_mesh.target
    dense = checkpoint_scheme is None or checkpoint_scheme in list(FP8ActivationScaling)
    if isinstance(params, DenseExperts) != dense:
        raise ValueError(
            "checkpoint_scheme: expected an FP8ActivationScaling or None with DenseExperts alone, "
            f"got {checkpoint_scheme} with {type(params).__name__}"
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
