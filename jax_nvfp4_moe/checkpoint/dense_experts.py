"""Plan experts that are not NVFP4: in a float dtype or in FP8."""

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
    """Buffers of one layer's experts in a float dtype; shapes as in `ExpertPlan`."""

    gate_up: Buffer
    down: Buffer
    gate_up_bias: Buffer | None
    down_bias: Buffer | None


@dataclasses.dataclass
class FP8ExpertPlan:
    """Buffers of one layer's experts in FP8; shapes as in `ExpertPlan`.

    Attributes:
      checkpoint_scheme: how activations enter the products.
      gate_up, down: the matrices.
      gate_up_bias, down_bias: float32, or None.
    """

    checkpoint_scheme: FP8ActivationScaling
    gate_up: FP8Matrices
    down: FP8Matrices
    gate_up_bias: Buffer | None
    down_bias: Buffer | None


def plan_dense_experts(
    planner: Planner, prefix: str, sizes: ExpertSizes, dtype: np.dtype | None
) -> DenseExpertPlan:
    """Plan experts that are not quantized; `dtype` None keeps that of the file."""
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
    planner.take(f"{module}.weight", FLOATS, (n, weight.shape[-1]))
    weight.slices.append(TensorSlice(f"{module}.weight", at))
    planner.ignore([f"{module}.{planner.names.input_global}"], "input scales of dense modules")
    _plan_bias(planner, module, bias, at, n)


def _plan_bias(planner, module, bias, at, n):
    if bias is not None:
        planner.take(f"{module}.bias", FLOATS, (n,))
        bias.slices.append(TensorSlice(f"{module}.bias", at))


def _plan_dense_stack(planner, stem, weight, inputs_first, alternate, dtypes=FLOATS):
    e, n, k = weight.shape
    shapes = {False: (e, n, k), True: (e, k, n)}
    info = planner.find(stem)
    swapped = inputs_first
    if swapped is None and n != k:
        swapped = info is not None and info.shape == shapes[True]
    elif swapped is None:
        planner.problems.append(
            f"{quoted(stem)} may be [e, n, k] or [e, k, n] with n = {n} and k = {k}: ambiguous"
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
    """Plan experts in FP8: one tensor an expert and projection, or all experts stacked."""
    if checkpoint_scheme is FP8ActivationScaling.TENSOR:
        planner.problems.append(
            f"{quoted(prefix)}: experts whose activations have one dynamic scale of the whole "
            "tensor are not supported: it would depend on how tokens are batched"
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
    """Plan the matrix `module` as the rows `at` of one expert."""
    n = matrices.scale.shape[1] if len(at) == 1 else at[1].stop - at[1].start
    planner.take_fp8(
        module, matrices, checkpoint_scheme, (n, matrices.values.shape[-1]), at, (at[0], part)
    )


def _plan_fp8_stack(planner, stem, matrices, checkpoint_scheme, inputs_first, alternate):
    """Plan one projection of all experts; scales are one of all, of each, or of each row."""
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
                f"{quoted(scale)}: {info} with alternating rows is not supported; expected [e, n]"
            )
        matrices.scale.slices += [
            dataclasses.replace(tensor_slice, shape=(e, -1)) for tensor_slice in slices
        ]
    name = f"{stem}{join}{FP8_INPUT_SCALE}"
    info = planner.find(name)
    spread = () if info is None or math.prod(info.shape) == 1 else (e, 1)
    planner.input_scale(matrices, name, TensorSlice("", shape=spread), checkpoint_scheme, *single)
