"""`NVFP4Provider`: Qwix stores the kernels of any Flax model as packed NVFP4, and runs our kernels.

While a model runs, Qwix replaces functions of JAX. A provider therefore sees each product, with the
path of the module that computes it. This module needs the extra `qwix`; the package does not import
it by itself.
"""

# Types are also checked without the extra.
# pyright: reportMissingImports=false

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import linen, nnx, struct
from jax import lax
from jax.core import Tracer
from jaxtyping import DTypeLike
from qwix._src.core import qarray
from qwix._src.core.einsum_info import EinsumInfo
from qwix._src.providers.ptq import WithAux
from qwix._src.utils import flax_util

from jax_nvfp4_moe.nn.variables import NVFP4Param
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.numerics.qwix_arrays import QTYPE
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor, quantize_by
from jax_nvfp4_moe.ops.preparation import prepare
from jax_nvfp4_moe.ops.products import grouped_gemm, linear
from jax_nvfp4_moe.ops.ragged import ragged_dot
from jax_nvfp4_moe.scheme import Target


@dataclasses.dataclass(frozen=True)
class Axes:
    """What each axis of a kernel is for.

    Attributes:
      groups: axes that count matrices: batch axes, or the groups of `jax.lax.ragged_dot`.
      outputs: axes of the features that a product returns.
      inputs: axes that a product contracts. The blocks lie along them.
    """

    groups: tuple[int, ...]
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class HowToPack:
    """How a kernel is packed; `quantize_params` reads it from a model that has no values yet.

    Attributes:
      axes: what each axis of the kernel is for.
      algorithm, target, dtype: as in `NVFP4Provider`.
    """

    axes: Axes
    algorithm: str
    target: Target | None
    dtype: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedKernel:
    """A kernel as packed NVFP4, with the shape that its module expects.

    Attributes:
      tensor: `NVFP4Tensor` ``[g, n, k]``, or ``[n, k]`` if no axis counts matrices. g, n and k are
        the products of the sizes of the axes that `axes` names.
      shape: shape of the kernel. Static.
      axes: what its axes are for. Static.
      dtype: dtype of the kernel before it was packed. Static.
    """

    tensor: Any
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    axes: Axes = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        """Number of axes of the kernel."""
        return len(self.shape)


@struct.dataclass
class PackedParam(WithAux):
    """What stands in a module in place of a parameter.

    Attributes:
      array: the `PackedKernel`.
      how: `HowToPack`. Static.
    """

    array: Any
    how: Any = struct.field(pytree_node=False)

    def astype(self, dtype: DTypeLike) -> "PackedParam":
        """Return the parameter itself: `dtype` does not change packed values."""
        del dtype
        return self


nnx.register_data_type(PackedParam)


