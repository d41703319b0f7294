"""Plan the experts of one layer: one tensor an expert and projection, or all experts stacked.

Stacked matrices are ``[e, n, k]`` or, as Llama 4 and gpt-oss store them, ``[e, k, n]``; in gpt-oss
gate and up rows alternate as well.

Adding a naming is adding a row to `PER_EXPERT`.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.checkpoint.plan import (
    FLOATS,
    Buffer,
    Matrices,
    Piece,
    Planner,
    Shape,
    empty_matrices,
)
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES
from jax_nvfp4_moe.formats import BLOCK
from jax_nvfp4_moe.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class Naming:
    """Names of the projections of one expert, below ``EXPERTS.E.``."""

    gate: str | None
    up: str
    down: str


PER_EXPERT = (
    Naming("gate_proj", "up_proj", "down_proj"),  # Qwen, DeepSeek, GLM, Kimi; Nemotron: no gate
    Naming("w1", "w3", "w2"),  # Mixtral, MiniMax
    Naming("linear", "linear_v", "linear_1"),  # Grok
)


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
    """The sizes that a model asks for.

    Attributes:
      num_experts: e.
      hidden: h.
      intermediate: i.
      gated: whether there are gate rows.
      bias: whether both products add a bias.
      interleaved: whether gate and up rows alternate where one tensor holds both.
      inputs_first: whether stacked dense matrices are ``[e, k, n]``; None tells by their shapes.
    """

    num_experts: int
    hidden: int
    intermediate: int
    gated: bool
    bias: bool
    interleaved: bool = False
    inputs_first: bool | None = None

    @property
    def parts(self) -> int:
        """Projections in the first product."""
        return 2 if self.gated else 1


@dataclasses.dataclass
class ExpertPlan:
    """Buffers of one layer's experts.

    Attributes:
      declared: the scheme of all of them.
      gate_up: ``[e, 2i, h]``, or ``[e, i, h]`` without a gate.
      down: ``[e, h, i]``.
    """

    declared: Scheme | None
    gate_up: Matrices
    down: Matrices


@dataclasses.dataclass
class DenseExpertPlan:
    """Buffers of one layer's experts in a float dtype; shapes as in `ExpertPlan`."""

    gate_up: Buffer
    down: Buffer
    gate_up_bias: Buffer | None
    down_bias: Buffer | None


def plan_experts(planner: Planner, prefix: str, sizes: ExpertSizes) -> ExpertPlan:
    """Plan the experts under `prefix`, such as "model.layers.0.mlp.experts".

    What is missing or wrong goes to ``planner.problems``; the plan's buffers have the right
    shapes in any case.
    """
    e, h, i = sizes.num_experts, sizes.hidden, sizes.intermediate
    plan = ExpertPlan(
        None,
        empty_matrices(f"{prefix} gate and up", (e,), sizes.parts * i, h, sizes.parts),
        empty_matrices(f"{prefix} down", (e,), h, i, 1),
    )
    if sizes.bias:
        plan.gate_up.bias = Buffer((e, sizes.parts * i), np.dtype(np.float32))
        plan.down.bias = Buffer((e, h), np.dtype(np.float32))
    planner.check_blocks(quoted(prefix), hidden=h, intermediate=i)
    if next(planner.tensors.under(f"{prefix}."), None) is None:
        planner.problems.append(f"{quoted(prefix)}: no experts; expected {_examples(prefix)}")
        return plan
    naming = _naming(planner, prefix, sizes)
    if naming is None:
        _plan_stacked(planner, prefix, sizes, plan)
    else:
        _plan_each(planner, prefix, sizes, naming, plan)
    planner.check_calibrated(plan.gate_up, plan.declared)
    planner.check_calibrated(plan.down, plan.declared)
    return plan


def _examples(prefix):
    return f"tensors such as {prefix}.0.down_proj.weight or {prefix}.down_proj"


def _naming(planner, prefix, sizes) -> Naming | None:
    """Return the naming in use, None for all experts in one tensor."""

    def used(stem):
        return next(planner.tensors.under(stem), None) is not None

    for naming in PER_EXPERT:
        if any(used(f"{prefix}.{e}.{naming.down}.") for e in range(sizes.num_experts)):
            return naming
    return None if used(f"{prefix}.down_proj") else PER_EXPERT[0]


def _refuse_dense(planner, prefix, packed) -> bool:
    """Whether the experts are not NVFP4, which is then one of the problems."""
    info = planner.find(packed) or planner.find(packed.replace("weight_packed", "weight"))
    if info is None or info.dtype not in FLOATS:
        return False
    planner.problems.append(
        f"{quoted(prefix)}: experts are not NVFP4 ({quoted(info.name)} is {info}): quantize the "
        "checkpoint first"
    )
    planner.taken.update(planner.tensors.under(f"{prefix}."))
    return True


