"""Plan the experts of one layer, stored as one tensor per projection or all in one tensor.

Stacked matrices are ``[e, n, k]``, or ``[e, k, n]`` as Llama 4 and gpt-oss store them. In gpt-oss,
gate and up rows alternate as well. `dense_experts` plans experts that are not NVFP4.
"""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from jax_nvfp4_moe.checkpoint.dense_experts import (
    DenseExpertPlan,
    FP8ExpertPlan,
    plan_dense_experts,
    plan_fp8_experts,
)
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
from jax_nvfp4_moe.checkpoint.formats import CHANNEL_SCALE, FP8_INPUT_SCALE, Decision
from jax_nvfp4_moe.checkpoint.fp8_block_weights import plan_block_experts
from jax_nvfp4_moe.checkpoint.mxfp4_experts import (
    MXFP4Matrices,
    is_mxfp4,
    plan_mxfp4_experts,
)
from jax_nvfp4_moe.checkpoint.plan import (
    SCALE_NAMES,
    Buffer,
    Matrices,
    Planner,
    Shape,
    TensorSlice,
    empty_matrices,
)
from jax_nvfp4_moe.checkpoint.stored_forms import FLOATS, Weight, find_forms
from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Scheme


@dataclasses.dataclass
class ExpertPlan:
    """The buffers of one layer's experts in NVFP4.

    Attributes:
      checkpoint_scheme: the scheme of all experts of the layer. None if the experts cannot be
        loaded, which the planner reports as a problem.
      gate_up: ``[e, 2i, h]``, the gate rows before the up rows; ``[e, i, h]`` without a gate.
      down: ``[e, h, i]``.
    """

    checkpoint_scheme: Scheme | None
    gate_up: Matrices | MXFP4Matrices
    down: Matrices | MXFP4Matrices


def plan_experts(
    planner: Planner, prefix: str, sizes: ExpertSizes, dtype: np.dtype | None = None
) -> ExpertPlan | FP8ExpertPlan | DenseExpertPlan:
    """Plan the experts of one layer in the format in which the file stores them.

    Missing or wrong tensors are added to ``planner.problems``. The buffers of the plan have the
    right shapes in any case, so that later steps can find more problems.

    Args:
      planner: looks tensors up, and collects problems.
      prefix: the module of the experts, such as "model.layers.0.mlp.experts".
      sizes: the sizes of the layer.
      dtype: the dtype of experts that are not quantized. None keeps the dtype of the file.
    """
    naming = find_naming(planner, prefix, sizes)
    if next(planner.tensors.under(f"{prefix}."), None) is None:
        planner.problems.append(
            f"{quoted(prefix)}: the file has no experts there; expected {_examples(prefix)}"
        )
        return _empty_plan(prefix, sizes)
    if is_mxfp4(planner, prefix, sizes, naming):
        return _plan_mxfp4(planner, prefix, sizes, naming)
    before = len(planner.problems)
    checkpoint_scheme = _checkpoint_scheme(planner, prefix, sizes, naming)
    weight = _first_weight(planner, prefix, naming)
    stored = weight.values and weight.values.dtype
    if stored in FLOATS:
        return plan_dense_experts(planner, prefix, sizes, dtype)
    if checkpoint_scheme is not None:
        return _plan_quantized(planner, prefix, sizes, naming, checkpoint_scheme, dtype)
    if len(planner.problems) == before:
        sources = planner.decisions[f"{prefix}.*"].source
        planner.problems.append(
            f"{quoted(prefix)}: experts are declared dense ({sources}) but stored as {stored}, "
            "without the scales of a quantized form"
        )
    planner.taken.update(planner.tensors.under(f"{prefix}."))
    return _empty_plan(prefix, sizes)


