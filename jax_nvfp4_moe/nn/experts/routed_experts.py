"""The routed experts of one layer: NVFP4, FP8 or unquantized, on one device or over a mesh."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, DTypeLike, Float, Int, Shaped

from jax_nvfp4_moe.backends.plan import Plan
from jax_nvfp4_moe.backends.resolution import resolve_again
from jax_nvfp4_moe.nn.experts.expert_lora import ExpertLoRA
from jax_nvfp4_moe.nn.intermediates import record
from jax_nvfp4_moe.nn.linear.fp8_linear import find_activation_scaling
from jax_nvfp4_moe.nn.variables import NVFP4Param
from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.numerics.arguments import check_kind
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor, dynamic_scale, fake_round_fp8
from jax_nvfp4_moe.numerics.layouts import find_layout as layout_called
from jax_nvfp4_moe.numerics.routing import narrow_ids
from jax_nvfp4_moe.numerics.tensor import (
    DenseExperts,
    MoEParams,
    check_moe_params,
    quantize_experts,
)
from jax_nvfp4_moe.ops.dense import precision_for
from jax_nvfp4_moe.ops.dense_moe import dense_moe
from jax_nvfp4_moe.ops.low_rank import ExpertBlocks, run_adapted_experts
from jax_nvfp4_moe.ops.moe import check_dtype, check_input_scales, check_row_order, moe_mlp
from jax_nvfp4_moe.ops.preparation import (
    convert,
    convert_stacked,
    default_checkpoint_scheme,
    plan_experts,
    plan_with_input_scales,
)
from jax_nvfp4_moe.ops.products import grouped_gemm
from jax_nvfp4_moe.ops.records import RECORDS
from jax_nvfp4_moe.parallel import (
    DISPATCHES,
    ExpertMesh,
    find_expert_mesh,
    run_dispatched,
    shard_experts,
)
from jax_nvfp4_moe.parallel.dispatch import check_platform
from jax_nvfp4_moe.parallel.expert_mesh import EXPERT, check_row_scales
from jax_nvfp4_moe.parallel.expert_specs import expert_specs, on_shards
from jax_nvfp4_moe.parallel.experts import convert_shards, expert_layout
from jax_nvfp4_moe.parallel.partition_specs import note_specs
from jax_nvfp4_moe.parallel.placement import ExpertSlots, to_physical_ids
from jax_nvfp4_moe.parallel.sharded_variable import find_layout, mark
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Scheme, Target

AnyExperts = MoEParams | DenseExperts


@dataclasses.dataclass(frozen=True)
class ExpertOptions:
    """Options of the routed experts of one layer that do not depend on the weights; static.

    Attributes:
      top_k: number of experts per token, 1 by default. It matters only above 32, which is the most
        that the kernels accept.
      activation: activation between the two products: a name, "silu" by default, or the result of
        `find_activation`. The field then is an `ActivationCall`.
      weight_on_input: whether the expert weight multiplies the expert's input (Llama 4) instead of
        its output. Defaults to False.
      dtype: dtype of the result, to which inputs are cast: bfloat16 (the default), float16 or
        float32.
      dispatch: "psum" (the default), "all_to_all" or "ragged"; see `NVFP4MoE`.
      capacity: rows per pair of shards and round of "all_to_all", or None; see `NVFP4MoE`.

    Raises:
      ValueError: the activation is unknown, the dtype or `dispatch` is not supported, or `capacity`
        is given with another `dispatch` than "all_to_all".
    """

    top_k: int = 1
    activation: Any = "silu"
    weight_on_input: bool = False
    dtype: DTypeLike = jnp.bfloat16
    dispatch: str = "psum"
    capacity: int | None = None

    def __post_init__(self):
        """Check the fields, and normalize `activation` and `dtype`."""
        object.__setattr__(self, "activation", find_activation(self.activation))
        object.__setattr__(self, "dtype", check_dtype(self.dtype))
        if self.dispatch not in DISPATCHES:
            raise ValueError(
                f"dispatch: expected one of {', '.join(DISPATCHES)}; got {self.dispatch!r}"
            )
        if self.capacity is not None and (self.dispatch != "all_to_all" or self.capacity < 1):
            raise ValueError(
                "capacity: expected None, or at least 1 together with dispatch 'all_to_all'; "
                f"got {self.capacity} with {self.dispatch!r}"
            )


class RoutedTokens(NamedTuple):
    """The inputs and outputs of the routed experts in one call, recorded by `nn.intermediates`.

    Attributes:
      x: tokens ``[..., h]``, as the caller passed them.
      expert_ids: integers ``[..., k]``, numbered as in the checkpoint even if `place_model` has
        moved or replicated the experts.
      expert_weights: ``[..., k]``.
      y: output ``[..., h]``, or None if the experts have not run.
    """

    x: jax.Array
    expert_ids: jax.Array
    expert_weights: jax.Array
    y: jax.Array | None = None


class RoutedExperts(nnx.Module):
    """The routed experts of one layer, called with tokens and the experts that each token chose.

    ``y[t] = sum_j expert_weights[t, j] * expert[expert_ids[t, j]](x[t])``

    Attributes:
      params: `NVFP4Param`. Holds `MoEParams` in the layout of the plan, or `DenseExperts`. On a
        mesh its arrays are global arrays; see `parallel.experts`.
      adapter: `ExpertLoRA`, or None by default. What `add_lora` has added beside the weights; see
        `adapt`.
      slots: `ExpertSlots`, or None. Where each expert is stored after `place_model` has replicated
        or moved it. None means that expert i is stored at index i.
      options: static `ExpertOptions`.
      expert_mesh: static `ExpertMesh` that holds the experts, or None for one device.
      scheme: static `Scheme` that runs; None if the experts are not NVFP4.
      checkpoint_scheme: static scheme that the checkpoint declares; None if the experts are
        unquantized.
    """

    scheme: Scheme | None = None
    checkpoint_scheme: CheckpointScheme = None
    adapter: ExpertLoRA | None = None

    def __init__(
        self,
        params: AnyExperts,
        options: ExpertOptions,
        *,
        expert_mesh: ExpertMesh | None = None,
        layout: str | None = None,
    ):
        """Store `params`, sharded over the mesh if there is one.

        Args:
          params: weights of the whole layer, canonical. Without a mesh, any layout is stored as it
            is.
          options: options that do not depend on the weights.
          expert_mesh: devices that hold the experts, or None for one device.
          layout: name of the layout of each shard's weights. None means canonical. Without a mesh
            it is not used.
        """
        self.options, self.expert_mesh, sharded = options, expert_mesh, None
        if expert_mesh is not None:
            how = {"interleaved": options.activation.row.interleaved}
            sharded = expert_layout(params, expert_mesh, **how)
            params = shard_experts(params, expert_mesh, layout=layout, **how)
        self.params = mark(NVFP4Param(params), sharded)
        self._note_specs()
        self.slots: ExpertSlots | None = nnx.data(None)

    def __call__(
        self,
        x: Float[Array, "... h"],
        expert_ids: Int[Array, "... k"],
        expert_weights: Float[Array, "... k"],
    ) -> Float[Array, "... h"]:
        """Run the routed experts.

        Args:
          x: tokens ``[..., h]``; cast to the module's dtype.
          expert_ids: integers ``[..., k]``. An id of -1 or out of range contributes nothing.
          expert_weights: floats ``[..., k]``.

        Returns:
          ``[..., h]`` in the module's dtype.

        Raises:
          ValueError: a shape is wrong, or the weights were taken from a module on another mesh.
        """
        self._check_order()
        check_routing(x, expert_ids, expert_weights, self.params.get_value().hidden)
        with jax.named_scope("experts"):
            run: Callable = self._op()
            params: Any = self.params.get_value()
            if self.adapter is not None:
                run, params = self._adapted_op(), self.adapter.beside(params)
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
            # Ids of NumPy may have 64 bits. JAX would cut them before they are checked.
            *lead, k = expert_ids.shape
            ids = narrow_ids(expert_ids.reshape(math.prod(lead), k))
            y = run(
                lax.collapse(x, 0, -1).astype(self.options.dtype),
                params,
                to_physical_ids(ids, self.slots),
                lax.collapse(expert_weights, 0, -1),
            ).reshape(x.shape)
        record(self, RoutedTokens(x, expert_ids, expert_weights, y))
        return y

    def _check_order(self):
        """Check that the rows of the weights are in the order of this module's mesh.

        `nnx.merge` and `nnx.update` also accept the state of a module on another mesh.
        """
        layout = find_layout(self.params)
        stored = 1 if layout is None else layout.shards
        shards = 1 if self.expert_mesh is None else self.expert_mesh.tensor
        if stored != shards:
            raise ValueError(
                f"params: expected experts that are sharded into {shards} parts along 'tensor', as "
                f"on the mesh of this module; got {stored} parts, from a module on another mesh. "
                "Save that module with `nvfp4.save`, and `nvfp4.restore` converts its weights"
            )

    def _op(self) -> Callable:
        """Return the op to run: ``(x [t, h], params, ids [t, k], weights [t, k]) -> [t, h]``."""
        raise NotImplementedError

    def _adapted_op(self) -> Callable:
        """Return the op to run with an adapter; its weights are `AdaptedExperts`."""
        return functools.partial(
            run_adapted_experts,
            multiply=self._multiply_sorted,
            call=self.options.activation,
            weight_on_input=self.options.weight_on_input,
        )

    def _multiply_sorted(self, rows, weight, input_scale, blocks: ExpertBlocks):
        """Multiply sorted rows by the matrices of their experts, for `run_adapted_experts`."""
        raise NotImplementedError

    def adapt(self, adapter: ExpertLoRA | None) -> None:
        """Put an adapter beside the weights, or take it away with None.

        Raises:
          ValueError: `place_model` has replicated or moved experts.
        """
        self.check_unplaced()
        self.adapter = adapter

    def check_unplaced(self) -> None:
        """Check that experts are in the order of the checkpoint, as adapters are.

        Raises:
          ValueError: `place_model` has replicated or moved experts.
        """
        if self.slots is not None:
            raise ValueError(
                "experts: expected experts in the order of the checkpoint, but `place_model` has "
                "replicated or moved them. Add adapters to a model whose experts are not placed"
            )

    def replace_params(self, params: AnyExperts) -> None:
        """Replace the weights by others of the same widths, such as those that `place_model` made.

        Args:
          params: weights in the layout of the old ones. On a mesh, global arrays that are sharded
            like the old ones.
        """
        sharded = find_layout(self.params)
        self.params = mark(NVFP4Param(params), sharded)
        self._note_specs()

    def _note_specs(self):
        """Store in `params` how their arrays are sharded, for `nnx.get_partition_spec`."""
        if self.expert_mesh is not None:
            note_specs(self.params, expert_specs(self.params.get_value(), self.expert_mesh))


class NVFP4Experts(RoutedExperts):
    """Routed experts in NVFP4, without a router: for a model that has a router of its own.

    ``y[t] = sum_j expert_weights[t, j] * expert[expert_ids[t, j]](x[t])``

    Attributes:
      params: `NVFP4Param` that holds `MoEParams` in the layout of the plan. On a mesh its arrays
        are global arrays; see `parallel.experts`.
      plan: static `Plan`. The scheme, the backend and the layout of `params`, chosen once
        when the module is made. Every call follows it.
      slots: `ExpertSlots`, or None. Where each expert is stored after `place_model` has replicated
        or moved it. None means that expert i is stored at index i.
      options: static `ExpertOptions`.
      expert_mesh: static `ExpertMesh` that holds the experts, or None for one device.
      scheme: static `Scheme` that runs.
      checkpoint_scheme: static scheme that the weights stand for.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> gate, up = (jax.random.normal(key, (8, 64, 32)) for key in keys[:2])  # Flax kernels
      >>> down = jax.random.normal(keys[2], (8, 32, 64))
      >>> experts = nvfp4.NVFP4Experts.from_dense(gate, up, down)
      >>> expert_ids = jnp.array([[0, 3], [7, -1]])  # -1 is no expert
      >>> experts(jnp.ones((2, 64), jnp.bfloat16), expert_ids, jnp.full((2, 2), 0.5)).shape
      (2, 64)

    Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated
    Mixture-of-Experts Layer", arXiv:1701.06538.
    """

    def __init__(
        self,
        params: MoEParams,
        options: ExpertOptions | None = None,
        *,
        checkpoint_scheme: Scheme | str | None = None,
        scheme: Scheme | str | None = None,
        target: Target | None = None,
        backend: str | Sequence[str] | None = None,
        expert_mesh: ExpertMesh | None = None,
        **fields: Any,
    ):
        """Choose scheme and backend, and convert `params` to the layout of the backend.

        Args:
          params: `MoEParams` of the whole layer, in any layout.
          options: options that do not depend on the weights. None (default) makes them of `fields`.
          checkpoint_scheme: scheme that the checkpoint declares: "w4a16" or "w4a4". None (default)
            means "w4a4" if `scheme` is "w4a4" and `params` have input scales, and "w4a16"
            otherwise.
          scheme: None, "checkpoint" or a `Scheme`, as for `NVFP4MoE`.
          target: the device to run on. None takes JAX's default device.
          backend: None, a name or a sequence of names, as for `NVFP4MoE`.
          expert_mesh: devices that hold the experts, or None for one device.
          **fields: fields of `ExpertOptions`, such as `activation` or `dtype`, instead of
            `options`.

        Raises:
          ValueError: the weights do not fit the scheme, the activation or the mesh. Also if
            `options` and `fields` are both given.
          TypeError: `ExpertOptions` has no such field.
          NoBackendError: no backend can run the experts.
        """
        if options is None:
            options = ExpertOptions(**fields)
        elif fields:
            raise ValueError(f"options: expected None together with {', '.join(fields)}")
        self.plan: Plan = plan_experts(
            params,
            checkpoint_scheme=checkpoint_scheme
            or default_checkpoint_scheme(params.has_input_scales, scheme),
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

    @classmethod
    def from_dense(
        cls,
        gate: Float[Array, "e h n"] | None,
        up: Float[Array, "e h i"] | None,
        down: Float[Array, "e i h"],
        **options: Any,
    ) -> "NVFP4Experts":
        """Quantize the kernels of experts as Flax models store them, inputs before outputs.

        Args:
          gate: ``[e, h, i]`` in any float dtype, or None if the activation is not gated. If `up` is
            None, gate and up in one kernel: ``[e, h, 2i]``, as for `NVFP4MoE.from_dense`.
          up: ``[e, h, i]``, or None; h and i are multiples of 16.
          down: ``[e, i, h]``.
          **options: keyword arguments of `quantize_experts`, such as `algorithm`, and those of the
            constructor, such as `activation` or `scheme`.

        Returns:
          `NVFP4Experts` with ``x [..., h]``.

        Raises:
          ValueError: shapes disagree, or h or i is not a multiple of 16. Also the errors of the
            constructor.
          NoBackendError: no backend can run the experts.
        """
        params, options = quantize_kernels(gate, up, down, options)
        return cls(params, **options)

    def _op(self) -> Callable:
        """Return `ops.moe_mlp` with the plan that `params` were prepared for."""
        return functools.partial(
            moe_mlp,
            plan=self.plan,
            activation=self.options.activation,
            weight_on_input=self.options.weight_on_input,
        )

    def _multiply_sorted(self, rows, weight, input_scale, blocks: ExpertBlocks):
        """Run `ops.grouped_gemm` under the scheme of the plan."""
        plan = self.plan
        return grouped_gemm(
            rows,
            weight,
            blocks.sizes,
            input_scale=input_scale if plan.scheme is Scheme.W4A4 else None,
            scheme=plan.scheme,
            target=plan.target,
            backend=plan.requested_backends,
        )

    def adapt(self, adapter: ExpertLoRA | None) -> None:
        """Put an adapter beside the weights, or take it away with None.

        With an adapter, the two GEMMs run apart, so `params.gate_up` gets the layout of a grouped
        GEMM. Without one it gets that of the whole layer back.

        Raises:
          ValueError: `place_model` has replicated or moved experts.
        """
        super().adapt(adapter)
        if layout_called(self.plan.layout).of_halves is None:
            return  # gate and up have no order of their own
        params = self.params.get_value()
        made = _lay_out(
            params,
            apart=adapter is not None,
            layout=self.plan.layout,
            stacked=params.down.packed.ndim - 3,
            expert_mesh=self.expert_mesh,
        )
        self.params.set_value(made)

    def set_input_scales(
        self,
        gate_up: Float[Array, "..."],
        down: Float[Array, "..."],
        *,
        scheme: Scheme | str | None = None,
    ) -> None:
        """Set calibrated input scales, and plan again for weights that have them.

        Args:
          gate_up: float32 scalar, amax / 2688 of what enters the first product of all experts. If
            the module is stacked, as `nnx.vmap` makes it, one value for each layer.
          down: the same for the second product.
          scheme: the scheme to run from now on, as for `NVFP4MoE`. None (default) keeps what the
            module was asked for.

        Raises:
          ValueError: the experts are on a mesh, or the scheme is unknown.
          NoBackendError: no backend can run the experts.
        """
        if self.expert_mesh is not None:
            raise ValueError("input scales: expected experts on one device, not on a mesh")
        plan, params = plan_with_input_scales(self.plan, scheme), self.params.get_value()
        whole = params.down.packed.shape[:-2]

        def spread(scale):
            return jnp.broadcast_to(jnp.asarray(scale, jnp.float32)[..., None], whole)

        params = dataclasses.replace(
            params, gate_up_input_scale=spread(gate_up), down_input_scale=spread(down)
        )
        self.params.set_value(convert_stacked(params, plan.layout, len(whole) - 1))
        self.plan = plan
        self.scheme, self.checkpoint_scheme = plan.scheme, plan.checkpoint_scheme

    def replace_params(self, params: Any) -> None:
        """Replace the weights by others of the same widths, and plan again for their number.

        Args:
          params: `MoEParams`. On a mesh, global arrays that are sharded like the old ones.
        """
        shards = 1 if self.expert_mesh is None else self.expert_mesh.expert
        self.plan = resolve_again(self.plan, RECORDS, num_experts=params.num_experts // shards)
        if self.expert_mesh is None:
            params = convert(params, self.plan.layout)
        else:
            params = convert_shards(params, self.expert_mesh, self.plan.layout)
        super().replace_params(params)


# One program for all layers of a model.
@functools.partial(jax.jit, static_argnames=("apart", "layout", "stacked", "expert_mesh"))
def _lay_out(params: MoEParams, *, apart, layout, stacked, expert_mesh) -> MoEParams:
    """Return experts in a layout, with `gate_up` in that of a GEMM of its own if `apart`."""

    def convert(own):
        if not apart:
            return own.to_layout(layout)
        return dataclasses.replace(own, gate_up=own.gate_up.to_layout(layout))

    for _ in range(stacked):  # as `nnx.vmap` stacks modules
        convert = jax.vmap(convert)
    return on_shards(convert, expert_mesh)(params)


class FP8Experts(RoutedExperts):
    """Routed experts in FP8. They run in plain XLA.

    Attributes:
      activations: static `FP8ActivationScaling`. How the inputs of both products are rounded.
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
        """Decide how activations are rounded, and shard `params` over the mesh if there is one.

        Args:
          params: `DenseExperts` of the whole layer.
          options: options that do not depend on the weights.
          checkpoint_scheme: the rounding of activations that the checkpoint declares.
          scheme: the scheme that the caller asked for, or None. `scheme.rounds_to_fp8` decides from
            it and from `target` whether activations are rounded.
          target: the device to run on. None takes JAX's default device.
          expert_mesh: devices that hold the experts, or None for one device.

        Raises:
          ValueError: the weights do not fit the mesh, or a shard cannot compute the scales of
            activations because they need whole rows.
        """
        self.checkpoint_scheme = FP8ActivationScaling(checkpoint_scheme)
        self.activations = find_activation_scaling(self.checkpoint_scheme, scheme, target)
        if expert_mesh is not None:
            check_row_scales(expert_mesh, self.activations)
        super().__init__(params, options, expert_mesh=expert_mesh)

    def _op(self) -> Callable:
        """Return `ops.dense_moe` with the rounding of activations."""
        return functools.partial(
            dense_moe,
            activations=self.activations,
            activation=self.options.activation,
            weight_on_input=self.options.weight_on_input,
        )

    def _multiply_sorted(self, rows, weight, input_scale, blocks: ExpertBlocks):
        """Round rows if they meet an FP8 matrix and are rounded, and multiply by XLA."""
        if not isinstance(weight, FP8Tensor):
            return _multiply_by_xla(rows, weight, blocks)
        if self.activations is FP8ActivationScaling.WEIGHTS:
            return _multiply_by_xla(rows, weight.dequantize(rows.dtype), blocks)
        if self.activations is FP8ActivationScaling.STATIC:
            scale = jnp.take(input_scale, blocks.experts, mode="clip")[:, None]
        else:
            of_token = self.activations is FP8ActivationScaling.TOKEN
            scale = dynamic_scale(rows, -1 if of_token else (0, 1))
        how = {"multiply_by_reciprocal": self.params.get_value().multiply_by_reciprocal}
        rounded = lax.stop_gradient(fake_round_fp8(rows, scale, **how))
        rows = rows.astype(jnp.float32)
        rows = rounded + (rows - lax.stop_gradient(rows))  # the gradient of the identity
        return _multiply_by_xla(rows, weight.dequantize(), blocks)


