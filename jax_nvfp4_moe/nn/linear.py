"""NVFP4Linear, and what modules with NVFP4 weights share."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_nvfp4_moe.nn.dense import NVFP4Param
from jax_nvfp4_moe.nn.intermediates import record
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor, quantize
from jax_nvfp4_moe.ops.moe import check_dtype
from jax_nvfp4_moe.ops.preparation import convert, plan_product
from jax_nvfp4_moe.ops.products import linear
from jax_nvfp4_moe.parallel.expert_mesh import first_shard_only
from jax_nvfp4_moe.scheme import Scheme, Target


class NVFP4Linear(nnx.Module):
    """A linear with an NVFP4 matrix: ``y = x @ dequantize(weight).T + bias``.

    Attributes:
      weight: `NVFP4Param` of an `NVFP4Tensor` ``[n, k]``, in the layout of its backend.
      bias: `nnx.Param` ``[n]``, or None.
      input_scale: `NVFP4Param` of the activations' float32 global scale, or None.
      plan: static; the scheme, the kernel and the layout of `weight`. The call follows it.
      dtype: static; of the result.
      adds_bias_once: static; whether shards add up their results, so that one of them adds it.
    """

    adds_bias_once: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        weight: NVFP4Tensor | None = None,
        bias: Float[Array, " n"] | None = None,
        input_scale: Float[Array, ""] | None = None,
        checkpoint_scheme: Scheme | str = Scheme.W4A16,
        scheme: Scheme | str | None = None,
        target: Target | None = None,
        backend: str | Sequence[str] | None = None,
        dtype=jnp.bfloat16,
        rngs: nnx.Rngs | None = None,
    ):
        """Make a linear of ``k = in_features`` and ``n = out_features``.

        Args:
          in_features, out_features: k, a multiple of 16, and n.
          use_bias: whether to make a bias of zeros where none is given.
          weight: ``[n, k]``; random where it is None, which needs `rngs`.
          bias: ``[n]``.
          input_scale: needed by scheme w4a4.
          checkpoint_scheme: what the checkpoint says of this module: "w4a16" or "w4a4".
          scheme: as for `ops.linear`.
          target: the device to run on; the current one where None.
          backend: name of a record; a sequence of names, tried in that order; None to choose.
          dtype: of the result; inputs are cast to it.
          rngs: where random weights come from (stream "params"); required without `weight`.
            `nnx.bridge.to_linen` passes its own.

        Raises:
          ValueError: a shape disagrees, the scheme is unknown or lacks input scales, or `weight`
            and `rngs` are both None.
          NoBackendError: no backend fits.
        """
        self.dtype = check_dtype(dtype)
        shape = (out_features, in_features)
        check_rngs(rngs, weight=weight)
        if weight is None:
            weight = random_tensor(shape, rngs)
        check_shape("weight", weight.shape, shape)
        self.plan = plan_product(
            weight,
            checkpoint_scheme=checkpoint_scheme,
            scheme=scheme,
            target=target,
            backend=backend,
            dtype=self.dtype,
        )
        self.weight = NVFP4Param(convert(weight, self.plan.layout))
        if bias is None and use_bias:
            bias = jnp.zeros(out_features, self.dtype)
        if bias is not None:
            check_shape("bias", bias.shape, (out_features,))
        _check_input_scale(input_scale, self.scheme)
        self.bias = None if bias is None else nnx.Param(bias)
        self.input_scale = wrap_scale(input_scale)

    @classmethod
    def from_dense(cls, kernel: Float[Array, "k n"], **options: Any) -> "NVFP4Linear":
        """Quantize the kernel of a Flax linear, such as that of `flax.nnx.Linear`.

        Flax stores kernels as ``[inputs, outputs]`` and computes ``x @ kernel``; NVFP4 matrices are
        ``[outputs, inputs]``. This method transposes. With ``amax / 2688`` as the global scale::

          linear = NVFP4Linear.from_dense(dense.kernel[...], bias=dense.bias[...])

        Args:
          kernel: ``[inputs, outputs]`` in any float dtype; inputs a multiple of 16.
          options: keyword arguments of the constructor other than `weight`, such as `bias`.

        Raises:
          ValueError: `kernel` has no two axes, or inputs is no multiple of 16; also as the
            constructor.
        """
        kernel = jnp.asarray(kernel)
        if kernel.ndim != 2:
            raise ValueError(f"kernel: expected [inputs, outputs], got shape {kernel.shape}")
        return cls(*kernel.shape, weight=quantize(kernel.T), **options)

    def __call__(self, x: Float[Array, "... k"]) -> Float[Array, "... n"]:
        """Multiply; `x` is cast to the module's dtype, which the result has."""
        record(self, x)
        return linear(
            x.astype(self.dtype),
            self.weight.get_value(),
            input_scale=read_value(self.input_scale),
            bias=self._own_bias(),
            plan=self.plan,
        )

    def _own_bias(self):
        bias = read_value(self.bias)
        return first_shard_only(bias) if bias is not None and self.adds_bias_once else bias

    @property
    def scheme(self) -> Scheme | None:
        """How activations enter the product."""
        return self.plan.scheme

    @property
    def checkpoint_scheme(self) -> Scheme | None:
        """What the checkpoint says of the weight."""
        return self.plan.checkpoint_scheme


def _check_input_scale(input_scale, scheme):
    """Check that the scale of activations is one number, and there where `scheme` reads it."""
    if input_scale is not None:
        check_shape("input_scale", jnp.shape(input_scale), ())
    elif scheme is Scheme.W4A4:
        raise ValueError(
            "input_scale: scheme w4a4 needs the global scale of the activations, amax / 2688; got "
            "None. Pass it, or use scheme w4a4_unit_scale or w4a4_token_scale, which need none"
        )


def read_value(variable):
    """Return the array of a variable; None of None."""
    return None if variable is None else variable.get_value()


def wrap_value(kind, value):
    """Return a variable of class `kind`; None of None."""
    return None if value is None else kind(value)


def wrap_scale(value):
    """Return the variable of a float32 scale; None of None."""
    return None if value is None else NVFP4Param(jnp.asarray(value, jnp.float32))


def check_shape(name, shape, expected):
    """Check the shape of an argument.

    Raises:
      ValueError: it differs; names the argument.
    """
    if tuple(shape) != tuple(expected):
        raise ValueError(f"{name}: expected sizes {tuple(expected)}, got {tuple(shape)}")


def check_rngs(rngs, **weights):
    """Check that what `weights` lacks can be made at random.

    Raises:
      ValueError: a weight and `rngs` are None; names all weights that are missing.
    """
    missing = [name for name, value in weights.items() if value is None]
    if missing and rngs is None:
        raise ValueError(
            "rngs: expected an nnx.Rngs, which makes random weights, or these weights: "
            f"{', '.join(missing)}; got None"
        )


def random_matrix(shape, rngs):
    """Return float32 normal values of variance ``1 / k``."""
    return jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(shape[-1])


def random_tensor(shape, rngs):
    """Return a random matrix in NVFP4, see `random_matrix`."""
    return quantize(random_matrix(shape, rngs))