def _plan_quantized(planner, prefix, sizes, naming, checkpoint_scheme, dtype):
    """Plan experts that are stored as they are declared."""
    if isinstance(checkpoint_scheme, FP8ActivationScaling):
        return plan_fp8_experts(planner, prefix, sizes, naming, checkpoint_scheme)
    if isinstance(checkpoint_scheme, BlockFP8):
        return plan_block_experts(planner, prefix, sizes, naming, checkpoint_scheme, dtype)
    return _plan_nvfp4(planner, prefix, sizes, naming, checkpoint_scheme)


def _plan_nvfp4(planner, prefix, sizes, naming, checkpoint_scheme):
    """Plan experts in NVFP4."""
    plan = _empty_plan(prefix, sizes)
    plan.checkpoint_scheme = checkpoint_scheme
    planner.check_blocks(quoted(prefix), hidden=sizes.hidden, intermediate=sizes.intermediate)
    if naming is None:
        _plan_stacked(planner, prefix, sizes, plan)
    else:
        _plan_each(planner, prefix, sizes, naming, plan)
    planner.check_calibrated(plan.gate_up, checkpoint_scheme)
    planner.check_calibrated(plan.down, checkpoint_scheme)
    return plan


def _empty_plan(prefix, sizes) -> ExpertPlan:
    """Return the buffers of a layer without the slices that fill them."""
    e, h, i = sizes.num_experts, sizes.hidden, sizes.intermediate
    plan = ExpertPlan(
        None,
        empty_matrices(f"{prefix} gate and up", (e,), sizes.parts * i, h, sizes.parts),
        empty_matrices(f"{prefix} down", (e,), h, i, 1),
    )
    if sizes.bias:
        plan.gate_up.bias = Buffer((e, sizes.parts * i), np.dtype(np.float32))
        plan.down.bias = Buffer((e, h), np.dtype(np.float32))
    return plan


def _examples(prefix):
    """Return names of tensors that a file with experts would have, for a message."""
    return f"tensors such as {prefix}.0.down_proj.weight or {prefix}.down_proj"


def _first_weight(planner, prefix, naming: Naming | None) -> Weight:
    """Return the stored weight of the first expert's down projection, or of all experts'."""
    names = planner.names
    if naming is None:
        packed, join = packed_name(planner, f"{prefix}.down_proj")
        stem = f"{prefix}.down_proj{join}"
    else:
        stem = f"{prefix}.0.{naming.down}."
        packed = f"{stem}{names.packed}"
        packed = packed if packed in planner.tensors else f"{stem}weight"
    found = (planner.find(stem + name) for name in (names.block_scale, *SCALE_NAMES))
    return Weight(planner.find(packed), next(filter(None, found), None))


def _checkpoint_scheme(planner, prefix, sizes, naming, forms=None) -> CheckpointScheme:
    """Return the scheme of the experts; a layer whose experts differ is a problem.

    Args:
      planner: as for `plan_experts`.
      prefix: as for `plan_experts`.
      sizes: as for `plan_experts`.
      naming: the names of an expert's projections.
      forms: the forms that the stored weights may have. None finds them.
    """
    before = len(planner.problems)
    if forms is None:
        forms = find_forms(_first_weight(planner, prefix, naming))
    scales = (planner.names.input_global, FP8_INPUT_SCALE)
    calibrated = functools.cache(
        lambda: any(name.endswith(scales) for name in planner.tensors.under(f"{prefix}."))
    )
    decisions = {}  # scheme -> the first module that has it, and its decision
    for module in _modules(prefix, sizes, naming):
        decision = planner.decide(module, forms, calibrated)
        decisions.setdefault(decision.scheme, (module, decision))
    if len(planner.problems) > before:
        return None
    if len(decisions) > 1:
        said = ", ".join(f"{quoted(m)} {s or 'dense'}" for s, (m, _) in decisions.items())
        planner.problems.append(
            f"{quoted(prefix)}: all experts of a layer must have one scheme, but they differ: "
            f"{said}"
        )
        return None
    scheme, (_, decision) = next(iter(decisions.items()))
    planner.decisions[f"{prefix}.*"] = decision
    return scheme