class UnquantizedExperts(RoutedExperts):
    """Routed experts in a float dtype. They run in plain XLA."""

    def _op(self) -> Callable:
        """Return `ops.dense_moe` without rounding of activations."""
        return functools.partial(
            dense_moe,
            activation=self.options.activation,
            weight_on_input=self.options.weight_on_input,
        )

    def _multiply_sorted(self, rows, weight, input_scale, blocks: ExpertBlocks):
        """Multiply by XLA."""
        return _multiply_by_xla(rows, weight, blocks)


def _multiply_by_xla(rows, weight, blocks: ExpertBlocks):
    """Return the float32 products of sorted rows with matrices ``[e, n, k]`` of a float dtype."""
    return lax.ragged_dot(
        rows,
        jnp.swapaxes(weight.astype(rows.dtype), 1, 2),
        blocks.sizes,
        precision=precision_for(rows.dtype),
        preferred_element_type=jnp.float32,
    )


# Arguments of `quantize_experts` that `from_dense` takes among its options. `interleaved` follows
# from the activation.
_QUANTIZED_BY = frozenset(inspect.signature(quantize_experts).parameters) - {"interleaved"}


def quantize_kernels(
    gate, up, down, options: Mapping[str, Any]
) -> tuple[MoEParams, dict[str, Any]]:
    """Quantize the kernels of experts as Flax models store them.

    Args:
      gate: ``[e, h, i]``; ``[e, h, 2i]`` if `up` is None; None if the activation is not gated.
      up: ``[e, h, i]``, or None.
      down: ``[e, i, h]``.
      options: keyword arguments of `quantize_experts` and of a constructor, mixed.

    Returns:
      `MoEParams`, and the options that are left for the constructor.

    Raises:
      ValueError: as for `quantize_experts`.
    """
    own = {name: value for name, value in options.items() if name in _QUANTIZED_BY}
    rest = {name: value for name, value in options.items() if name not in _QUANTIZED_BY}
    _check_kernels({"gate": gate, "up": up, "down": down})
    call = find_activation(options.get("activation", "silu"))
    interleaved = call.row.interleaved and up is None
    matrices = (_transpose(kernel) for kernel in (gate, up, down))
    return quantize_experts(*matrices, interleaved=interleaved, **own), rest


