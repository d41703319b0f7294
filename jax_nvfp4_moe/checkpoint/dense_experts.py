"""Plan experts that are not stored in NVFP4 but in FP8 or in a float dtype such as bfloat16."""

import dataclasses
import math

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.checkpoint.expert_names import (
    ExpertSizes,
    Naming,
    find_naming,
    first_projection,
    packed_name,
    plan_stacked_bias,
    stack,
)
from jax_nvfp4_moe.checkpoint.formats import FP8_INPUT_SCALE, FP8_SCALE
from jax_nvfp4_moe.checkpoint.plan import (
    FLOATS,
    Buffer,
    FP8Matrices,
    Planner,
    TensorSlice,
    empty_fp8_matrices,
)
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES
from jax_nvfp4_moe.scheme import FP8ActivationScaling


@dataclasses.dataclass
class DenseExpertPlan:
    """The buffers of one layer's experts in a float dtype.

    Attributes:
      gate_up: ``[e, 2i, h]``, the gate rows before the up rows; ``[e, i, h]`` without a gate.
      down: ``[e, h, i]``.
      gate_up_bias: ``[e, 2i]`` or ``[e, i]``; None if the model has no bias.
      down_bias: ``[e, h]``; None if the model has no bias.
    """

    gate_up: Buffer
    down: Buffer
    gate_up_bias: Buffer | None
    down_bias: Buffer | None


@dataclasses.dataclass
class FP8ExpertPlan:
    """The buffers of one layer's experts in FP8.

    Attributes:
      checkpoint_scheme: how activations are scaled before they are multiplied.
      gate_up: ``[e, 2i, h]``, the gate rows before the up rows; ``[e, i, h]`` without a gate.
      down: ``[e, h, i]``.
      gate_up_bias: float32 ``[e, 2i]`` or ``[e, i]``; None if the model has no bias.
      down_bias: float32 ``[e, h]``; None if the model has no bias.
    """

    checkpoint_scheme: FP8ActivationScaling
    gate_up: FP8Matrices
    down: FP8Matrices
    gate_up_bias: Buffer | None
    down_bias: Buffer | None


def plan_dense_experts(
    planner: Planner, prefix: str, sizes: ExpertSizes, dtype: np.dtype | None
) -> DenseExpertPlan:
    """Plan the experts of one layer in a float dtype.

    Args:
      planner: looks tensors up, and collects problems.
      prefix: the module of the experts, such as "model.layers.0.mlp.experts".
      sizes: the sizes of the layer.
      dtype: the dtype of the buffers. None keeps the dtype of the file.
    """
    e, h, i = sizes.num_experts, sizes.hidden, sizes.intermediate
    rows = sizes.parts * i
    naming = find_naming(planner, prefix, sizes)
    stem = f"{prefix}.down_proj" if naming is None else f"{prefix}.0.{naming.down}.weight"
    stored = planner.find(stem)
    kept = STORED_TYPES[stored.dtype].numpy if stored and stored.dtype in FLOATS else np.float32
    dtype = np.dtype(dtype or kept)
    plan = DenseExpertPlan(
        Buffer((e, rows, h), dtype),
        Buffer((e, h, i), dtype),
        Buffer((e, rows), dtype) if sizes.bias else None,
        Buffer((e, h), dtype) if sizes.bias else None,
    )
    if naming is None:
        first = first_projection(prefix, sizes)
        alternate = i if sizes.interleaved else None
        _plan_dense_stack(planner, first, plan.gate_up, sizes.inputs_first, alternate)
        _plan_dense_stack(planner, f"{prefix}.down_proj", plan.down, sizes.inputs_first, None)
        plan_stacked_bias(planner, first, plan.gate_up_bias, alternate)
        plan_stacked_bias(planner, f"{prefix}.down_proj", plan.down_bias, None)
        return plan
    ups = [naming.gate, naming.up] if sizes.gated else [naming.up]
    for x in range(e):
        for part, name in enumerate(ups):
            at = (x, slice(part * i, (part + 1) * i))
            _plan_dense_one(planner, f"{prefix}.{x}.{name}", plan.gate_up, plan.gate_up_bias, at, i)
        _plan_dense_one(planner, f"{prefix}.{x}.{naming.down}", plan.down, plan.down_bias, (x,), h)
    return plan


def _plan_dense_one(planner, module, weight, bias, at, n):
    """Plan one expert's projection in a float dtype as the rows `at` of the layer's buffers."""
    planner.take(f"{module}.weight", FLOATS, (n, weight.shape[-1]))
    weight.slices.append(TensorSlice(f"{module}.weight", at))
    planner.ignore(
        [f"{module}.{planner.names.input_global}"], "input scales of dense modules are ignored"
    )
    _plan_bias(planner, module, bias, at, n)


def _plan_bias(planner, module, bias, at, n):
    """Plan the bias ``[n]`` of one expert's projection if the model has one."""
    if bias is not None:
        planner.take(f"{module}.bias", FLOATS, (n,))
        bias.slices.append(TensorSlice(f"{module}.bias", at))