def _modules(prefix, sizes, naming) -> Iterator[str]:
    """Yield the names by which a quantization config may refer to the experts."""
    if naming is None:
        yield from (first_projection(prefix, sizes), f"{prefix}.down_proj")
        return
    names = [naming.gate, naming.up] if sizes.gated else [naming.up]
    for x in range(sizes.num_experts):
        yield from (f"{prefix}.{x}.{name}" for name in (*names, naming.down))


def _plan_each(planner, prefix, sizes, naming, plan):
    """Plan experts that are stored as ``PREFIX.E.PROJECTION.NAME``."""
    e, h, i = sizes.num_experts, sizes.hidden, sizes.intermediate
    ups = [naming.gate, naming.up] if sizes.gated else [naming.up]
    _refuse_channel_scales(planner, prefix)
    for x in range(e):
        for part, name in enumerate(ups):
            at = (x, slice(part * i, (part + 1) * i))
            _plan_one(
                planner,
                f"{prefix}.{x}.{name}",
                plan.checkpoint_scheme,
                plan.gate_up,
                at,
                part,
                (i, h),
            )
        _plan_one(
            planner,
            f"{prefix}.{x}.{naming.down}",
            plan.checkpoint_scheme,
            plan.down,
            (x,),
            0,
            (h, i),
        )


def _refuse_channel_scales(planner, prefix):
    """Add a problem if an expert has scales of its input channels."""
    found = [name for name in planner.tensors.under(f"{prefix}.") if name.endswith(CHANNEL_SCALE)]
    if found:
        planner.taken.update(found)
        planner.problems.append(
            f"{quoted(found[0])}: scales of the input channels of routed experts are not "
            "supported, because one kernel runs all experts on the same inputs; quantize the "
            "experts with NVFP4 in place of NVFP4_AWQ"
        )


