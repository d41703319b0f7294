"""Find the tensors of one weight in the headers, in NVFP4, in FP8, or in a float dtype.

Each function returns the value that a model gets, with an `Unread` in place of each array. What is
missing or wrong becomes a problem of the `Finder`, and the shapes are right in any case, so that
later steps can find more problems.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.checkpoint.formats.rules import TensorNames
from jax_nvfp4_moe.checkpoint.names import CHANNEL_SCALE, FP8_INPUT_SCALE, FP8_SCALE
from jax_nvfp4_moe.checkpoint.reading.lazy_array import LazyArray
from jax_nvfp4_moe.checkpoint.reading.memory import aligned_empty
from jax_nvfp4_moe.checkpoint.reading.unread import Piece, Shape, Unread
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES
from jax_nvfp4_moe.checkpoint.values import LinearWeights
from jax_nvfp4_moe.checkpoint.weights.finder import CALIBRATED, Finder
from jax_nvfp4_moe.checkpoint.weights.fp8_blocks import find_blocks, find_row_blocks
from jax_nvfp4_moe.checkpoint.weights.mxfp4 import find_mxfp4
from jax_nvfp4_moe.checkpoint.weights.projections import Product, Projection, linear_product
from jax_nvfp4_moe.checkpoint.weights.stored_forms import (
    FLOATS,
    StoredForm,
    Weight,
    find_forms,
    form_of,
)
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Scheme

log = logging.getLogger("jax_nvfp4_moe")

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_F32 = np.dtype(np.float32)
_UINT8 = np.dtype(np.uint8)
_NAN_BITS = 0x7F  # an E4M3 value is NaN if all bits but the sign are set; it has no infinities


def find_linear(
    finder: Finder,
    prefix: str,
    n: int,
    k: int,
    bias: bool | None,
    dtype: Any,
    *,
    decodes: bool = False,
) -> LinearWeights:
    """Find one linear, in the format in which the file stores it.

    Args:
      finder: looks tensors up, and collects problems.
      prefix: the module.
      n: the number of outputs.
      k: the number of inputs.
      bias: whether the linear has a bias. None takes a bias if the file has one.
      dtype: the dtype of dense arrays. None keeps the dtype of the file.
      decodes: whether FP8 with scales of blocks becomes dense. By default, weights with blocks of
        128 x 128 stay in FP8.
    """
    scheme, product = finder.checkpoint_scheme(prefix), linear_product(prefix, n, k)
    keeps_blocks = scheme is BlockFP8.SQUARE and not decodes
    weight, input_scale = (
        (find_row_blocks(finder, product), None)
        if keeps_blocks
        else find_weight(finder, product, scheme, dtype)
    )
    if isinstance(scheme, BlockFP8):
        scheme = FP8ActivationScaling.WEIGHTS if keeps_blocks else None
    if isinstance(scheme, Scheme):
        finder.check_blocks(quoted(prefix), k=k)
    name, channels = f"{prefix}.bias", f"{prefix}.{CHANNEL_SCALE}"
    has_bias = bias or (bias is None and name in finder.tensors)
    scaled = isinstance(scheme, Scheme) and channels in finder.tensors
    return LinearWeights(
        weight,
        finder.array(name, (n,), dtype) if has_bias else None,
        input_scale,
        scheme,
        scheme is not None and finder.names.fp8_by_factor,
        finder.array(channels, (k,), dtype, check=_bad_channel_scales) if scaled else None,
    )


def find_weight(
    finder: Finder, product: Product, scheme: CheckpointScheme, dtype: Any
) -> tuple[Any, Unread | None]:
    """Find the weight of a product, and the input scale of its activations, in one scheme.

    Args:
      finder: looks tensors up, and collects problems.
      product: names the stored matrices.
      scheme: the scheme of the module.
      dtype: the dtype of a weight in a float dtype. None keeps the dtype of the file.
    """
    form = form_of(scheme)
    weight = _FINDERS[form](finder, product, scheme, dtype)
    quantized = form in (StoredForm.NVFP4, StoredForm.FP8)
    return weight, find_input_scale(finder, product, scheme) if quantized else None


def find_dense(finder: Finder, product: Product, scheme: CheckpointScheme, dtype: Any) -> Unread:
    """Find a weight in a float dtype; the arguments are those of `find_weight`."""
    del scheme
    pieces: list[Piece] = []
    for one in product.projections:
        name = f"{one.stem}.weight" if one.experts is None else one.stem
        info = finder.find(name)
        dtype = dtype or (STORED_TYPES[info.dtype].numpy if info else None)
        pieces += _take_whole(finder, one, name, FLOATS)
        unused = [f"{one.stem}.{finder.names.input_global}"] if info else []
        finder.ignore(unused, "input scales of dense modules are ignored")
    return Unread(product.shape(product.k), np.dtype(dtype or _F32), pieces)


def find_bias(finder: Finder, product: Product, dtype: Any) -> Unread:
    """Find the biases ``[e, n]`` of experts."""
    pieces: list[Piece] = []
    for one in product.projections:
        name = f"{one.stem}.bias"
        if one.experts is not None and name not in finder.tensors:
            name = f"{one.stem}_bias"
        finder.take(name, FLOATS, (*one.lead, one.n))
        pieces += one.pieces(name)
    return Unread(product.shape(), np.dtype(dtype), pieces)


def find_nvfp4(finder: Finder, product: Product, scheme: Any, dtype: Any) -> NVFP4Tensor:
    """Find a weight that is NVFP4 or becomes NVFP4; the arguments are those of `find_weight`."""
    del scheme, dtype
    form = _fp4_form(finder, product)
    if form is StoredForm.MXFP4:
        return find_mxfp4(finder, product)
    names, blocks = finder.names, -(-product.k // BLOCK)
    group = 2 * BLOCK if form is StoredForm.GROUPS else BLOCK
    packed = Unread(product.shape(blocks * BLOCK // 2), _UINT8)
    block_scale = Unread(product.shape(-(-product.k // group)), _E4M3, check=_bad_block_scales)
    apart = product.parts > 1
    scales = (*product.lead, product.parts) if apart else product.lead
    stored = Unread(scales, _F32, check=functools.partial(_bad_global, names))
    for one in product.projections:
        name, stem = one.names(finder, names.packed)
        swapped = None if one.experts is None else _swapped_blocks(finder, name, stem, one, group)
        scale, whole = stem + names.block_scale, stem + names.weight_global
        _take_columns(finder, one, name, "U8", one.k // 2, swapped)
        _take_columns(finder, one, scale, "F8_E4M3", one.k // group, swapped)
        finder.take(whole, ["F32"], *_scalar_shapes(one, product.parts))
        packed.pieces.extend(one.pieces(name, bool(swapped)))
        block_scale.pieces.extend(one.pieces(scale, bool(swapped)))
        stored.pieces.append(_scalar(finder, one, whole, apart))
    if group != BLOCK:
        repeat = functools.partial(_open_repeated, block_scale, group // BLOCK)
        block_scale = Unread(product.shape(blocks), _E4M3, decode=repeat)
    leaves: Any = (packed, block_scale, stored, None)
    if names.divides:
        reciprocal = functools.partial(_open_reciprocal, names, stored)
        leaves = packed, block_scale, Unread(scales, _F32, decode=reciprocal), stored
    return NVFP4Tensor(*leaves)


def _fp4_form(finder, product: Product) -> StoredForm | None:
    """Return the form of 4-bit codes, from the first stored matrix; None if it cannot tell."""
    for one in product.projections[:1]:
        name, stem = one.names(finder, finder.names.packed)
        weight = Weight(finder.find(name), finder.find(stem + finder.names.block_scale))
        return next(iter(find_forms(weight)), None)
    return None


def _open_repeated(stored: Unread, repeats: int, reader: Any) -> LazyArray:
    """Return a lazy array of block scales, each of which stands for `repeats` blocks in a row."""
    opened = reader.open(stored)

    def read(region):
        *rows, columns = region
        first, stop = columns.start // repeats, -(-columns.stop // repeats)
        found = np.repeat(opened[(*rows, slice(first, stop))].view(_UINT8), repeats, axis=-1)
        start = columns.start - first * repeats
        kept = found[..., start : start + columns.stop - columns.start]
        array = aligned_empty(kept.shape, _UINT8)
        array[...] = kept
        return array.view(stored.dtype)

    return LazyArray((*stored.shape[:-1], stored.shape[-1] * repeats), stored.dtype, read)


def find_fp8(finder: Finder, product: Product, scheme: Any, dtype: Any) -> FP8Tensor:
    """Find a weight in FP8 with one scale for each matrix or row, as `find_weight`."""
    del scheme, dtype
    values: Any = Unread(product.shape(product.k), _E4M3)
    scale: Any = Unread(product.shape(), _F32, check=_bad_scales)
    for one in product.projections:
        name, stem = one.names(finder, "weight")
        values.pieces.extend(_take_whole(finder, one, name, ["F8_E4M3"]))
        scale.pieces.extend(_take_row_scales(finder, one, stem + FP8_SCALE))
    return FP8Tensor(values, scale)


_FINDERS: Mapping[StoredForm, Callable[..., Any]] = {
    StoredForm.DENSE: find_dense,
    StoredForm.NVFP4: find_nvfp4,
    StoredForm.FP8: find_fp8,
    StoredForm.BLOCKS: find_blocks,
    StoredForm.MXFP8: find_blocks,
}


def find_input_scale(finder: Finder, product: Product, scheme: CheckpointScheme) -> Unread | None:
    """Find the input scales of a product: float32 ``[e]``, or a scalar for a linear.

    Returns:
      None if the load reads none, or if the file has none. The latter is a problem if the scheme
      needs them and the load requires them.
    """
    fp8 = isinstance(scheme, FP8ActivationScaling)
    leaf = FP8_INPUT_SCALE if fp8 else finder.names.input_global
    names = {one.names(finder, "weight")[1] + leaf: one for one in product.projections}
    if not finder.reads_input_scale(scheme):
        finder.ignore(names, f"input scales are ignored: {_why_ignored(scheme)}")
        return None
    whole = Unread((*product.lead, product.parts), _F32)
    for name, one in names.items():
        shapes = (*_scalar_shapes(one, product.parts), (1, 1))
        if name in finder.tensors and finder.take(name, FLOATS, *shapes):
            whole.pieces.append(_scalar(finder, one, name, True))
    required = finder.input_scales == "required"
    if whole.pieces:
        convert = None if fp8 else finder.names.to_scale
        read = functools.partial(_read_input_scale, whole, product.label, required, convert)
        return Unread(product.lead, _F32, decode=read)
    if required and product.projections:
        finder.problems.append(
            f"{quoted(product.label)} is declared {scheme}, but the file has no input scales for "
            f"it; expected tensors named {leaf}"
        )
    return None


def _why_ignored(scheme) -> str:
    if scheme in CALIBRATED:
        return "this load does not round activations"
    weights = scheme in (Scheme.W4A16, FP8ActivationScaling.WEIGHTS)
    declared = "quantized weights only" if weights else "dynamic input scales"
    return f"the checkpoint declares {declared}"


def _take_columns(finder, one: Projection, name, dtype, columns, swapped):
    """Take a matrix of codes or block scales; 4-bit elements may count as such."""
    lead = one.lead
    if dtype == "U8" and (info := finder.find(name)) is not None and info.dtype == "F4":
        finder.take(name, ["F4"], (*lead, one.n, one.k))
        return
    shapes = [(*lead, one.n, columns)]
    if one.experts is not None:
        shapes.append((*lead, columns, one.n))
        # If the order is unknown, the message about a wrong shape names both orders.
        shapes = shapes if swapped is None else [shapes[swapped]]
    finder.take(name, [dtype], *shapes)


def _swapped_blocks(finder, packed, stem, one: Projection, group: int) -> bool | None:
    """Return whether k comes before n in a stack of NVFP4.

    If the codes fit both orders, the shape of their block scales decides. The result is None if
    neither order fits or nothing decides, which is a problem. Elements of four bits are stored
    along k, because the two codes of a byte have the same row.
    """
    e, n, k = one.experts, one.n, one.k
    codes = finder.find(packed)
    if codes is not None and codes.dtype == "F4":
        return False
    block_scale = stem + finder.names.block_scale
    for name, columns in ((packed, k // 2), (block_scale, k // group)):
        info = finder.find(name)
        found = info.shape if info else None
        fits = found == (e, n, columns), found == (e, columns, n)
        if fits[0] != fits[1]:
            return fits[1]
    if finder.find(block_scale) is None and codes is not None:
        finder.problems.append(
            f"{quoted(packed)} is ambiguous: {codes} may be [e, n, k/2] or "
            f"[e, k/2, n] with n = {n} and k = {k}; expected {quoted(block_scale)} beside it, "
            "whose shape would tell"
        )
    return None


def _take_whole(finder, one: Projection, name, dtypes) -> list[Piece]:
    """Take a matrix without block scales, and return how it fills the array of its product."""
    n, k = one.n, one.k
    swapped = one.experts is not None and one.inputs_first
    if swapped is None and n != k:
        info = finder.find(name)
        swapped = info is not None and info.shape == (*one.lead, k, n)
    elif swapped is None:
        finder.problems.append(
            f"{quoted(name)} is ambiguous: it may be [e, n, k] or [e, k, n], because n = {n} and "
            f"k = {k} are equal"
        )
    finder.take(name, dtypes, (*one.lead, k, n) if swapped else (*one.lead, n, k))
    return one.pieces(name, bool(swapped))


def _take_row_scales(finder, one: Projection, name) -> list[Piece]:
    """Take the scales of FP8 values: one for all experts, one for each matrix, or for each row."""
    e, n = one.experts, one.n
    if e is None:
        info = finder.take(name, FLOATS, (), (1,), (1, 1), (n,), (n, 1))
        single = info is None or math.prod(info.shape) == 1
        return [Piece(name, one.at, () if single else (n,))]
    single = _scalar_shapes(one, 1)
    info = finder.take(name, FLOATS, *single, (e, n), (e, n, 1), (e, 1, n))
    if info is None or info.shape in single:
        return [_scalar(finder, one, name, True)]
    if one.alternate is not None and len(info.shape) == 3:
        finder.problems.append(
            f"{quoted(name)}: {info} is not supported for gate and up rows that alternate; "
            f"expected {[e, n]}"
        )
    return [piece._replace(shape=(e, -1)) for piece in one.pieces(name)]


def _scalar_shapes(one: Projection, parts: int) -> list[Shape]:
    """Return the shapes that one number may have, or one number for each matrix of a stack."""
    e = one.experts
    if e is None:
        return [(), (1,)]
    shapes = [(), (1,), (e,), (e, 1), (e, 1, 1)]
    return [*shapes, (e, parts)] if parts > 1 else shapes


def _scalar(finder, one: Projection, name, by_part: bool) -> Piece:
    """Return how one number, or one number for each matrix of a stack, fills an array.

    Args:
      finder: looks tensors up.
      one: the matrix, or the stack.
      name: the name of the tensor.
      by_part: whether the array has an axis for the parts, as in ``[e, parts]``, or is ``[e]``.
    """
    if one.experts is None:
        return Piece(name, (*one.at[:1], one.part) if by_part else one.at[:1], ())
    info, e = finder.find(name), one.experts
    if info is None or info.shape in ((), (1,)):
        return Piece(name, shape=())
    if not by_part:
        return Piece(name, shape=(e,))
    return Piece(name, shape=info.shape if len(info.shape) == 2 else (e, 1))


def _open_reciprocal(names: TensorNames, stored: Unread, reader: Any) -> Any:
    return reader.open(stored).map(names.to_scale)


def _read_input_scale(
    whole: Unread,
    label: str,
    required: bool,
    convert: Callable[[np.ndarray], np.ndarray] | None,
    reader: Any,
) -> np.ndarray | None:
    """Read the input scales of one product.

    A scale that is missing, or not a positive finite number, is replaced by the largest scale of
    the layer. So is one that is denormal, or whose reciprocal is: kernels take it for 0, and the
    expert would return zeros. Gate and up read the same activations: if their scales differ, the
    larger one is used.

    Args:
      whole: ``[..., parts]``, the scales as they are stored. Every shard reads the scales of all
        experts, because an invalid scale is replaced by the largest of the whole layer.
      label: the module, for messages.
      required: whether it is a problem if no scale is valid.
      convert: makes scales of what the file stores; None if it stores scales.
      reader: a `reader.Reader`.

    Returns:
      float32 ``[...]``. None if no scale is valid.
    """
    scales = reader.open(whole)[()]
    scales = scales if convert is None else convert(scales)
    valid = _are_usable(scales)
    if not valid.any():
        message = f"{quoted(label)}: none of {scales.size} input scales is a positive finite number"
        if required:
            reader.problems.append(message)
        else:
            log.warning("%s, so that activations cannot be rounded with them", message)
        return None
    largest = scales[valid].max()
    if not valid.all():
        log.warning(
            "%s: %d of %d input scales are missing, zero or not finite, or denormal; they are "
            "replaced by the layer's largest input scale, %.6g",
            quoted(label),
            np.count_nonzero(~valid),
            scales.size,
            largest,
        )
        scales = np.where(valid, scales, largest)
    widest = scales.max(axis=-1)
    differ = np.count_nonzero(scales.min(axis=-1) != widest)
    if differ:
        log.info(
            "%s: the input scales of gate and up differ in %d experts; the larger one is used",
            quoted(label),
            differ,
        )
    return np.asarray(widest)


def _are_usable(scales):
    """Return which input scales are positive normal numbers with normal reciprocals."""
    smallest = np.finfo(np.float32).tiny
    usable = np.isfinite(scales) & (scales >= smallest)
    return usable & (np.float32(1) / np.where(usable, scales, np.float32(1)) >= smallest)


def _bad_block_scales(part):
    """Return what is wrong with E4M3 block scales: none may be NaN."""
    signed = part.view(np.int8)
    if signed.min(initial=0) >= 0 and signed.max(initial=0) < _NAN_BITS:
        return None  # scales are seldom negative, and two reductions make no arrays
    part = part.view(np.uint8)
    count = np.count_nonzero((part & _NAN_BITS) == _NAN_BITS)
    return f"{count} of {part.size} block scales are NaN" if count else None


def _bad_global(names: TensorNames, stored: np.ndarray) -> str | None:
    """Return what is wrong with global scales.

    The scales must be finite. If the format divides by them, their reciprocals must be finite too.
    """
    finite = np.isfinite(stored) & np.isfinite(names.to_scale(stored))
    if finite.all():
        return None
    expected = "finite and not zero" if names.divides else "finite"
    return f"expected a global scale that is {expected}, got {stored[~finite].flat[0]}"


def _bad_scales(part):
    return None if np.isfinite(part).all() else "expected finite scales, got NaN or infinity"


def _bad_channel_scales(part):
    """Return what is wrong with scales of input channels: a tool divides the weights by them."""
    part = part.astype(np.float32)
    sound = np.isfinite(part) & (part > 0)
    count = np.count_nonzero(~sound)
    return f"{count} of {part.size} channel scales are not positive and finite" if count else None