class NVFP4Provider(qwix.PtqProvider):
    """A provider for `qwix.quantize_model` that stores kernels as packed NVFP4.

    It packs the kernels of `jax.lax.dot_general`, `jax.numpy.einsum` and `jax.lax.ragged_dot`, and
    multiplies them with the kernels of this package. The kernel is the second operand, as always
    with Qwix. An NNX model is packed at once, into variables of class `NVFP4Param`. For a Linen
    model, `quantize_params` packs the parameters.

    Args:
      rules: rules of Qwix, of which the first that matches decides. ``weight_qtype="nvfp4"`` packs
        kernels, and has neither `act_qtype` nor another `tile_size` than 16. Without a
        `weight_qtype`, kernels stay as they are. Qwix itself applies all others. None (default)
        packs every kernel.
      algorithm: how the scales of blocks are chosen, "max" (default) or "search", as in
        `quantize_experts`.
      target: the `Target` that runs the model; None (default) for the current device.
      dtype: dtype of the activations, bfloat16 by default. Another dtype may get another layout.

    Raises:
      ValueError: if a rule has ``weight_qtype="nvfp4"`` and other fields that do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> import qwix
      >>> from flax import nnx
      >>> from jax_nvfp4_moe.nn.qwix_provider import NVFP4Provider
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.Linear(64, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs))
      >>> x = jnp.ones((2, 64))
      >>> provider = NVFP4Provider(
      ...     [
      ...         qwix.QuantizationRule(module_path="layers/1"),  # stays as it is
      ...         qwix.QuantizationRule(weight_qtype="nvfp4"),
      ...     ]
      ... )
      >>> packed = qwix.quantize_model(model, provider, x)
      >>> packed(x).shape
      (2, 8)

    Source: the providers of Qwix 0.1.8.
    """

    def __init__(
        self,
        rules: Sequence[qwix.QuantizationRule] | None = None,
        *,
        algorithm: str = "max",
        target: Target | None = None,
        dtype: DTypeLike = jnp.bfloat16,
    ):
        given = [qwix.QuantizationRule(weight_qtype=QTYPE)] if rules is None else rules
        super().__init__(given)
        self._options = algorithm, target, jnp.dtype(dtype)

    def _init_rule(self, rule):
        """Check a rule."""
        if rule.weight_qtype == QTYPE and (rule.act_qtype or rule.tile_size not in (None, BLOCK)):
            raise ValueError(
                f"rules: expected act_qtype None, and tile_size None or {BLOCK}, where "
                f"weight_qtype is {QTYPE!r}; got {rule}"
            )
        return super()._init_rule(rule)

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        """Return name -> method, for the functions that Qwix replaces."""
        return super().get_intercept_map() | {
            "jax.lax.ragged_dot": self.ragged_dot,
            "jax.lax.ragged_dot_general": self.ragged_dot_general,
        }

    def dot_general(
        self,
        lhs,
        rhs,
        dimension_numbers,
        precision=None,
        preferred_element_type=None,
        *,
        out_sharding=None,
    ):
        """Replace `jax.lax.dot_general`."""
        (_, contracted), (_, batch) = dimension_numbers
        kernel = self._find_kernel("dot_general", rhs, lambda: (contracted, batch))
        if kernel is not None:
            return multiply(lhs, kernel, dimension_numbers, preferred_element_type)
        run: Any = lax.dot_general if self._packs("dot_general") else super().dot_general
        how = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
        return run(lhs, rhs, dimension_numbers, precision=precision, **how)

    def einsum(self, einsum_str, *operands, preferred_element_type=None, **how):
        """Replace `jax.numpy.einsum`."""

        def parse():
            return EinsumInfo.parse(einsum_str, ndims=(operands[0].ndim, operands[1].ndim))

        def axes():
            (_, contracted), (_, batch) = parse().dimension_numbers
            return contracted, batch

        kernel = self._find_kernel("einsum", operands[1], axes) if len(operands) == 2 else None
        if kernel is not None:
            info = parse()
            y = multiply(operands[0], kernel, info.dimension_numbers, preferred_element_type)
            return y if info.output_perm is None else y.transpose(info.output_perm)
        run = jnp.einsum if self._packs("einsum") else super().einsum
        return run(einsum_str, *operands, preferred_element_type=preferred_element_type, **how)

    def conv_general_dilated(self, lhs, rhs, *args, **how):
        """Replace `jax.lax.conv_general_dilated`, whose kernels are not packed."""
        packs = self._packs("conv_general_dilated")
        run = lax.conv_general_dilated if packs else super().conv_general_dilated
        return run(lhs, rhs, *args, **how)

    def ragged_dot(
        self,
        lhs,
        rhs,
        group_sizes,
        precision=None,
        preferred_element_type=None,
        group_offset=None,
        out_sharding=None,
    ):
        """Replace `jax.lax.ragged_dot`."""
        return self.ragged_dot_general(
            lhs,
            rhs,
            group_sizes,
            None,
            precision,
            preferred_element_type,
            group_offset,
            out_sharding,
        )

    def ragged_dot_general(
        self,
        lhs,
        rhs,
        group_sizes,
        ragged_dot_dimension_numbers,
        precision=None,
        preferred_element_type=None,
        group_offset=None,
        out_sharding=None,
    ):
        """Replace `jax.lax.ragged_dot_general`."""
        numbers = ragged_dot_dimension_numbers

        def axes():
            if numbers is None:
                return (1,), (0,)
            (_, contracted), (_, batch) = numbers.dot_dimension_numbers
            return contracted, (*numbers.rhs_group_dimensions, *batch)

        kernel = self._find_kernel("ragged_dot", rhs, axes)
        if kernel is not None:  # its axes are those of the dimension numbers
            rhs, numbers = kernel.tensor, None
        return ragged_dot(
            lhs,
            rhs,
            group_sizes,
            ragged_dot_dimension_numbers=numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
            group_offset=group_offset,
            out_sharding=out_sharding,
        )

    def _packs(self, op) -> bool:
        """Return whether the rule of the current module packs kernels of an op."""
        rule, _ = self._get_current_rule_and_op_id(op, only_rule=True)
        return rule is not None and rule.weight_qtype == QTYPE

    def _find_kernel(self, op, rhs, read_axes) -> PackedKernel | None:
        """Return the kernel that an operand is, packed now or before, or None for another operand.

        Args:
          op: name of the op, for the rules.
          rhs: second operand of the op.
          read_axes: function that returns which axes of `rhs` are contracted, and which count
            matrices.
        """
        if isinstance(rhs, PackedParam):
            packed = rhs.array
            axes = _find_axes(packed, *read_axes())
            if axes != packed.axes:
                raise ValueError(
                    f"kernel: expected a product with the axes for which it was packed, "
                    f"{packed.axes}; got {axes}. Leave this module out, by a rule before the others"
                )
            return packed
        if isinstance(rhs, WithAux) or not self._packs(op):
            return None
        name = _find_name(rhs)
        if name is None:
            return None
        return _store(name, rhs, HowToPack(_find_axes(rhs, *read_axes()), *self._options))


