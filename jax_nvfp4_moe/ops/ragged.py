"""`ragged_dot`: the grouped GEMM under the name and with the arguments that it has in JAX."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec, reshard
from jaxtyping import Array, DTypeLike, Float, Int

from jax_nvfp4_moe.backends.record import FLOATS
from jax_nvfp4_moe.numerics.arguments import describe
from jax_nvfp4_moe.numerics.qwix_arrays import QArrayLike
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor, TransposedNVFP4Tensor
from jax_nvfp4_moe.numerics.varying import varying_axes
from jax_nvfp4_moe.ops.products import grouped_gemm
from jax_nvfp4_moe.scheme import NoBackendError, Scheme, Target


def _contract(axis: int) -> lax.RaggedDotDimensionNumbers:
    """Return the dimension numbers of rows ``[m, k]`` by a weight with its k at `axis`."""
    return lax.RaggedDotDimensionNumbers((((1,), (axis,)), ((), ())), (0,), (0,))


# XLA's product, also where a program replaces JAX's function by the one below.
_xla_product = lax.ragged_dot_general

# The axis of a weight that has k -> dimension numbers.
_NUMBERS = {axis: _contract(axis) for axis in (1, 2)}


def ragged_dot(
    lhs: Float[Array, "m k"],
    rhs: TransposedNVFP4Tensor | NVFP4Tensor | QArrayLike | Float[Array, "e k n"],
    group_sizes: Int[Array, " e"],
    *,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers | None = None,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Int[Array, "1"] | None = None,
    activation: Callable[[Array], Array] | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    manual_axis_type: ManualAxisType | None = None,
    zero_initialize: bool = False,
    fuse_gateup_activation: str | None = None,
    scheme: Scheme | str | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
) -> Float[Array, "m n"]:
    """Multiply sorted rows by the NVFP4 weights of their groups, as `jax.lax.ragged_dot` does.

    Row ``i`` of group ``g`` gives ``y[i] = lhs[i] @ rhs[g]``. Rows after the first
    ``sum(group_sizes)`` rows give zeros. Sums are float32.

    Code that calls `jax.lax.ragged_dot` can call this function instead. `tokamax.ragged_dot` takes
    it as an implementation: ``implementation=[nvfp4.ragged_dot, "mosaic", "xla"]``. If this
    function cannot serve a call, it raises `NotImplementedError`, and tokamax tries the next one.

    Gradients flow to `lhs`. NVFP4 weights are frozen.

    Args:
      lhs: rows ``[m, k]``, sorted by group; bfloat16, float16 or float32. m may be 0.
      rhs: the weights of e groups:

        - ``weight.mT`` of an `NVFP4Tensor` ``[e, n, k]``, whose shape is ``[e, k, n]``. Prepare the
          weight before, with ``nvfp4.prepare(weight).mT``: otherwise each call converts it.
        - The `NVFP4Tensor` ``[e, n, k]`` itself.
        - A `qwix.QArray` ``[e, k, n]`` that `NVFP4Tensor.from_qarray` can convert. Each call
          converts it, so convert it once if you can.
        - Any other array, for which `jax.lax.ragged_dot_general` runs.
      group_sizes: integers ``[e]``, the number of rows of each group. The values are unknown during
        tracing and are not checked. A negative size counts as 0, and rows after the m-th do not
        exist. An object with a method ``__jax_array__`` is allowed.
      ragged_dot_dimension_numbers: None (default) for the shapes above. Axis 1 of `lhs` may be
        contracted with the axis along which `rhs` has its blocks, and with no other.
      precision: as in JAX. It concerns arrays alone, since the sums of NVFP4 weights are always
        float32.
      preferred_element_type: dtype of the result: bfloat16, float16 or float32. If it is wider than
        `lhs`, rows are converted to it before the product, which is slower on a GPU. None (default)
        for the dtype of `lhs`; with a QArray, for the common dtype of `lhs` and the scales.
      group_offset: integer ``[1]``. `rhs` then has the groups from this one on, and `group_sizes`
        the sizes of all groups. Rows of other groups give zeros. None (default) for 0.
      activation: function that is applied to the result, converted to float32, before the result is
        rounded to its dtype. None (default) for none.
      out_sharding: sharding of the result on a mesh with Explicit axes, as in JAX. None (default)
        shards it like the rows.
      manual_axis_type: inside of `jax.shard_map`, axes of the mesh along which the result varies,
        besides those along which operands vary. None (default) for no others.
      zero_initialize: no effect, since rows without a group are always zeros.
      fuse_gateup_activation: only None (default).
      scheme: as in `ops.grouped_gemm`, which also takes input scales.
      target: the `Target` to lower for; None (default) for the current device.
      backend: name of a backend, or a sequence of names that are tried in that order. None
        (default) chooses the first backend that accepts the problem.

    Returns:
      ``[m, n]`` in `preferred_element_type`.

    Raises:
      NotImplementedError: if the function cannot serve the call: other dimension numbers, dtypes or
        types of operands, a QArray that is not NVFP4, or a backend that cannot run it.
      ValueError: if shapes disagree, or the scheme is unknown.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> kernel = jax.random.normal(jax.random.key(0), (3, 64, 32))  # [e, k, n]
      >>> weight = nvfp4.prepare(nvfp4.quantize(kernel.mT))
      >>> rows, sizes = jnp.ones((5, 64), jnp.bfloat16), jnp.array([2, 0, 2])
      >>> y = nvfp4.ragged_dot(rows, weight.mT, sizes)
      >>> y.shape, y.dtype.name, float(y[4].max())  # row 4 belongs to no group
      ((5, 32), 'bfloat16', 0.0)
      >>> exact = jax.lax.ragged_dot(rows, weight.mT.dequantize(jnp.bfloat16), sizes)
      >>> bool(jnp.allclose(y, exact, rtol=0.02, atol=0.5))
      True

    Source: the arguments of `jax.lax.ragged_dot` of JAX 0.12, and of an implementation that
    `tokamax.ragged_dot` of tokamax 0.0.17 calls.
    """
    del zero_initialize  # rows without a group are zeros in any case
    _refuse("fuse_gateup_activation", fuse_gateup_activation)
    lhs, rhs, sizes = _value_of(lhs), _value_of(rhs), jnp.asarray(group_sizes)
    numbers, dtype = ragged_dot_dimension_numbers, preferred_element_type
    if not isinstance(lhs, jax.Array | np.ndarray):
        raise NotImplementedError(f"lhs: expected an array, got {describe(lhs)}")
    if isinstance(rhs, jax.Array | np.ndarray):
        if numbers not in (None, _NUMBERS[1]):
            _refuse("group_offset", group_offset)
        if activation is not None:
            dtype = jnp.dtype(dtype or jnp.result_type(lhs, rhs))
        sums = dtype if activation is None else _find_sums(dtype)
        how = {"precision": precision, "out_sharding": out_sharding, "preferred_element_type": sums}
        groups = rhs.shape[0]
        multiply = functools.partial(_multiply_array, rhs, numbers or _NUMBERS[1], how)
    else:
        weight, dtype = _read_weight(rhs, numbers), _find_dtype(lhs, rhs, dtype)
        _check_operands(lhs, weight, sizes, group_offset)
        how = {"scheme": scheme, "target": target, "backend": backend}
        groups = weight.shape[0]
        multiply = functools.partial(_multiply_packed, weight, dtype, out_sharding, how)
    if group_offset is not None:
        multiply = functools.partial(_multiply_from, multiply, group_offset, groups)
    y = multiply(lhs, sizes)
    if activation is not None:
        y = activation(y.astype(_find_sums(dtype)))
    return _vary(y if dtype is None else y.astype(dtype), manual_axis_type)


def _refuse(name, value):
    """Refuse an argument that is not None."""
    if value is not None:
        raise NotImplementedError(f"{name}: expected None in this call, got {value!r}")


def _value_of(operand):
    """Return what an `nnx.Variable` holds, and anything else as it is."""
    return operand.get_value() if hasattr(operand, "get_value") else operand


def _find_sums(dtype):
    """Return the dtype in which a result of `dtype` is summed up."""
    sums = jnp.dtype(jnp.float32 if jnp.issubdtype(dtype, jnp.inexact) else jnp.int32)
    return sums if dtype.itemsize < sums.itemsize else dtype


def _multiply_array(rhs, numbers, how, rows, sizes):
    """Multiply sorted rows by an array."""
    return _xla_product(rows, rhs, sizes, numbers, **how)


def _read_weight(rhs, numbers) -> NVFP4Tensor:
    """Return a weight that is no plain array as an `NVFP4Tensor` ``[e, n, k]``."""
    if isinstance(rhs, TransposedNVFP4Tensor):
        shape, axes, read = rhs.shape, (1,), lambda axis: rhs.tensor
    elif isinstance(rhs, NVFP4Tensor):
        shape, axes, read = rhs.shape, (2,), lambda axis: rhs
    elif isinstance(rhs, QArrayLike):
        shape, axes, read = rhs.qvalue.shape, (1, 2), functools.partial(_read_qarray, rhs)
    else:
        raise NotImplementedError(
            "rhs: expected `weight.mT` of an NVFP4Tensor, an NVFP4Tensor, a qwix.QArray or an "
            f"array; got {describe(rhs)}"
        )
    axis = next((axis for axis in axes if numbers in (None, _NUMBERS[axis])), None)
    if axis is None or len(shape) != 3:
        raise NotImplementedError(
            "rhs: expected three axes and dimension numbers that contract axis 1 of lhs with "
            f"{' or '.join(f'axis {axis}' for axis in axes)} of rhs, along which its blocks lie; "
            f"got shape {shape} and {numbers}"
        )
    return read(axis)


def _read_qarray(array, axis):
    """Return an array of Qwix ``[e, ., .]``, with its blocks along `axis`, as an `NVFP4Tensor`."""
    try:
        return NVFP4Tensor.from_qarray(array, axis - 3)
    except ValueError as error:
        raise NotImplementedError(f"rhs: {error}") from error


def _find_dtype(lhs, rhs, dtype):
    """Return the dtype of the result with an NVFP4 weight, of which `dtype` may be None."""
    if dtype is None:
        scales = rhs.scale.dtype if isinstance(rhs, QArrayLike) else lhs.dtype
        dtype = _join(lhs.dtype, scales) if scales.itemsize > 1 else lhs.dtype
    dtype = jnp.dtype(dtype)
    for name, found in (("lhs", lhs.dtype), ("preferred_element_type", dtype)):
        if found.name not in FLOATS:
            raise NotImplementedError(f"{name}: expected {', '.join(FLOATS)}; got {found.name}")
    return dtype


def _join(one, other):
    """Return the dtype that holds the values of two float dtypes of at most 32 bits."""
    return one if one == other else jnp.dtype(jnp.float32)


def _check_operands(lhs, weight, sizes, group_offset):
    """Check the shapes of a product with an NVFP4 weight ``[e, n, k]``."""
    e, _, k = weight.shape
    if lhs.ndim != 2:
        raise NotImplementedError(f"lhs: expected two axes, got shape {lhs.shape}")
    if lhs.shape[1] != k:
        raise ValueError(f"lhs: expected shape [m, {k}], because rhs has k = {k}; got {lhs.shape}")
    shape = (e,) if group_offset is None else sizes.shape[:1]
    if sizes.shape != shape or sizes.ndim != 1 or sizes.dtype.kind not in "iu":
        wanted = f"of shape {(e,)}" if group_offset is None else "with one axis"
        raise ValueError(
            f"group_sizes: expected integers {wanted}, one number per group; got "
            f"{sizes.dtype.name} {sizes.shape}"
        )


def _multiply_packed(weight, dtype, out_sharding, how, rows, sizes):
    """Multiply sorted rows by an NVFP4 weight; the dtype of the result holds that of the rows."""
    rows = rows.astype(_join(rows.dtype, dtype))
    try:
        y = grouped_gemm(rows, weight, sizes, **how)
    except NoBackendError as error:
        raise NotImplementedError(str(error)) from error
    return y if out_sharding is None else reshard(y, out_sharding)


def _multiply_from(multiply, group_offset, groups, rows, sizes):
    """Multiply the rows of `groups` groups, of which the first is `group_offset` of all groups."""
    first, m = jnp.asarray(group_offset, jnp.int32).reshape(()), rows.shape[0]
    sizes = jnp.maximum(sizes.astype(jnp.int32), 0)
    start = jnp.minimum(jnp.sum(jnp.where(jnp.arange(sizes.size) < first, sizes, 0)), m)
    # Groups after the last one are empty: a slice must not move to earlier ones.
    sizes = lax.dynamic_slice_in_dim(jnp.pad(sizes, (0, groups)), first, groups)
    # The rows before `start` wrap around to the end, where they belong to no group.
    ends = jnp.minimum(jnp.cumsum(sizes), m - start)
    y = multiply(jnp.roll(rows, -start, axis=0), jnp.diff(ends, prepend=0))
    return jnp.roll(y, start, axis=0)


def _vary(y, kind):
    """Return `y` so that it varies along the mesh axes that `kind` names; `kind` may be None."""
    if kind is None:
        return y
    if kind.unreduced or kind.reduced:
        raise NotImplementedError(f"manual_axis_type: expected only varying axes, got {kind}")
    missing = tuple(sorted(kind.varying - varying_axes(y)))
    return lax.pcast(y, missing, to="varying") if missing else y