def _plan_one(planner, module, checkpoint_scheme, matrices, at, part, shape):
    """Plan one expert's projection ``[n, k]`` as the rows `at` of the layer's buffers."""
    names = planner.names
    n, k = shape
    planner.take_packed(f"{module}.{names.packed}", n, k)
    planner.take(f"{module}.{names.block_scale}", ["F8_E4M3"], (n, k // BLOCK))
    planner.take(f"{module}.{names.weight_global}", ["F32"], (), (1,))
    matrices.packed.slices.append(TensorSlice(f"{module}.{names.packed}", at))
    matrices.block_scale.slices.append(TensorSlice(f"{module}.{names.block_scale}", at))
    scalar = at[:1] if len(matrices.weight_global.shape) == 1 else (at[0], part)
    matrices.weight_global.slices.append(TensorSlice(f"{module}.{names.weight_global}", scalar, ()))
    place = TensorSlice("", (at[0], part), ())
    planner.input_scale(matrices, f"{module}.{names.input_global}", place, checkpoint_scheme)
    if matrices.bias is not None:
        planner.take(f"{module}.bias", FLOATS, (n,))
        matrices.bias.slices.append(TensorSlice(f"{module}.bias", at))


def _plan_stacked(planner, prefix, sizes, plan):
    """Plan experts that are stored as ``PREFIX.PROJECTION...``, with all experts in one tensor."""
    h, i = sizes.hidden, sizes.intermediate
    first = first_projection(prefix, sizes)
    stems = [(first, plan.gate_up, sizes.parts * i, h), (f"{prefix}.down_proj", plan.down, h, i)]
    for stem, matrices, n, k in stems:
        packed, join = packed_name(planner, stem)
        alternate = i if sizes.interleaved and matrices is plan.gate_up else None
        shape = (sizes.num_experts, n, k)
        _plan_stack(
            planner, (packed, stem + join), plan.checkpoint_scheme, matrices, shape, alternate
        )
        plan_stacked_bias(planner, stem, matrices.bias, alternate)


def _plan_mxfp4(planner, prefix, sizes, naming):
    """Plan experts in MXFP4, which become NVFP4 without rounded activations."""
    scheme = _checkpoint_scheme(planner, prefix, sizes, naming, ())
    format = planner.quant.format
    key = f"{prefix}.*"
    if key in planner.decisions and scheme is not Scheme.W4A16:
        source, said = planner.decisions[key].source, scheme or "dense"
        # DeepSeek-V4 declares FP8 for all modules, and its experts are MXFP4.
        if format is None or not format.mx_experts or not isinstance(scheme, BlockFP8):
            planner.warn(
                f"stored in MXFP4, declared {said}",
                prefix,
                f"{quoted(prefix)}: experts are stored in MXFP4 but declared {said} ({source}): "
                "what is stored decides, and they are cast to NVFP4, w4a16",
            )
        source = f"stored in MXFP4, though declared {said} ({source})"
        planner.decisions[key] = Decision(Scheme.W4A16, source)
    return ExpertPlan(Scheme.W4A16, *plan_mxfp4_experts(planner, prefix, sizes, naming))


def _plan_stack(planner, stored, checkpoint_scheme, matrices, shape, alternate):
    """Plan one projection ``[e, n, k]`` of all experts from one tensor and its scales.

    `alternate` is as for `expert_names.stack`.
    """
    packed, stem = stored
    names = planner.names
    e, n, k = shape
    swapped = _is_swapped(planner, packed, stem + names.block_scale, shape)
    for buffer, name, dtype, columns in (
        (matrices.packed, packed, "U8", k // 2),
        (matrices.block_scale, stem + names.block_scale, "F8_E4M3", k // BLOCK),
    ):
        shapes = [(e, n, columns), (e, columns, n)]
        # If the order is unknown, the message about a wrong shape names both orders.
        planner.take(name, [dtype], *(shapes if swapped is None else [shapes[swapped]]))
        buffer.slices += stack(name, e, bool(swapped), alternate)
    parts = matrices.input_global.shape[-1]
    name = stem + names.weight_global
    info = planner.take(name, ["F32"], *_global_shapes(e, parts))
    tensor_slice = TensorSlice(name, shape=_global_shape(info, e))
    whole = matrices.weight_global
    if tensor_slice.shape and len(whole.shape) == 1:
        tensor_slice = dataclasses.replace(tensor_slice, shape=(e,))
    whole.slices.append(tensor_slice)
    name = stem + names.input_global
    place = TensorSlice("", shape=_global_shape(planner.find(name), e))
    planner.input_scale(matrices, name, place, checkpoint_scheme, *_global_shapes(e, parts))


def _is_swapped(planner, packed, block_scale, shape) -> bool | None:
    """Return whether k comes before n in the stored tensors.

    If the codes fit both orders, the shape of their block scales decides. The result is None if
    neither order fits or nothing decides, which is a problem.
    """
    e, n, k = shape
    for name, columns in ((packed, k // 2), (block_scale, k // BLOCK)):
        info = planner.find(name)
        found = info.shape if info else None
        fits = found == (e, n, columns), found == (e, columns, n)
        if fits[0] != fits[1]:
            return fits[1]
    if planner.find(block_scale) is None and planner.find(packed) is not None:
        planner.problems.append(
            f"{quoted(packed)} is ambiguous: {planner.find(packed)} may be [e, n, k/2] or "
            f"[e, k/2, n] with n = {n} and k = {k}; expected {quoted(block_scale)} beside it, "
            "whose shape would tell"
        )
    return None


def _global_shapes(e, parts) -> list[Shape]:
    """Return the shapes that global scales of one projection may have."""
    shapes = [(), (1,), (e,), (e, 1), (e, 1, 1)]
    return [*shapes, (e, parts)] if parts > 1 else shapes


def _global_shape(info, e) -> Shape:
    """Return the shape to reshape global scales to before they are broadcast to ``[e, parts]``.

    The stored scales may be one number, one per expert, or one per expert and part.
    """
    if info is None or info.shape in ((), (1,)):
        return ()
    return info.shape if len(info.shape) == 2 else (e, 1)