def quantize_params(params: Any, abstract_quantized_params: Any, **options: Any) -> Any:
    """Pack the parameters of a Linen model; the arguments are those of `qwix.quantize_params`.

    Args:
      params: parameters of the model before `qwix.quantize_model`, or some of them: a dictionary of
        arrays.
      abstract_quantized_params: the parameters that the quantized model initializes; shapes
        suffice.
      **options: further arguments of `qwix.quantize_params`.

    Returns:
      `params` with packed kernels.

    Raises:
      ValueError: if a parameter is not in the quantized model.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import qwix
      >>> from flax import linen as nn
      >>> from jax_nvfp4_moe.nn.qwix_provider import NVFP4Provider, quantize_params
      >>> model, x, key = nn.Dense(32), jnp.ones((2, 64)), jax.random.key(0)
      >>> packed = qwix.quantize_model(model, NVFP4Provider())
      >>> shapes = jax.eval_shape(packed.init, key, x)["params"]
      >>> params = quantize_params(model.init(key, x)["params"], shapes)
      >>> packed.apply({"params": params}, x).shape
      (2, 32)
    """
    packing: Any = _Packing
    return qwix.quantize_params(
        params, abstract_quantized_params, _qarray_module=packing, **options
    )


class _Packing:
    """What `qwix.quantize_params` calls instead of its own module of arrays."""

    @staticmethod
    def quantize(array, how):
        """Pack a kernel, or quantize it as Qwix does if another rule is its own."""
        return pack(array, how) if isinstance(how, HowToPack) else qarray.quantize(array, how)


def pack(kernel: jax.Array, how: HowToPack) -> PackedKernel:
    """Return a kernel as packed NVFP4, in the layout of the backend that will multiply it.

    Args:
      kernel: array of any float dtype.
      how: what its axes are for, and how it is packed.

    Raises:
      ValueError: if the number of inputs is not a multiple of 16.
    """
    axes, shape = how.axes, kernel.shape
    n, k = (math.prod(shape[axis] for axis in own) for own in (axes.outputs, axes.inputs))
    if k % BLOCK:
        raise ValueError(
            f"kernel: expected a multiple of {BLOCK} inputs, the size of an NVFP4 block; got {k}, "
            f"of a kernel {tuple(shape)}. Leave this module out, by a rule before the others"
        )
    matrices = jnp.transpose(kernel, (*axes.groups, *axes.outputs, *axes.inputs))
    matrices = matrices.reshape(*([-1] if axes.groups else []), n, k)
    tensor = quantize_by(matrices, how.algorithm)
    tensor = prepare(tensor, target=how.target, dtype=how.dtype)
    return PackedKernel(tensor, tuple(shape), axes, jnp.dtype(kernel.dtype))