def _declared(planner, prefix, modules: Iterator[str]) -> Scheme | None:
    """Return the scheme on which all `modules` agree."""
    before = len(planner.problems)
    schemes = {planner.declared(module): module for module in modules}
    if len(planner.problems) > before:
        return None
    if len(schemes) > 1:
        said = ", ".join(f"{quoted(m)} {s or 'dense'}" for s, m in schemes.items())
        planner.problems.append(f"{quoted(prefix)}: experts of one layer differ: {said}")
        return None
    scheme = next(iter(schemes))
    if scheme is None:
        sources = ", ".join(rules.source for rules in planner.quant.rules) or "no quantization"
        planner.problems.append(f"{quoted(prefix)}: experts are declared dense ({sources})")
    return scheme


def _plan_each(planner, prefix, sizes, naming, plan):
    """Plan ``PREFIX.E.PROJECTION.NAME``."""
    e, h, i = sizes.num_experts, sizes.hidden, sizes.intermediate
    if _refuse_dense(planner, prefix, f"{prefix}.0.{naming.down}.{planner.names.packed}"):
        return
    ups = [naming.gate, naming.up] if sizes.gated else [naming.up]
    projections = [*ups, naming.down]
    modules = (f"{prefix}.{x}.{name}" for x in range(e) for name in projections)
    plan.declared = _declared(planner, prefix, modules)
    for x in range(e):
        for part, name in enumerate(ups):
            at = (x, slice(part * i, (part + 1) * i))
            _plan_one(
                planner, f"{prefix}.{x}.{name}", plan.declared, plan.gate_up, at, part, (i, h)
            )
        _plan_one(planner, f"{prefix}.{x}.{naming.down}", plan.declared, plan.down, (x,), 0, (h, i))


