"""NVFP4Linear: a linear layer whose weight matrix is stored in NVFP4."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_nvfp4_moe.nn.intermediates import record
from jax_nvfp4_moe.nn.linear.lora import LoRA, add_adapter, weight_with_adapters
from jax_nvfp4_moe.nn.random_weights import check_rngs, random_tensor
from jax_nvfp4_moe.nn.variables import NVFP4Param, read_bias, read_value, wrap_scale, wrap_value
from jax_nvfp4_moe.numerics.arguments import as_array, check_kind, check_shape, check_size
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor, quantize_by
from jax_nvfp4_moe.ops.moe import check_dtype
from jax_nvfp4_moe.ops.preparation import (
    convert,
    convert_stacked,
    default_checkpoint_scheme,
    plan_product,
    plan_with_input_scales,
)
from jax_nvfp4_moe.ops.products import linear
from jax_nvfp4_moe.scheme import Scheme, Target


class NVFP4Linear(nnx.Module):
    """A linear layer whose weight matrix is stored in NVFP4.

    With ``W = dequantize(weight)`` of shape ``[n, k]``::

      y = x @ W.T + bias

    Depending on the scheme, `x` enters the product as it is or is first rounded to NVFP4. Sums are
    float32. Gradients flow to `x` and `bias`. The weight is stored as `NVFP4Param`, which is not an
    `nnx.Param`, so optimizers skip it.

    There is no bias unless you pass ``use_bias=True`` or a `bias`: `nnx.Linear` has one by default.

    Attributes:
      weight: `NVFP4Param` that holds an `NVFP4Tensor` ``[n, k]``, in the layout of the chosen
        backend.
      bias: `nnx.Param` ``[n]``, or None if the layer has no bias.
      input_scale: `NVFP4Param` that holds a float32 scalar, the calibrated global scale of the
        activations (``amax / 2688``); None if there is none.
      plan: static `Plan`. The scheme, the backend and the weight layout, chosen once when
        the module is made. Every call follows it.
      dtype: static dtype of the result; inputs are cast to it.
      bias_axis: static str, None by default. The mesh axis over which the columns of `weight`
        are sharded and the results summed. Then only the first shard adds the bias.
      adapter: `LoRA`, or None by default. What `add_lora` has added beside the weight.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jax_nvfp4_moe as nvfp4
      >>> linear = nvfp4.NVFP4Linear(64, 32, use_bias=True, rngs=nnx.Rngs(0))
      >>> y = linear(jnp.ones((5, 64), jnp.bfloat16))
      >>> y.shape, y.dtype.name
      ((5, 32), 'bfloat16')

    Source: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025.
    """

    bias_axis: str | None = None
    adapter: LoRA | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        weight: NVFP4Tensor | None = None,
        bias: Float[Array, " n"] | None = None,
        input_scale: Float[Array, ""] | None = None,
        checkpoint_scheme: Scheme | str | None = None,
        scheme: Scheme | str | None = None,
        target: Target | None = None,
        backend: str | Sequence[str] | None = None,
        dtype=jnp.bfloat16,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        """Make a layer with ``k = in_features`` inputs and ``n = out_features`` outputs.

        Args:
          in_features: k, a multiple of 16.
          out_features: n.
          use_bias: whether to add a bias of zeros if `bias` is None. A `bias` that you pass is used
            either way. Defaults to False, where `nnx.Linear` has True.
          weight: `NVFP4Tensor` ``[n, k]`` in any layout. None draws random weights from `rngs`:
            normal values of variance ``1 / k``, quantized to NVFP4.
          bias: float array ``[n]``, or None.
          input_scale: float32 scalar, the global scale of the activations, ``amax / 2688``. Scheme
            "w4a4" requires it; the other schemes ignore it. Defaults to None.
          checkpoint_scheme: the scheme that the checkpoint declares for this weight: "w4a16" or
            "w4a4". None (default) means "w4a4" if `scheme` is "w4a4" and there is an `input_scale`,
            and "w4a16" otherwise.
          scheme: the scheme to run. None chooses from `checkpoint_scheme` and the device;
            "checkpoint" takes `checkpoint_scheme`; otherwise a `Scheme` or its name.
          target: the device to run on. None takes JAX's default device.
          backend: name of a backend, or a sequence of names to try in order. None chooses the first
            backend that can run the layer.
          dtype: dtype of the result, to which inputs are cast: bfloat16 (the default), float16 or
            float32.
          param_dtype: dtype of a bias of zeros. A `bias` that you pass keeps its dtype. Defaults to
            float32.
          rngs: source of random weights, from its stream "params". Required if `weight` is None.
            `nnx.bridge.to_linen` passes its own.

        Raises:
          TypeError: an argument has a wrong type.
          ValueError: a shape, the dtype or the scheme is wrong, or `in_features` is not a multiple
            of 16. Also if scheme "w4a4" has no `input_scale`, or if `weight` and `rngs` are both
            None.
          NoBackendError: no backend can run the layer; the message gives the reason of each.
        """
        self.dtype = check_dtype(dtype)
        shape = (out_features, in_features)
        check_rngs(rngs, weight=weight)
        check_kind("target", target, Target, type(None))
        check_size("in_features", in_features, BLOCK)
        check_size("out_features", out_features)
        if weight is None:
            weight = random_tensor(shape, rngs)
        check_kind("weight", weight, NVFP4Tensor)
        check_shape("weight", weight.shape, shape)
        self.plan = plan_product(
            weight,
            checkpoint_scheme=checkpoint_scheme
            or default_checkpoint_scheme(input_scale is not None, scheme),
            scheme=scheme,
            target=target,
            backend=backend,
            dtype=self.dtype,
        )
        self.weight = NVFP4Param(convert(weight, self.plan.layout))
        if bias is None and use_bias:
            bias = jnp.zeros(out_features, param_dtype)
        if bias is not None:
            check_kind("bias", bias, Float[Array, " n"])
            check_shape("bias", bias.shape, (out_features,))
        _check_input_scale(input_scale, self.scheme)
        self.bias = wrap_value(nnx.Param, bias)
        self.input_scale: NVFP4Param | None = nnx.data(wrap_scale(input_scale))

    @classmethod
    def from_dense(
        cls, kernel: Float[Array, "k n"], *, algorithm: str = "max", **options: Any
    ) -> "NVFP4Linear":
        """Quantize the kernel of a Flax linear layer, such as `flax.nnx.Linear`.

        Flax stores a kernel as ``[inputs, outputs]`` and computes ``x @ kernel``. An `NVFP4Tensor`
        is ``[outputs, inputs]``, so this method transposes the kernel.

        Args:
          kernel: ``[inputs, outputs]`` in any float dtype; inputs must be a multiple of 16.
          algorithm: how to choose the scale of each block of 16 weights, as for `quantize_experts`:
            "max" (default), "four_or_six" or "search".
          **options: keyword arguments of the constructor other than `weight`, such as `bias` or
            `input_scale`.

        Returns:
          An `NVFP4Linear` with ``in_features = inputs`` and ``out_features = outputs``.

        Raises:
          ValueError: `kernel` does not have two axes, or inputs is not a multiple of 16. Also the
            errors of the constructor.
          NoBackendError: no backend can run the layer.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> import jax_nvfp4_moe as nvfp4
          >>> dense = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
          >>> linear = nvfp4.NVFP4Linear.from_dense(dense.kernel[...], bias=dense.bias[...])
          >>> linear(jnp.ones((5, 64), jnp.bfloat16)).shape
          (5, 32)
        """
        kernel = as_array("kernel", kernel)
        if kernel.ndim != 2:
            raise ValueError(
                f"kernel: expected two axes, [inputs, outputs]; got shape {kernel.shape}"
            )
        check_size("kernel: inputs", kernel.shape[0], BLOCK)
        return cls(*kernel.shape, weight=quantize_by(kernel.T, algorithm), **options)

    def __call__(self, x: Float[Array, "... k"]) -> Float[Array, "... n"]:
        """Multiply `x` by the weight and add the bias.

        Args:
          x: ``[..., k]``; cast to the module's dtype.

        Returns:
          ``[..., n]`` in the module's dtype.

        Raises:
          TypeError: `x` is no array.
          ValueError: the last axis of `x` has another size than k.
        """
        check_kind("x", x, Float[Array, "... k"])
        y = self._multiply_by(weight_with_adapters(self, self.adapter), x, self.dtype)
        return add_adapter(self, x, y)

    def _multiply_by(self, weight: NVFP4Tensor, x: Float[Array, "... k"], dtype):
        """Do what a call does without an adapter, with another weight and in another dtype."""
        record(self, x)
        return linear(
            x.astype(self.dtype),
            weight,
            input_scale=read_value(self.input_scale),
            bias=read_bias(self),
            plan=self.plan,
        ).astype(dtype)

    def set_input_scale(
        self, scale: Float[Array, "..."], *, scheme: Scheme | str | None = None
    ) -> None:
        """Set the calibrated input scale, and plan again for a weight that has one.

        Args:
          scale: float32 scalar, amax / 2688 of the activations. If the module is stacked, as
            `nnx.vmap` makes it, one value for each layer.
          scheme: the scheme to run from now on, as for the constructor. None (default) keeps what
            the module was asked for.

        Raises:
          ValueError: the scheme is unknown.
          NoBackendError: no backend can run the layer.
        """
        plan, weight = plan_with_input_scales(self.plan, scheme), self.weight.get_value()
        self.weight.set_value(convert_stacked(weight, plan.layout, weight.packed.ndim - 2))
        self.input_scale, self.plan = wrap_scale(scale), plan

    @property
    def scheme(self) -> Scheme | None:
        """The scheme that runs: how activations enter the product."""
        return self.plan.scheme

    @property
    def checkpoint_scheme(self) -> Scheme | None:
        """The scheme that the checkpoint declares for the weight."""
        return self.plan.checkpoint_scheme


def _check_input_scale(input_scale, scheme):
    """Check that the input scale is a scalar, and that it is present if `scheme` reads it."""
    if input_scale is not None:
        check_shape("input_scale", jnp.shape(input_scale), ())
    elif scheme is Scheme.W4A4:
        raise ValueError(
            "input_scale: scheme w4a4 needs the global scale of the activations, amax / 2688; got "
            "None. Pass it, or use scheme w4a4_unit_scale or w4a4_token_scale, which do not need it"
        )
