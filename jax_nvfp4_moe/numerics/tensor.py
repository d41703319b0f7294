"""NVFP4Tensor and MoEParams, canonical or in a kernel's layout; DenseExperts beside them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.layouts import CANONICAL, find_layout, from_layout, to_layout
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK, check_blocks, decode_scale, dequantize, divide
from jax_nvfp4_moe.numerics.nvfp4 import quantize as quantize_arrays

# What messages about axes end with.
_OUTPUTS_FIRST = (
    "Matrices are outputs before inputs: turn a Flax kernel [e, in, out] around with "
    "kernel.swapaxes(1, 2)"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NVFP4Tensor:
    """Matrices in NVFP4: ``w[..., n, k] = code * (block_scale * global_scale)``.

    Attributes:
      packed: uint8 ``[..., n, k/2]``, two E2M1 codes in a byte, even k in the low nibble.
      block_scale: float8_e4m3fn ``[..., n, k/16]``, one per 16 elements of a row.
      global_scale: float32 ``[...]``, one per matrix; or ``[..., 2]``, one for each half of the
        rows (the gate and up halves of an expert).
      global_divisor: float32 like `global_scale`, or None. Where a file stores the reciprocal, as
        compressed-tensors does, dequantization divides by it, so that values are equal to that
        tool's to the bit; kernels multiply by `global_scale`, its rounded reciprocal.
      layout: static name of the byte order, see `numerics.layouts`.
      rows, columns: static; n and k before a layout padded them, None where it did not.

    Shapes are those of the canonical layout; another layout permutes bytes inside `packed` and
    `block_scale` and may pad rows and columns. Nothing is checked on construction, so that tree
    operations may put any leaf here; `from_packed` checks.
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
        """Build a canonical tensor from its bytes and scales.

        Args:
          packed: uint8 ``[..., n, k/2]``.
          block_scale: float8_e4m3fn ``[..., n, k/16]``.
          global_scale: float32 ``[...]`` or ``[..., 2]``, or a number for one scale.

        Raises:
          ValueError: a dtype is wrong, the shapes disagree, or k is not a multiple of 16.
        """
        packed, block_scale = jnp.asarray(packed), jnp.asarray(block_scale)
        global_scale = jnp.asarray(global_scale, jnp.float32)
        _check_dtype("packed", packed, jnp.uint8)
        _check_dtype("block_scale", block_scale, jnp.float8_e4m3fn)
        check_blocks("packed, counted in codes", (*packed.shape[:-1], 2 * packed.shape[-1]))
        lead = packed.shape[:-2]
        scales = (*packed.shape[:-1], packed.shape[-1] // 8)
        if block_scale.shape != scales:
            raise ValueError(
                f"block_scale: expected shape {scales}, one per {BLOCK} codes; "
                f"got {block_scale.shape}"
            )
        if global_scale.shape not in (lead, (*lead, 2)):
            raise ValueError(
                f"global_scale: expected shape {lead}, one per matrix, or {(*lead, 2)}, one per "
                f"half; got {global_scale.shape}"
            )
        return cls(packed, block_scale, global_scale)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape ``[..., n, k]``."""
        *lead, n, half_k = self.packed.shape
        n = n if self.rows is None else self.rows
        return (*lead, n, 2 * half_k if self.columns is None else self.columns)

    @property
    def nbytes(self) -> int:
        """Bytes that the codes and scales occupy."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def codes(self) -> jax.Array:
        """The bytes of `packed` as a float4_e2m1fn array ``[..., n, k]``."""
        pairs = lax.bitcast_convert_type(self.packed, jnp.float4_e2m1fn)
        return pairs.reshape(*self.packed.shape[:-1], 2 * self.packed.shape[-1])

    def scale(self) -> jax.Array:
        """Return ``block_scale * global_scale`` in float32, canonical ``[..., n, k/16]``."""
        tensor = self.to_layout(CANONICAL)
        block_scale = decode_scale(tensor.block_scale)
        if tensor.global_divisor is not None:
            return divide(block_scale, self._per_row(tensor.global_divisor))
        return block_scale * self._per_row(tensor.global_scale)

    def dequantize(self, dtype=jnp.float32) -> jax.Array:
        """Return the values ``[..., n, k]``, computed in float32 and rounded once to `dtype`."""
        return dequantize(self.to_layout(CANONICAL).packed, self.scale(), dtype)

    def to_layout(self, name: str) -> "NVFP4Tensor":
        """Return the same values in the layout called `name`.

        Bytes come back as they were, but for blocks whose scale is not positive in layouts that
        keep no sign of it, see `numerics.layouts`.

        Raises:
          ValueError: there is no such layout.
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

    def _per_row(self, scale):
        """Spread ``[...]`` or ``[..., halves]`` over the rows: ``[..., n or 1, 1]``."""
        if scale.ndim == self.packed.ndim - 2:
            return scale[..., None, None]
        return jnp.repeat(scale, self.shape[-2] // scale.shape[-1], axis=-1)[..., None]


class _ExpertSizes:
    """Sizes of experts, read off their two weights."""

    gate_up: Any
    down: Any

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return self.down.shape[0]

    @property
    def hidden(self) -> int:
        """Width of the tokens."""
        return self.down.shape[1]

    @property
    def intermediate(self) -> int:
        """Width between the two products."""
        return self.down.shape[2]

    @property
    def gated(self) -> bool:
        """Whether `gate_up` holds two halves."""
        return self.gate_up.shape[1] == 2 * self.intermediate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEParams(_ExpertSizes):
    """The weights of one expert layer; `e` experts, hidden size h, intermediate size i.

    Attributes:
      gate_up: `NVFP4Tensor` ``[e, 2i, h]``, gate rows then up rows; ``[e, i, h]`` where the
        activation is not gated. Its global_scale is ``[e]`` or, for gate and up apart, ``[e, 2]``.
        Where gate and up rows alternate (activation `swigluoai`) it is ``[e]``.
      down: `NVFP4Tensor` ``[e, h, i]``.
      gate_up_input_scale, down_input_scale: float32 ``[e]``, the calibrated global scale of the
        activations that each product takes in (it multiplies); None in a weight-only checkpoint.
      gate_up_bias, down_bias: float32 ``[e, 2i]`` and ``[e, h]``, or None.
    """

    gate_up: NVFP4Tensor
    down: NVFP4Tensor
    gate_up_input_scale: jax.Array | None = None
    down_input_scale: jax.Array | None = None
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None

    @property
    def has_input_scales(self) -> bool:
        """Whether the activations of both products were calibrated."""
        return self.gate_up_input_scale is not None and self.down_input_scale is not None

    @property
    def layout(self) -> str:
        """Name of the layout of `down`; `gate_up` has it too, or that for two halves."""
        return self.down.layout

    @property
    def nbytes(self) -> int:
        """Bytes that all arrays occupy."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def to_layout(self, name: str) -> "MoEParams":
        """Return the same weights in the layout called `name`, see `NVFP4Tensor.to_layout`.

        A gated `gate_up` takes the layout for two halves where that is another one.

        Raises:
          ValueError: there is no such layout.
        """
        gate_up = self.gate_up.to_layout(_gate_up_layout(name, self.gated))
        return dataclasses.replace(self, gate_up=gate_up, down=self.down.to_layout(name))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseExperts(_ExpertSizes):
    """The weights of one expert layer that is not NVFP4: in a float dtype, or in FP8.

    Attributes:
      gate_up: ``[e, 2i, h]``, gate rows then up rows, or ``[e, i, h]``: an array or an `FP8Tensor`.
      down: ``[e, h, i]``.
      gate_up_bias, down_bias: ``[e, 2i]`` and ``[e, h]``, or None.
      gate_up_input_scale, down_input_scale: float32 ``[e]`` where FP8 activations are rounded with
        calibrated scales, else None.
      multiply_by_reciprocal: static; how activations are rounded to FP8, see
        `numerics.fp8.round_fp8`.
    """

    gate_up: jax.Array | FP8Tensor
    down: jax.Array | FP8Tensor
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    gate_up_input_scale: jax.Array | None = None
    down_input_scale: jax.Array | None = None
    multiply_by_reciprocal: bool = dataclasses.field(default=False, metadata={"static": True})


def _gate_up_layout(name, gated):
    """Return the name of the layout that `gate_up` has where `down` has that called `name`."""
    return (find_layout(name).of_halves or name) if gated else name


def check_moe_params(params: MoEParams) -> None:
    """Check that the shapes of `params` belong to one expert layer.

    Raises:
      ValueError: they do not; names the first field that is wrong.
    """
    check_blocks("down", params.down.shape)
    check_blocks("gate_up", params.gate_up.shape)
    e, h, i = params.down.shape
    if params.gate_up.shape not in ((e, 2 * i, h), (e, i, h)):
        raise ValueError(
            f"gate_up: expected {(e, 2 * i, h)} (gated) or {(e, i, h)} (not gated) to go with "
            f"down {params.down.shape}; got {params.gate_up.shape}"
        )
    layout = _gate_up_layout(params.layout, params.gated)
    if params.gate_up.layout != layout:
        raise ValueError(
            f"gate_up: expected layout {layout!r} to go with down in {params.layout!r}; "
            f"got {params.gate_up.layout!r}"
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
    """Check the sizes of experts, and say of wrong ones which axis is which.

    Raises:
      ValueError: they differ, as those of untransposed Flax kernels do.
    """
    wanted = num_experts, hidden, intermediate
    sizes = params.num_experts, params.hidden, params.intermediate
    if sizes != wanted:
        raise ValueError(
            f"params: expected params.down [e, h, i] of {wanted}, num_experts, the width of tokens "
            f"and intermediate; got {sizes}. {_OUTPUTS_FIRST}"
        )


def quantize(x, global_scale=None) -> NVFP4Tensor:
    """Quantize `x` to NVFP4 with blocks of 16 along its last axis.

    ``s8 = e4m3(min(amax16 / (6 g), 448))``, ``codes = e2m1(x / (s8 g))``, all in float32, ties to
    even; see `numerics.nvfp4.quantize`.

    Args:
      x: any float dtype, ``[..., n, k]`` with k a multiple of 16.
      global_scale: g, float32, broadcastable to ``x.shape[:-2]``; ``amax(|x|) / 2688`` of each
        matrix where not given. Not checked: positive and finite.

    Raises:
      ValueError: k is not a multiple of 16.
    """
    return _quantize(jnp.asarray(x), global_scale)


@jax.jit
def _quantize(x, global_scale):  # one program, where each operation alone would be one
    return NVFP4Tensor(*quantize_arrays(x, global_scale))


def quantize_experts(gate, up, down) -> MoEParams:
    """Quantize the dense experts of one layer to NVFP4: canonical parameters, weights only.

    Each matrix of each expert gets ``amax / 2688`` as its global scale, gate and up apart.

    Args:
      gate: any float dtype, ``[e, i, h]``; None where the activation is not gated.
      up: ``[e, i, h]``, outputs before inputs: the transpose of what Flax calls a kernel.
      down: ``[e, h, i]``.

    Raises:
      ValueError: shapes disagree, or h or i is not a multiple of 16.
    """
    up, down = jnp.asarray(up), jnp.asarray(down)
    halves = [up] if gate is None else [jnp.asarray(gate), up]
    for name, array, shape in (
        ("up", up, (*down.shape[:1], *down.shape[:0:-1])),
        ("gate", halves[0], up.shape),
    ):
        if array.ndim != 3 or array.shape != shape:
            raise ValueError(
                f"{name}: expected shape [e, i, h], {shape} to go with down [e, h, i], "
                f"{down.shape}; got {array.shape}. {_OUTPUTS_FIRST}"
            )
    for name, array in (("up", up), ("down", down)):
        check_blocks(name, array.shape)
    each = [quantize(half) for half in halves]
    gate_up = NVFP4Tensor(
        jnp.concatenate([half.packed for half in each], axis=1),
        jnp.concatenate([half.block_scale for half in each], axis=1),
        jnp.stack([half.global_scale for half in each], axis=1)
        if gate is not None
        else each[0].global_scale,
    )
    return MoEParams(gate_up, quantize(down))


def _check_dtype(name, array, dtype):
    if array.dtype != dtype:
        raise ValueError(f"{name}: expected dtype {jnp.dtype(dtype).name}, got {array.dtype.name}")