def _plan_one(planner, module, declared, matrices, at, part, shape):
    """Plan one expert's projection ``[n, k]`` as the rows `at` of the layer's buffers."""
    names = planner.names
    n, k = shape
    planner.take_packed(f"{module}.{names.packed}", n, k)
    planner.take(f"{module}.{names.block_scale}", ["F8_E4M3"], (n, k // BLOCK))
    planner.take(f"{module}.{names.weight_global}", ["F32"], (), (1,))
    matrices.packed.pieces.append(Piece(f"{module}.{names.packed}", at))
    matrices.block_scale.pieces.append(Piece(f"{module}.{names.block_scale}", at))
    scalar = at[:1] if len(matrices.weight_global.shape) == 1 else (at[0], part)
    matrices.weight_global.pieces.append(Piece(f"{module}.{names.weight_global}", scalar, ()))
    place = Piece("", (at[0], part), ())
    planner.input_scale(matrices, f"{module}.{names.input_global}", place, declared)
    if matrices.bias is not None:
        planner.take(f"{module}.bias", FLOATS, (n,))
        matrices.bias.pieces.append(Piece(f"{module}.bias", at))


def _plan_stacked(planner, prefix, sizes, plan):
    """Plan ``PREFIX.PROJECTION*`` with all experts in one tensor."""
    h, i = sizes.hidden, sizes.intermediate
    first = f"{prefix}.gate_up_proj" if sizes.gated else f"{prefix}.up_proj"
    stems = [(first, plan.gate_up, sizes.parts * i, h), (f"{prefix}.down_proj", plan.down, h, i)]
    if _refuse_mxfp4(planner, prefix, [stem for stem, *_ in stems]):
        return
    found = [_packed_name(planner, stem) for stem, *_ in stems]
    if any(_refuse_dense(planner, prefix, name) for name, _ in found):
        return
    plan.declared = _declared(planner, prefix, (stem for stem, *_ in stems))
    for (stem, matrices, n, k), (packed, join) in zip(stems, found, strict=True):
        alternate = i if sizes.interleaved and matrices is plan.gate_up else None
        shape = (sizes.num_experts, n, k)
        _plan_stack(planner, (packed, stem + join), plan.declared, matrices, shape, alternate)
        _plan_stacked_bias(planner, stem, matrices.bias, alternate)


def _refuse_mxfp4(planner, prefix, stems) -> bool:
    """Whether the experts are MXFP4, which is then one of the problems."""
    name = next((f"{stem}_blocks" for stem in stems if f"{stem}_blocks" in planner.tensors), None)
    if name is None:
        return False
    planner.problems.append(
        f"{quoted(prefix)}: experts are MXFP4 ({quoted(name)} is {planner.find(name)}), blocks of "
        "32 with scales that are powers of two, and not NVFP4: quantize the checkpoint to NVFP4 "
        "first"
    )
    planner.taken.update(planner.tensors.under(f"{prefix}."))
    return True


def _packed_name(planner, stem) -> tuple[str, str]:
    """Return the name of the codes and what stands between `stem` and the names of scales."""
    packed = planner.names.packed
    for name, join in ((stem, "_"), (f"{stem}.{packed}", "."), (f"{stem}_{packed}", "_")):
        if name in planner.tensors:
            return name, join
    return stem, "_"


def _plan_stack(planner, stored, declared, matrices, shape, alternate):
    """Plan one projection of all experts, logical ``[e, n, k]``; `alternate` as in `_stack`."""
    packed, stem = stored
    names = planner.names
    e, n, k = shape
    swapped = _is_swapped(planner, packed, stem + names.block_scale, shape)
    for buffer, name, dtype, columns in (
        (matrices.packed, packed, "U8", k // 2),
        (matrices.block_scale, stem + names.block_scale, "F8_E4M3", k // BLOCK),
    ):
        shapes = [(e, n, columns), (e, columns, n)]
        # Where neither order is known both are named, as what was expected.
        planner.take(name, [dtype], *(shapes if swapped is None else [shapes[swapped]]))
        buffer.pieces += _stack(name, e, bool(swapped), alternate)
    parts = matrices.input_global.shape[-1]
    name = stem + names.weight_global
    info = planner.take(name, ["F32"], *_global_shapes(e, parts))
    piece = Piece(name, shape=_global_shape(info, e))
    whole = matrices.weight_global
    if piece.shape and len(whole.shape) == 1:
        piece = dataclasses.replace(piece, shape=(e,))
    whole.pieces.append(piece)
    name = stem + names.input_global
    place = Piece("", shape=_global_shape(planner.find(name), e))
    planner.input_scale(matrices, name, place, declared, *_global_shapes(e, parts))


def _plan_stacked_bias(planner, stem, bias, alternate):
    """Plan the bias ``[e, n]`` of one projection, where the model has one."""
    if bias is None:
        return
    name = f"{stem}.bias" if f"{stem}.bias" in planner.tensors else f"{stem}_bias"
    planner.take(name, FLOATS, bias.shape)
    bias.pieces += _stack(name, bias.shape[0], False, alternate)


def _stack(name, e, swapped, alternate) -> list[Piece]:
    """Return the pieces that fill ``[e, n, ...]`` from the tensor `name` of all `e` experts.

    Args:
      name: of the tensor.
      e: experts.
      swapped: whether it is ``[e, ..., n]``.
      alternate: number of gate rows, where gate and up rows alternate; None where they do not.
    """
    every = slice(None)
    rows = [(every, every)]
    if alternate is not None:
        halves = slice(0, alternate), slice(alternate, 2 * alternate)
        rows = [(half, slice(first, None, 2)) for first, half in enumerate(halves)]
    elif not swapped:
        return [Piece(name)]
    if not swapped:
        return [Piece(name, (every, at), part=(every, part)) for at, part in rows]
    return [
        Piece(name, (x, at), part=(x, every, part), swapped=True)
        for x in range(e)
        for at, part in rows
    ]


def _is_swapped(planner, packed, block_scale, shape) -> bool | None:
    """Whether k comes before n; where the codes fit both ways, their scales tell.

    None where neither fits, or nothing tells: then that is a problem.
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
            f"{quoted(packed)}: {planner.find(packed)} may be [e, n, k/2] or [e, k/2, n] with "
            f"n = {n} and k = {k}: ambiguous without {quoted(block_scale)}"
        )
    return None


def _global_shapes(e, parts) -> list[Shape]:
    shapes = [(), (1,), (e,), (e, 1), (e, 1, 1)]
    return [*shapes, (e, parts)] if parts > 1 else shapes


def _global_shape(info, e) -> Shape:
    """Return the shape that spreads one number, one an expert, or one an expert and part."""
    if info is None or info.shape in ((), (1,)):
        return ()
    return info.shape if len(info.shape) == 2 else (e, 1)


def plan_dense_experts(
    planner: Planner, prefix: str, sizes: ExpertSizes, dtype: np.dtype | None
) -> DenseExpertPlan:
    """Plan experts that are not quantized; `dtype` None keeps that of the file."""
    e, h, i = sizes.num_experts, sizes.hidden, sizes.intermediate
    rows = sizes.parts * i
    naming = _naming(planner, prefix, sizes)
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
        first = f"{prefix}.gate_up_proj" if sizes.gated else f"{prefix}.up_proj"
        alternate = i if sizes.interleaved else None
        _plan_dense_stack(planner, first, plan.gate_up, sizes.inputs_first, alternate)
        _plan_dense_stack(planner, f"{prefix}.down_proj", plan.down, sizes.inputs_first, None)
        _plan_stacked_bias(planner, first, plan.gate_up_bias, alternate)
        _plan_stacked_bias(planner, f"{prefix}.down_proj", plan.down_bias, None)
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
    weight.pieces.append(Piece(f"{module}.weight", at))
    if bias is not None:
        planner.take(f"{module}.bias", FLOATS, (n,))
        bias.pieces.append(Piece(f"{module}.bias", at))


def _plan_dense_stack(planner, stem, weight, inputs_first, alternate):
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
    planner.take(stem, FLOATS, shapes[bool(swapped)])
    weight.pieces += _stack(stem, e, bool(swapped), alternate)