def _plan_dense_stack(planner, stem, weight, inputs_first, alternate, dtypes=FLOATS):
    """Plan one projection of all experts from a single tensor without block scales.

    Args:
      planner: looks tensors up, and collects problems.
      stem: the name of the tensor.
      weight: the buffer ``[e, n, k]``.
      inputs_first: whether the tensor is ``[e, k, n]``. None decides by its shape, which is a
        problem if n equals k.
      alternate: as for `expert_names.stack`.
      dtypes: the allowed dtypes of the tensor.
    """
    e, n, k = weight.shape
    shapes = {False: (e, n, k), True: (e, k, n)}
    info = planner.find(stem)
    swapped = inputs_first
    if swapped is None and n != k:
        swapped = info is not None and info.shape == shapes[True]
    elif swapped is None:
        planner.problems.append(
            f"{quoted(stem)} is ambiguous: it may be [e, n, k] or [e, k, n], because n = {n} and "
            f"k = {k} are equal"
        )
    planner.take(stem, dtypes, shapes[bool(swapped)])
    weight.slices += stack(stem, e, bool(swapped), alternate)


def plan_fp8_experts(
    planner: Planner,
    prefix: str,
    sizes: ExpertSizes,
    naming: Naming | None,
    checkpoint_scheme: FP8ActivationScaling,
) -> FP8ExpertPlan:
    """Plan the experts of one layer in FP8.

    Args:
      planner: looks tensors up, and collects problems.
      prefix: the module of the experts, such as "model.layers.0.mlp.experts".
      sizes: the sizes of the layer.
      naming: the names of one expert's projections. None if one tensor holds all experts.
      checkpoint_scheme: how activations are scaled before they are multiplied.
    """
    if checkpoint_scheme is FP8ActivationScaling.TENSOR:
        planner.problems.append(
            f"{quoted(prefix)}: dynamic activations with strategy tensor are not supported for "
            "experts, because the scale would depend on which tokens are in the batch; supported: "
            "strategy token, or static scales"
        )
    e, h, i = sizes.num_experts, sizes.hidden, sizes.intermediate
    rows, float32 = sizes.parts * i, np.dtype(np.float32)
    plan = FP8ExpertPlan(
        checkpoint_scheme,
        empty_fp8_matrices(f"{prefix} gate and up", (e,), rows, h, sizes.parts),
        empty_fp8_matrices(f"{prefix} down", (e,), h, i, 1),
        Buffer((e, rows), float32) if sizes.bias else None,
        Buffer((e, h), float32) if sizes.bias else None,
    )
    if naming is None:
        first, alternate = first_projection(prefix, sizes), i if sizes.interleaved else None
        _plan_fp8_stack(
            planner, first, plan.gate_up, checkpoint_scheme, sizes.inputs_first, alternate
        )
        down = f"{prefix}.down_proj"
        _plan_fp8_stack(planner, down, plan.down, checkpoint_scheme, sizes.inputs_first, None)
        plan_stacked_bias(planner, first, plan.gate_up_bias, alternate)
        plan_stacked_bias(planner, down, plan.down_bias, None)
    else:
        ups = [naming.gate, naming.up] if sizes.gated else [naming.up]
        for x in range(e):
            for part, name in enumerate(ups):
                at = (x, slice(part * i, (part + 1) * i))
                module = f"{prefix}.{x}.{name}"
                _plan_fp8_one(planner, module, plan.gate_up, checkpoint_scheme, at, part)
                _plan_bias(planner, module, plan.gate_up_bias, at, i)
            module = f"{prefix}.{x}.{naming.down}"
            _plan_fp8_one(planner, module, plan.down, checkpoint_scheme, (x,), 0)
            _plan_bias(planner, module, plan.down_bias, (x,), h)
    planner.check_calibrated(plan.gate_up, checkpoint_scheme)
    planner.check_calibrated(plan.down, checkpoint_scheme)
    return plan


def _plan_fp8_one(planner, module, matrices, checkpoint_scheme, at, part):
    """Plan one expert's projection in FP8 as the rows `at` of the layer's buffers."""
    n = matrices.scale.shape[1] if len(at) == 1 else at[1].stop - at[1].start
    planner.take_fp8(
        module, matrices, checkpoint_scheme, (n, matrices.values.shape[-1]), at, (at[0], part)
    )


def _plan_fp8_stack(planner, stem, matrices, checkpoint_scheme, inputs_first, alternate):
    """Plan one projection of all experts in FP8 from a single tensor.

    The file may have one scale for all experts, one per expert, or one per row.
    """
    e, n, _ = matrices.values.shape
    name, join = packed_name(planner, stem)
    _plan_dense_stack(planner, name, matrices.values, inputs_first, alternate, ["F8_E4M3"])
    scale = f"{stem}{join}{FP8_SCALE}"
    single = [(), (1,), (e,), (e, 1), (e, 1, 1)]
    info = planner.take(scale, FLOATS, *single, (e, n), (e, n, 1), (e, 1, n))
    if info is None or math.prod(info.shape) == 1:
        matrices.scale.slices.append(TensorSlice(scale, shape=()))
    elif info.shape in single:
        matrices.scale.slices.append(TensorSlice(scale, shape=(e, 1)))
    else:
        slices = stack(scale, e, False, alternate)
        if alternate is not None and len(info.shape) == 3:
            planner.problems.append(
                f"{quoted(scale)}: {info} is not supported for gate and up rows that alternate; "
                f"expected {[e, n]}"
            )
        matrices.scale.slices += [
            dataclasses.replace(tensor_slice, shape=(e, -1)) for tensor_slice in slices
        ]
    name = f"{stem}{join}{FP8_INPUT_SCALE}"
    info = planner.find(name)
    spread = () if info is None or math.prod(info.shape) == 1 else (e, 1)
    planner.input_scale(matrices, name, TensorSlice("", shape=spread), checkpoint_scheme, *single)