def _check_kernels(kernels):
    """Check the shapes of the kernels, and name axes in the order of Flax."""
    shapes = {name: jnp.shape(array) for name, array in kernels.items() if array is not None}
    name = "up" if "up" in shapes else "gate"
    if name not in shapes:
        raise ValueError("up: expected [e, h, i], or gate and up in `gate`; got None for both")
    if len(shapes[name]) != 3:
        raise ValueError(
            f"{name}: expected three axes, [experts, inputs, outputs]; got shape {shapes[name]}"
        )
    e, h, i = shapes[name]
    if name == "gate" and i % 2:
        raise ValueError(f"gate: expected gate and up, an even number of outputs; got {i}")
    i = i if name == "up" else i // 2
    wanted = ({"gate": (e, h, i)} if name == "up" else {}) | {"down": (e, i, h)}
    for other, shape in wanted.items():
        if shapes.get(other, shape) != shape:
            raise ValueError(
                f"{other}: expected shape {shape} to go with {name} {shapes[name]}, inputs before "
                f"outputs as in Flax; got {shapes[other]}"
            )


def _transpose(kernel):
    """Return kernels ``[e, inputs, outputs]`` as ``[e, outputs, inputs]``; None stays None."""
    return None if kernel is None else jnp.swapaxes(jnp.asarray(kernel), 1, 2)