def multiply(
    lhs: jax.Array,
    kernel: PackedKernel,
    dimension_numbers: lax.DotDimensionNumbers,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Compute what `jax.lax.dot_general` does, with a packed kernel as the second operand.

    Args:
      lhs: bfloat16, float16 or float32.
      kernel: kernel whose axes are used as `dimension_numbers` say.
      dimension_numbers: as in JAX.
      preferred_element_type: dtype of the result; None (default) for that of `lhs`.
    """
    (contracted, others), (batch, _) = dimension_numbers
    inputs = [contracted[list(others).index(axis)] for axis in kernel.axes.inputs]
    rows = [axis for axis in range(lhs.ndim) if axis not in (*batch, *contracted)]
    lead = [lhs.shape[axis] for axis in (*batch, *rows)]
    outputs = [kernel.shape[axis] for axis in kernel.axes.outputs]
    dtype = lhs.dtype if preferred_element_type is None else jnp.dtype(preferred_element_type)
    tensor: NVFP4Tensor = kernel.tensor
    x = jnp.transpose(lhs, (*batch, *rows, *inputs)).reshape(*lead, tensor.shape[-1])
    x = x.astype(x.dtype if x.dtype == dtype else jnp.float32)
    if not batch:
        y = linear(x, tensor)
    else:
        groups, flat = tensor.shape[0], x.reshape(-1, x.shape[-1])
        sizes = jnp.full(groups, flat.shape[0] // max(groups, 1), jnp.int32)
        y = grouped_gemm(flat, tensor, sizes)
    return y.astype(dtype).reshape(*lead, *outputs)


def _find_axes(kernel, contracted, groups) -> Axes:
    """Return what the axes of a kernel are for."""
    outputs = sorted(set(range(kernel.ndim)) - {*contracted, *groups})
    return Axes(tuple(groups), tuple(outputs), tuple(sorted(contracted)))


def _store(name, kernel, how) -> PackedKernel:
    """Pack a parameter of the current module, and put the packed kernel in its place."""
    module, packed = flax_util.get_current_module(), pack(kernel, how)
    if not isinstance(module, linen.Module):
        boxed = dataclasses.replace(packed, tensor=NVFP4Param(packed.tensor))
        setattr(module, name, PackedParam(boxed, how))
        return packed
    if not module.is_initializing():
        raise ValueError(
            f"{'/'.join((*module.path, name))}: expected a packed kernel, got an array. Pack the "
            "parameters with jax_nvfp4_moe.nn.qwix_provider.quantize_params"
        )
    module.put_variable("params", name, PackedParam(packed, how))
    return packed


def _find_name(operand) -> str | None:
    """Return the name of the parameter of the current module that an operand is, or None.

    Qwix finds a parameter that was cast by the trace or by its shape. Without a trace, several
    parameters may have that shape, such as gate and up projections. Then their values decide.
    """
    if isinstance(operand, Tracer):
        return flax_util.find_param(operand)
    module = flax_util.get_current_module()
    is_linen = isinstance(module, linen.Module)
    params = module.variables.get("params", {}) if is_linen else vars(module)
    values = {
        name: flax_util.unbox(value)
        for name, value in params.items()
        if is_linen or isinstance(value, nnx.Param)
    }
    twins = [name for name, value in values.items() if jnp.shape(value) == operand.shape]
    if len(twins) < 2:
        return flax_util.find_param(operand)
    same = (name for name in twins if jnp.array_equal(values[name].astype(operand.dtype), operand))
    return next(same, None)
