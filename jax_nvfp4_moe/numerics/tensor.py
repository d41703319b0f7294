"""Weights as pytrees: `NVFP4Tensor`, `MoEParams` and `DenseExperts`.

NVFP4 weights are either in the canonical layout or in the layout of a kernel.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_nvfp4_moe.numerics.arguments import as_array, describe
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.layouts import (
    CANONICAL,
    find_layout,
    from_layout,
    name_of_bytes,
    to_layout,
)
from jax_nvfp4_moe.numerics.not_differentiable import not_differentiable
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK, check_blocks, decode_scale, dequantize, divide
from jax_nvfp4_moe.numerics.nvfp4 import quantize as quantize_arrays
from jax_nvfp4_moe.numerics.qwix_arrays import QArrayLike, make_qarray, read_qarray
from jax_nvfp4_moe.numerics.rounding import ALGORITHMS, quantize_weight

# Errors about shapes end with this hint, because a missing transpose is the usual cause.
_OUTPUTS_FIRST = (
    "Matrices are [experts, outputs, inputs]. Flax stores kernels as [experts, inputs, outputs]: "
    "transpose them with kernel.swapaxes(1, 2)"
)


@dataclasses.dataclass(frozen=True)
class NVFP4Tensor:
    """Matrices in NVFP4: ``w[..., n, k] = code * (block_scale * global_scale)``.

    In the canonical layout the arrays have the shapes below. Another layout permutes bytes inside
    `packed` and `block_scale`, and may pad rows and columns. The constructor checks nothing, so
    that tree operations may store any leaf in the fields; `from_packed` checks dtypes and shapes.

    The layout is part of the paths of the arrays in a pytree, such as ``.packed_cpu_16x16``. A
    checkpointer then refuses to restore bytes into another layout. The paths of a canonical tensor
    are the plain names of its fields.

    Attributes:
      packed: uint8 ``[..., n, k/2]``, two E2M1 codes per byte, with the even column in the low
        nibble.
      block_scale: float8_e4m3fn ``[..., n, k/16]``, one scale for each 16 elements of a row.
      global_scale: float32 ``[...]``, one scale per matrix; ``[..., 2]``, one for each half of the
        rows (the gate and up halves of an expert); or ``[..., n]``, one for each row (several
        matrices that are stored as one).
      global_divisor: float32 of the shape of `global_scale`, or None (default). compressed-tensors
        stores the reciprocal of the global scale. Dequantization then divides by it, so that values
        have the same bits as that tool's. Kernels multiply by `global_scale`, its rounded
        reciprocal.
      layout: name of the byte order, a key of `numerics.layouts.LAYOUTS`; "canonical" by default.
        Static.
      rows: n before the layout padded it; None if the layout did not pad rows. Static.
      columns: k before the layout padded it; None if the layout did not pad columns. Static.

    Example:
      >>> import jax
      >>> import jax_nvfp4_moe as nvfp4
      >>> weight = nvfp4.quantize(jax.random.normal(jax.random.key(0), (8, 64)))
      >>> weight.shape, weight.packed.shape, weight.block_scale.shape
      ((8, 64), (8, 32), (8, 4))
      >>> weight.nbytes  # 4.5 bits per value and one float32
      292
      >>> weight.dequantize().dtype.name
      'float32'

    Source: NVIDIA ModelOpt's NVFP4 checkpoints store the same bytes.
    """

    packed: jax.Array
    block_scale: jax.Array
    global_scale: jax.Array
    global_divisor: jax.Array | None = None
    layout: str = dataclasses.field(default=CANONICAL, metadata={"static": True})
    rows: int | None = dataclasses.field(default=None, metadata={"static": True})
    columns: int | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def from_packed(cls, packed, block_scale, global_scale) -> "NVFP4Tensor":
        """Build a tensor in the canonical layout from its bytes and scales.

        Args:
          packed: uint8 ``[..., n, k/2]``, two E2M1 codes per byte, with the even column in the low
            nibble.
          block_scale: float8_e4m3fn ``[..., n, k/16]``.
          global_scale: ``[...]``, one scale per matrix; ``[..., 2]``, one for each half of the
            rows; or ``[..., n]``, one for each row. Taken as float32. A number is allowed for a
            single matrix.

        Returns:
          An `NVFP4Tensor` with logical shape ``[..., n, k]``.

        Raises:
          ValueError: if a dtype is wrong, the shapes disagree, or k is not a multiple of 16.

        Example:
          >>> import jax.numpy as jnp
          >>> import jax_nvfp4_moe as nvfp4
          >>> packed = jnp.full((4, 8), 0x22, jnp.uint8)  # all codes are 2, which stands for 1
          >>> block_scale = jnp.ones((4, 1), jnp.float8_e4m3fn)
          >>> tensor = nvfp4.NVFP4Tensor.from_packed(packed, block_scale, 0.5)
          >>> tensor.dequantize()[0, :2].tolist()
          [0.5, 0.5]
        """
        packed, block_scale = as_array("packed", packed), as_array("block_scale", block_scale)
        global_scale = as_array("global_scale", global_scale).astype(jnp.float32)
        _check_dtype("packed", packed, jnp.uint8)
        _check_dtype("block_scale", block_scale, jnp.float8_e4m3fn)
        check_blocks("packed, counted in codes", (*packed.shape[:-1], 2 * packed.shape[-1]))
        lead = packed.shape[:-2]
        scales = (*packed.shape[:-1], packed.shape[-1] // 8)
        if block_scale.shape != scales:
            raise ValueError(
                f"block_scale: expected shape {scales}, one scale per {BLOCK} codes; "
                f"got {block_scale.shape}"
            )
        by_row = packed.shape[:-1]
        if global_scale.shape not in (lead, (*lead, 2), by_row):
            raise ValueError(
                f"global_scale: expected shape {lead}, one scale per matrix, {(*lead, 2)}, one per "
                f"half of the rows, or {by_row}, one per row; got {global_scale.shape}"
            )
        return cls(packed, block_scale, global_scale)

    @classmethod
    def from_qarray(cls, array: QArrayLike, axis: int = -2) -> "NVFP4Tensor":
        """Convert an NVFP4 array of Qwix, without loss; Qwix need not be installed.

        Qwix has no global scale: it becomes 1.

        Args:
          array: a `qwix.QArray` of float4_e2m1fn values, as ``qwix.quantize(w, "nvfp4", ...)``
            returns it. Its scales are E4M3 numbers in any float dtype, one for each 16 values along
            `axis`, or for more values.
          axis: the axis along which a scale has 16 values, -2 or -1. The default is -2, for the
            kernels ``[..., k, n]`` of Flax.

        Returns:
          An `NVFP4Tensor` ``[..., n, k]`` in the canonical layout. `axis` is its last axis.

        Raises:
          TypeError: if `array` is no array of Qwix.
          ValueError: if it has other values or scales, or a zero point. Under `jax.jit`, values of
            scales are unknown: their dtype must be float8_e4m3fn, or `array.qtype` "nvfp4".

        Example:
          >>> import types
          >>> import jax
          >>> import jax.numpy as jnp
          >>> import jax_nvfp4_moe as nvfp4
          >>> array = types.SimpleNamespace(  # has the fields of a `qwix.QArray`
          ...     qvalue=jnp.full((3, 32, 64), 6, jnp.float4_e2m1fn),
          ...     scale=jnp.full((3, 2, 64), 0.5),
          ...     zero_point=None,
          ...     qtype="nvfp4",
          ... )
          >>> weight = nvfp4.NVFP4Tensor.from_qarray(array)
          >>> weight.shape, float(weight.dequantize()[0, 0, 0])
          ((3, 64, 32), 3.0)

        Source: the arrays of Qwix 0.1.8.
        """
        if not isinstance(array, QArrayLike):
            raise TypeError(f"array: expected a qwix.QArray, got {describe(array)}")
        packed, block_scale = read_qarray(array, axis)
        return cls(packed, block_scale, jnp.ones(packed.shape[:-2], jnp.float32))

    def to_qarray(self, axis: int = -2):
        """Convert to an array of Qwix, without loss; needs the extra `qwix`.

        The scales are ``block_scale * global_scale`` in float32, because Qwix has no global scale.

        Args:
          axis: the axis of the result along which a scale has 16 values, -2 or -1. The default is
            -2: the result is then a kernel ``[..., k, n]`` of Flax.

        Returns:
          A `qwix.QArray` of float4_e2m1fn values. Its `qtype` is "nvfp4" if all global scales are
          known to be 1, as `from_qarray` makes them. `from_qarray` then restores the tensor.

        Raises:
          ImportError: if Qwix is not installed.
          ValueError: if `axis` is another axis.
        """
        return make_qarray(self.to_layout(CANONICAL).codes, self.scale(), self.global_scale, axis)

    @property
    def mT(self) -> "TransposedNVFP4Tensor":
        """A view of the same matrices with swapped axes: ``[..., k, n]``, as Flax stores kernels.

        It is what `ragged_dot` takes, and what libraries pass on that check the shape of a weight.
        """
        return TransposedNVFP4Tensor(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape ``[..., n, k]``, without the padding of a layout."""
        *lead, n, half_k = self.packed.shape
        n = n if self.rows is None else self.rows
        return (*lead, n, 2 * half_k if self.columns is None else self.columns)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all arrays: codes and scales, with the padding of the layout."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def codes(self) -> jax.Array:
        """The bytes of `packed` as a float4_e2m1fn array ``[..., n, k]``."""
        pairs = lax.bitcast_convert_type(self.packed, jnp.float4_e2m1fn)
        return pairs.reshape(*self.packed.shape[:-1], 2 * self.packed.shape[-1])

    def scale(self) -> jax.Array:
        """Return ``block_scale * global_scale``, float32 in canonical order, ``[..., n, k/16]``."""
        tensor = self.to_layout(CANONICAL)
        block_scale = decode_scale(tensor.block_scale)
        if tensor.global_divisor is not None:
            return divide(block_scale, self.per_row(tensor.global_divisor))
        return block_scale * self.per_row(tensor.global_scale)

    def dequantize(self, dtype=jnp.float32) -> jax.Array:
        """Return the values ``[..., n, k]``, computed in float32 and rounded once to `dtype`.

        Args:
          dtype: dtype of the result, float32 by default.
        """
        return dequantize(self.to_layout(CANONICAL).packed, self.scale(), dtype)

    def to_layout(self, name: str) -> "NVFP4Tensor":
        """Return the same values in the layout called `name`.

        A conversion to another layout and back returns the same bytes, with one exception: some
        layouts store no sign of block scales. There, blocks with a negative or zero scale return
        with other bytes of the same value; `numerics.layouts` has the details.

        Args:
          name: a key of `numerics.layouts.LAYOUTS`.

        Raises:
          ValueError: if there is no such layout; the message lists the known ones.
        """
        if name == self.layout:
            return self
        here, there = find_layout(self.layout), find_layout(name)
        n, k = self.shape[-2:]
        canonical = from_layout(self.packed, self.block_scale, here, n, k)
        packed, block_scale = to_layout(*canonical, there)
        return dataclasses.replace(
            self,
            packed=packed,
            block_scale=block_scale,
            layout=name,
            rows=None if packed.shape[-2] == n else n,
            columns=None if 2 * packed.shape[-1] == k else k,
        )

    def per_row(self, scale):
        """Broadcast scales ``[...]`` or ``[..., parts]`` to the rows: ``[..., n or 1, 1]``."""
        if scale.ndim == self.packed.ndim - 2:
            return scale[..., None, None]
        return jnp.repeat(scale, self.shape[-2] // scale.shape[-1], axis=-1)[..., None]


_ARRAYS = ("packed", "block_scale", "global_scale", "global_divisor")


def array_names(tensor: NVFP4Tensor) -> tuple[str, ...]:
    """Return the name of each array of a tensor in the path of a pytree.

    Shapes of different layouts are often equal, and other checkpointers than `nvfp4.save` do not
    store static fields. They compare names, so the names tell which bytes the arrays hold. The
    global scale has such a name too. A partial restore then takes either the whole tensor or
    nothing.
    """
    suffix = name_of_bytes(tensor.layout, tensor.rows, tensor.columns)
    return tuple(name + suffix for name in _ARRAYS)


def _arrays(tensor):
    """Return the arrays of a tensor, and its static fields."""
    static = (tensor.layout, tensor.rows, tensor.columns)
    return tuple(getattr(tensor, name) for name in _ARRAYS), static


def _named_arrays(tensor):
    """Return the arrays of a tensor with their keys, and its static fields."""
    arrays, static = _arrays(tensor)
    keys = map(jax.tree_util.GetAttrKey, array_names(tensor))
    return tuple(zip(keys, arrays, strict=True)), static


def _join(static, arrays) -> NVFP4Tensor:
    """Return the tensor of these static fields and arrays; undo `_arrays`."""
    return NVFP4Tensor(*arrays, *static)


jax.tree_util.register_pytree_with_keys(NVFP4Tensor, _named_arrays, _join, _arrays)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransposedNVFP4Tensor:
    """A view of NVFP4 matrices as ``[..., inputs, outputs]``; `NVFP4Tensor.mT` makes it.

    No byte moves: a block of 16 values, which shares a scale, lies along the second to last axis.

    Attributes:
      tensor: `NVFP4Tensor` ``[..., n, k]``, in any layout.

    Example:
      >>> import jax
      >>> import jax_nvfp4_moe as nvfp4
      >>> kernel = jax.random.normal(jax.random.key(0), (3, 64, 32))
      >>> view = nvfp4.quantize(kernel.mT).mT
      >>> view.shape, view.ndim, view.dequantize().shape
      ((3, 64, 32), 3, (3, 64, 32))
    """

    tensor: NVFP4Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape ``[..., k, n]``."""
        *lead, n, k = self.tensor.shape
        return (*lead, k, n)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of `dequantize`, float32."""
        return jnp.dtype(jnp.float32)

    @property
    def mT(self) -> NVFP4Tensor:
        """The tensor itself."""
        return self.tensor

    def dequantize(self, dtype=jnp.float32) -> jax.Array:
        """Return the values ``[..., k, n]``, computed in float32 and rounded once to `dtype`.

        Args:
          dtype: dtype of the result, float32 by default.
        """
        return self.tensor.dequantize(dtype).mT


class _ExpertSizes:
    """The sizes of an expert layer, which are read from the shapes of its two weights."""

    gate_up: Any
    down: Any

    @property
    def num_experts(self) -> int:
        """Number of experts e."""
        return self.down.shape[0]

    @property
    def hidden(self) -> int:
        """Number of features of a token, h."""
        return self.down.shape[1]

    @property
    def intermediate(self) -> int:
        """Number of features between the two GEMMs, i."""
        return self.down.shape[2]

    @property
    def gated(self) -> bool:
        """Whether `gate_up` holds gate and up rows: 2i rows instead of i."""
        return self.gate_up.shape[1] == 2 * self.intermediate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEParams(_ExpertSizes):
    """The NVFP4 weights of one expert layer.

    Shapes use e for the number of experts, h for the hidden size and i for the intermediate size.

    Attributes:
      gate_up: `NVFP4Tensor` ``[e, 2i, h]``, all gate rows and then all up rows of each expert;
        ``[e, i, h]`` if the activation is not gated. Its global_scale is ``[e]``, or ``[e, 2]`` for
        separate scales of gate and up. If gate and up rows alternate (activation "swigluoai"), it
        must be ``[e]``.
      down: `NVFP4Tensor` ``[e, h, i]``.
      gate_up_input_scale: float32 ``[e]``, the calibrated global scale of the activations that
        enter the first GEMM: amax / 2688. None (default) in a weight-only checkpoint.
      down_input_scale: float32 ``[e]``, the same for the activations that enter the second GEMM, or
        None.
      gate_up_bias: ``[e, 2i]`` (``[e, i]`` if not gated), or None (default) for no bias.
      down_bias: ``[e, h]``, or None (default) for no bias.

    Example:
      >>> import jax
      >>> import jax_nvfp4_moe as nvfp4
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> gate, up = (jax.random.normal(key, (4, 32, 64)) for key in keys[:2])
      >>> params = nvfp4.quantize_experts(gate, up, jax.random.normal(keys[2], (4, 64, 32)))
      >>> params.num_experts, params.hidden, params.intermediate, params.gated
      (4, 64, 32, True)
      >>> params.gate_up.shape, params.has_input_scales
      ((4, 64, 64), False)
    """

    gate_up: NVFP4Tensor
    down: NVFP4Tensor
    gate_up_input_scale: jax.Array | None = None
    down_input_scale: jax.Array | None = None
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None

    @property
    def has_input_scales(self) -> bool:
        """Whether the activations of both GEMMs have calibrated input scales, which w4a4 needs."""
        return self.gate_up_input_scale is not None and self.down_input_scale is not None

    @property
    def layout(self) -> str:
        """Name of the layout of `down`.

        `gate_up` is in the same layout or, if it is gated, in the variant of this layout for two
        halves.
        """
        return self.down.layout

    @property
    def nbytes(self) -> int:
        """Number of bytes of all arrays."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def to_layout(self, name: str) -> "MoEParams":
        """Return the same weights in the layout called `name`.

        A gated `gate_up` takes the variant of the layout for two halves, if there is one.
        `NVFP4Tensor.to_layout` says which bytes change.

        Args:
          name: a key of `numerics.layouts.LAYOUTS`.

        Raises:
          ValueError: if there is no such layout; the message lists the known ones.
        """
        gate_up = self.gate_up.to_layout(_gate_up_layout(name, self.gated))
        return dataclasses.replace(self, gate_up=gate_up, down=self.down.to_layout(name))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseExperts(_ExpertSizes):
    """The weights of one expert layer that is not NVFP4: in a float dtype or in FP8.

    Shapes use e for the number of experts, h for the hidden size and i for the intermediate size.

    Attributes:
      gate_up: array or `FP8Tensor` ``[e, 2i, h]``, all gate rows and then all up rows of each
        expert; ``[e, i, h]`` if the activation is not gated.
      down: array or `FP8Tensor` ``[e, h, i]``.
      gate_up_bias: ``[e, 2i]``, or None (default) for no bias.
      down_bias: ``[e, h]``, or None (default) for no bias.
      gate_up_input_scale: float32 ``[e]``, the calibrated scale with which the activations of the
        first GEMM are rounded to FP8; None (default) if there is none.
      down_input_scale: the same for the second GEMM.
      multiply_by_reciprocal: how activations are rounded to FP8, see `numerics.fp8.round_fp8`;
        False by default. Static.
    """

    gate_up: jax.Array | FP8Tensor
    down: jax.Array | FP8Tensor
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    gate_up_input_scale: jax.Array | None = None
    down_input_scale: jax.Array | None = None
    multiply_by_reciprocal: bool = dataclasses.field(default=False, metadata={"static": True})


def _gate_up_layout(name, gated):
    """Return the layout of `gate_up` if `down` is in the layout called `name`."""
    return (find_layout(name).of_halves or name) if gated else name


def check_moe_params(params: MoEParams) -> None:
    """Check that the shapes and layouts in `params` belong to one expert layer.

    Raises:
      ValueError: if they do not; the message names the first wrong field.
    """
    check_blocks("down", params.down.shape)
    check_blocks("gate_up", params.gate_up.shape)
    e, h, i = params.down.shape
    if params.gate_up.shape not in ((e, 2 * i, h), (e, i, h)):
        raise ValueError(
            f"gate_up: expected shape {(e, 2 * i, h)} (gated) or {(e, i, h)} (not gated), because "
            f"down has shape {params.down.shape}; got {params.gate_up.shape}"
        )
    layout = _gate_up_layout(params.layout, params.gated)
    if params.gate_up.layout != layout:
        raise ValueError(
            f"gate_up: expected layout {layout!r}, because down has layout {params.layout!r}; "
            f"got {params.gate_up.layout!r}. Convert both with MoEParams.to_layout"
        )
    rows = params.gate_up.shape[1]
    for name, shape in (
        ("gate_up_input_scale", (e,)),
        ("down_input_scale", (e,)),
        ("gate_up_bias", (e, rows)),
        ("down_bias", (e, h)),
    ):
        field = getattr(params, name)
        if field is not None and field.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {field.shape}")


def check_sizes(params, num_experts: int, hidden: int, intermediate: int) -> None:
    """Check the sizes of experts; the message of the error says which axis is which.

    Args:
      params: `MoEParams` or `DenseExperts`.
      num_experts: expected number of experts.
      hidden: expected number of features of a token.
      intermediate: expected number of features between the two GEMMs.

    Raises:
      ValueError: if a size differs. The usual cause is a Flax kernel that was not transposed.
    """
    wanted = num_experts, hidden, intermediate
    sizes = params.num_experts, params.hidden, params.intermediate
    if sizes != wanted:
        raise ValueError(
            f"params: expected params.down of shape {wanted}: num_experts, the hidden size and the "
            f"intermediate size; got {sizes}. {_OUTPUTS_FIRST}"
        )


def quantize(x, global_scale=None) -> NVFP4Tensor:
    """Quantize `x` to NVFP4 in blocks of 16 along its last axis.

    With ``g = global_scale``, each block gets ``s8 = e4m3(min(amax / (6 g), 448))`` and
    ``codes = e2m1(x / (s8 g))``. All steps are in float32 and ties round to even.
    `numerics.nvfp4.quantize` says what NaN and infinity become.

    Args:
      x: array ``[..., n, k]`` of any float dtype; k is a multiple of 16.
      global_scale: g, float32, of a shape that broadcasts to ``x.shape[:-2]``. None, the default,
        takes ``amax(|x|) / 2688`` of each matrix. The function does not check that it is positive
        and finite.

    Returns:
      An `NVFP4Tensor` ``[..., n, k]`` in the canonical layout.

    Raises:
      TypeError: if `x` or `global_scale` is no array.
      ValueError: if `x` has fewer than two axes, or k is not a multiple of 16. Also if the function
        is differentiated with respect to `x` or `global_scale`; the message says how to write a
        straight-through gradient.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> x = jax.random.normal(jax.random.key(0), (8, 64))
      >>> weight = nvfp4.quantize(x)
      >>> weight.packed.shape, weight.global_scale.shape
      ((8, 32), ())
      >>> bool(jnp.abs(weight.dequantize() - x).max() < 0.25 * jnp.abs(x).max())
      True

    Source: NVIDIA ModelOpt's NVFP4 export; the result has the same bits.
    """
    x = as_array("x", x)
    check_blocks("x", x.shape)
    if global_scale is not None:
        global_scale, lead = as_array("global_scale", global_scale), x.shape[:-2]
        if not _broadcasts(global_scale.shape, lead):
            raise ValueError(
                f"global_scale: expected a shape that broadcasts to {lead}, the matrices of x; "
                f"got {global_scale.shape}"
            )
    return _quantize(x, global_scale)


def _broadcasts(shape, wanted):
    """Return whether an array of `shape` can be broadcast to the shape `wanted`."""
    return len(shape) <= len(wanted) and all(
        own in (1, other) for own, other in zip(shape[::-1], wanted[::-1], strict=False)
    )


@functools.partial(not_differentiable, "quantize")
@jax.jit
def _quantize(x, global_scale):  # without jit, XLA would compile each operation on its own
    return NVFP4Tensor(*quantize_arrays(x, global_scale))


def quantize_by(x, algorithm: str = "max") -> NVFP4Tensor:
    """Quantize weights ``[..., n, k]`` by a named algorithm.

    Args:
      x: array ``[..., n, k]`` of any float dtype; k is a multiple of 16.
      algorithm: "max" (default), which is `quantize`, or another row of
        `numerics.rounding.ALGORITHMS` that weighs all inputs equally, such as "search".

    Returns:
      An `NVFP4Tensor` ``[..., n, k]`` in the canonical layout. Each matrix has its own global
      scale, which follows from its largest magnitude.

    Raises:
      ValueError: if there is no such algorithm, or k is not a multiple of 16.
    """
    known = [name for name, row in ALGORITHMS.items() if not row.needs_importance]
    if algorithm not in known:
        raise ValueError(
            f"algorithm: expected one of {', '.join(known)}; got {algorithm!r}"
            + (". It needs calibration data: use quantize_model" if algorithm in ALGORITHMS else "")
        )
    if algorithm == "max":
        return quantize(x)
    x = jnp.asarray(x)
    check_blocks("x", x.shape)
    return NVFP4Tensor(*quantize_weight(x, algorithm=algorithm))


def quantize_experts(
    gate,
    up,
    down,
    *,
    algorithm="max",
    interleaved=False,
    gate_up_bias=None,
    down_bias=None,
    gate_up_input_scale=None,
    down_input_scale=None,
) -> MoEParams:
    """Quantize the dense experts of one layer to NVFP4.

    Each matrix of each expert gets its own global scale, which follows from its largest magnitude;
    gate and up get separate scales.

    The axes are outputs before inputs. Flax stores kernels as ``[e, inputs, outputs]``: transpose
    them first with ``kernel.swapaxes(1, 2)``. For square matrices a missing transpose passes the
    shape check and gives wrong results.

    Args:
      gate: ``[e, i, h]`` of any float dtype, or None if the activation is not gated. If `up` is
        None, gate and up in one array: ``[e, 2i, h]``, all gate rows and then all up rows.
      up: ``[e, i, h]``, or None if `gate` holds both; h and i are multiples of 16.
      down: ``[e, h, i]``.
      algorithm: how to choose the scale of each block of 16 weights. "max" (default) gives the
        largest magnitude of a block code 6. "search" finds the scale of least squared error and
        takes longer. "four_or_six" is in between.
      interleaved: whether the rows of `gate`, with `up` None, alternate between gate and up, as
        activation "swigluoai" expects them. Both then share one scale. False by default.
      gate_up_bias: ``[e, 2i]``, the biases of all gate rows and then of all up rows, or in the
        order of the rows if they alternate; ``[e, i]`` if not gated. None (default) for no bias.
      down_bias: ``[e, h]``, or None (default) for no bias.
      gate_up_input_scale: float32 ``[e]``, or a number for all experts: amax / 2688 of the
        activations that enter the first GEMM. None (default) for weights only; `calibrate` finds
        input scales later.
      down_input_scale: the same for the second GEMM.

    Returns:
      `MoEParams` in the canonical layout.

    Raises:
      TypeError: if an argument is no array.
      ValueError: if the shapes disagree, h or i is not a multiple of 16, or the algorithm is
        unknown.

    Example:
      >>> import jax
      >>> import jax_nvfp4_moe as nvfp4
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> gate, up = (jax.random.normal(key, (4, 64, 32)) for key in keys[:2])  # Flax kernels
      >>> down = jax.random.normal(keys[2], (4, 32, 64))
      >>> kernels = [w.swapaxes(1, 2) for w in (gate, up, down)]
      >>> params = nvfp4.quantize_experts(*kernels, algorithm="search")
      >>> params.gate_up.shape, params.down.shape
      ((4, 64, 64), (4, 64, 32))

    Source: global scales of "max" follow NVIDIA ModelOpt's NVFP4 export.
    """
    down = as_array("down", down)
    parts = _first_matrices(gate, up, down, interleaved)
    each = [quantize_by(part, algorithm) for part in parts]
    gate_up = NVFP4Tensor(
        jnp.concatenate([part.packed for part in each], axis=1),
        jnp.concatenate([part.block_scale for part in each], axis=1),
        jnp.stack([part.global_scale for part in each], axis=1)
        if len(each) == 2
        else each[0].global_scale,
    )

    def per_expert(scale):
        whole = down.shape[:1]
        return None if scale is None else jnp.broadcast_to(jnp.asarray(scale, jnp.float32), whole)

    params = MoEParams(
        gate_up,
        quantize_by(down, algorithm),
        *map(per_expert, (gate_up_input_scale, down_input_scale)),
        *(None if bias is None else jnp.asarray(bias) for bias in (gate_up_bias, down_bias)),
    )
    check_moe_params(params)
    return params


def _first_matrices(gate, up, down, interleaved) -> list[jax.Array]:
    """Return the matrices of the first GEMM that get global scales of their own, after checks."""
    fused = up is None
    if fused and gate is None:
        raise ValueError("up: expected [e, i, h], or gate and up in `gate`; got None for both")
    if interleaved and not fused:
        raise ValueError("interleaved: expected False if `up` is given; pass both in `gate`")
    given = {"gate": gate} if fused else {"gate": gate, "up": up}
    arrays = {name: as_array(name, array) for name, array in given.items() if array is not None}
    if down.ndim != 3:
        raise ValueError(
            f"down: expected three axes, [experts, outputs, inputs]; got shape {down.shape}"
        )
    e, h, i = down.shape
    shape = (e, 2 * i if fused else i, h)
    for name, array in reversed(arrays.items()):
        if array.shape != shape:
            rows = "2i" if fused else "i"
            raise ValueError(
                f"{name}: expected shape [e, {rows}, h] = {shape}, because down [e, h, i] has "
                f"shape {down.shape}; got {array.shape}. {_OUTPUTS_FIRST}"
            )
    for name, array in (*reversed(arrays.items()), ("down", down)):
        check_blocks(name, array.shape)
    if fused and not interleaved:
        return jnp.split(arrays["gate"], 2, axis=1)
    return list(arrays.values())


def _check_dtype(name, array, dtype):
    """Check the dtype of an argument that the error message calls `name`."""
    if array.dtype != dtype:
        raise ValueError(f"{name}: expected dtype {jnp.dtype(dtype).name}, got {array.dtype.name}")