def make_experts(
    params: Any,
    options: ExpertOptions,
    *,
    checkpoint_scheme: CheckpointScheme | str = None,
    scheme: Scheme | str | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
    mesh: Mesh | ExpertMesh | None = None,
    axis_names: Mapping[str, str] | None = None,
) -> RoutedExperts:
    """Make the module that fits `params` and `checkpoint_scheme`.

    Args:
      params: weights of the whole layer. `MoEParams`, or `DenseExperts` if `checkpoint_scheme` is
        an `FP8ActivationScaling` or None.
      options: options that do not depend on the weights.
      checkpoint_scheme: scheme that the checkpoint declares. None (default) for unquantized
        experts. With `MoEParams`, None means "w4a4" if `scheme` is "w4a4" and they have input
        scales, and "w4a16" otherwise.
      scheme: None, "checkpoint" or a `Scheme`, as for `NVFP4MoE`.
      target: the device to run on. None takes the devices of `mesh`, or JAX's default device.
      backend: None, a name or a sequence of names, as for `NVFP4MoE`.
      mesh: `jax.sharding.Mesh` to shard the experts over, or None for one device.
      axis_names: names of its axes that are called something else, as for `NVFP4MoE`.

    Returns:
      `NVFP4Experts`, `FP8Experts` or `UnquantizedExperts`.

    Raises:
      ValueError: `checkpoint_scheme` does not fit the class of `params`. Also the errors of the
        modules.
      NoBackendError: no backend can run the experts.
    """
    expert_mesh = None if mesh is None else find_expert_mesh(mesh, axis_names)
    if expert_mesh is not None:
        _check_dispatch_axis(options.dispatch, expert_mesh)
        target = target or expert_mesh.target
        check_platform(options.dispatch, target)
    check_kind("params", params, MoEParams, DenseExperts)
    if checkpoint_scheme is None and isinstance(params, MoEParams):
        checkpoint_scheme = default_checkpoint_scheme(params.has_input_scales, scheme)
    dense = checkpoint_scheme is None or checkpoint_scheme in list(FP8ActivationScaling)
    if isinstance(params, DenseExperts) != dense:
        raise ValueError(
            "checkpoint_scheme: expected 'w4a16' or 'w4a4' with MoEParams, and an "
            f"FP8ActivationScaling or None with DenseExperts; got {checkpoint_scheme} with "
            f"{type(params).__name__}"
        )
    if checkpoint_scheme is None:
        return UnquantizedExperts(params, options, expert_mesh=expert_mesh)
    how = {"checkpoint_scheme": checkpoint_scheme, "scheme": scheme, "target": target}
    if dense:
        return FP8Experts(params, options, **how, expert_mesh=expert_mesh)
    return NVFP4Experts(params, options, **how, backend=backend, expert_mesh=expert_mesh)


def check_routing(x, expert_ids, expert_weights, hidden: int) -> None:
    """Check the arguments of a call of routed experts.

    Raises:
      TypeError: an argument is no array, or the ids are no integers.
      ValueError: a shape is wrong.
    """
    check_tokens("x", x, hidden)
    for name, array in (("expert_ids", expert_ids), ("expert_weights", expert_weights)):
        check_kind(name, array, Shaped[Array, "... k"])
        if array.ndim != x.ndim or array.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"{name}: expected shape [{', '.join(map(str, x.shape[:-1]))}, k], a row for each "
                f"token of x {x.shape}; got {array.shape}"
            )
    if expert_ids.shape != expert_weights.shape:
        raise ValueError(
            f"expert_weights: expected shape {expert_ids.shape}, the shape of expert_ids; got "
            f"{expert_weights.shape}"
        )
    if not jnp.issubdtype(expert_ids.dtype, jnp.integer):
        raise TypeError(f"expert_ids: expected integers, got {expert_ids.dtype.name}")


def check_tokens(name: str, x: Any, width: int) -> None:
    """Check that `x` is an array of tokens ``[..., width]``.

    Raises:
      TypeError: it is no array.
      ValueError: its last axis has another size.
    """
    check_kind(name, x, Shaped[Array, "... h"])
    if not x.ndim or x.shape[-1] != width:
        raise ValueError(f"{name}: expected shape [..., {width}], got {x.shape}")


def _check_dispatch_axis(dispatch, expert_mesh):
    """Check that the mesh has the axis along which `dispatch` sends tokens."""
    if dispatch != "psum" and not expert_mesh.has(EXPERT):
        raise ValueError(
            f"dispatch: {dispatch!r} sends tokens along the mesh axis '{EXPERT}', but the mesh has "
            f"axes {dict(expert_mesh.mesh.shape)}. Add the axis, or use dispatch='psum'"
        )
