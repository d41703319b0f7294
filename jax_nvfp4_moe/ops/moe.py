"""`moe_mlp`: a whole expert layer as one op."""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.backends.plan import Plan
from jax_nvfp4_moe.backends.record import FLOATS
from jax_nvfp4_moe.numerics.activations import ActivationCall, activate, find_activation
from jax_nvfp4_moe.numerics.routing import narrow_ids
from jax_nvfp4_moe.numerics.tensor import MoEParams, check_moe_params
from jax_nvfp4_moe.ops.checks import check_floats
from jax_nvfp4_moe.ops.conversion import report_conversion
from jax_nvfp4_moe.ops.dense import precision_for
from jax_nvfp4_moe.ops.documentation import public_op
from jax_nvfp4_moe.ops.experts.backward import grouped_bars, plan_grouped_bars
from jax_nvfp4_moe.ops.experts.meaning import round_activations, round_to
from jax_nvfp4_moe.ops.gradient import (
    ExpertLayer,
    in_float32,
    straight_through,
    take_expert,
    visit_experts,
    with_expert_gradient,
)
from jax_nvfp4_moe.ops.preparation import find_checkpoint_scheme, plan_experts
from jax_nvfp4_moe.scheme import NEEDS_INPUT_SCALES, Scheme, Target


def check_dtype(dtype) -> jnp.dtype:
    """Return the dtype of a module as a `jnp.dtype`, if kernels accept it.

    Raises:
      ValueError: if it is not bfloat16, float16 or float32.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in FLOATS:
        got = repr(dtype) if found is None else found.name
        raise ValueError(f"dtype: expected {' or '.join(FLOATS)}, got {got}")
    return found


@public_op
def moe_mlp(
    x: Float[Array, "t h"],
    params: MoEParams,
    expert_ids: Int[Array, "t k"],
    expert_weights: Float[Array, "t k"],
    *,
    scheme: Scheme | str | None = None,
    target: Target | None = None,
    backend: str | Sequence[str] | None = None,
    activation: str | ActivationCall = "silu",
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    weight_on_input: bool = False,
    plan: Plan | None = None,
) -> Float[Array, "t h"]:
    """Run each token through its experts and add up their weighted outputs.

    With ``W1 = dequantize(params.gate_up)``, ``W2 = dequantize(params.down)`` and the activation
    function ``act``::

      y[t] = sum_j expert_weights[t, j] * (W2[e] @ act(W1[e] @ x[t] + b1[e]) + b2[e]),
      e = expert_ids[t, j]

    The result of ``act`` is rounded to the dtype of `x`, and sums are float32. Under the w4a4
    schemes, the inputs of both GEMMs are rounded to NVFP4 first.

    Gradients flow to `x`, `expert_weights` and biases, with every rounding as the identity; the
    weights are frozen. The backward pass runs on kernels on CPUs and, in 16 bits, on devices of
    compute capability 9.0. Elsewhere it runs in plain XLA.

    Args:
      x: tokens ``[t, h]``, bfloat16, float16 or float32; t may be 0.
      params: the `MoEParams` of the layer, canonical or as `prepare` returns them. If the layout is
        not that of the chosen backend, each call converts the weights, and a warning in the log
        says so.
      expert_ids: integers ``[t, k]``. An id that is -1 or out of range contributes nothing.
      expert_weights: ``[t, k]`` of any float dtype, taken as float32.
      scheme: "checkpoint", a `Scheme` or its name. None (default) lets the weights and the device
        decide. Parameters with input scales count as a w4a4 checkpoint.
      target, backend: where the op runs, and which kernel runs it.
      activation: name of an activation, "silu" by default, or the result of `find_activation`.
      alpha: parameter of the activation; None (default) for the value of the activation.
      beta: parameter of the activation; None (default) for the value of the activation.
      limit: bound of the activation's inputs; None (default) for the value of the activation.
      weight_on_input: whether the weight of an expert multiplies its input instead of its output
        (Llama-4); False by default.
      plan: a `Plan` that replaces `scheme`, `target` and `backend`. Modules pass the plan for which
        their weights were prepared. None (default) makes a plan.

    Returns:
      ``[t, h]`` in the dtype of `x`.

    Raises:
      ValueError: if shapes or dtypes disagree, or the scheme or the activation is unknown.
      ValueError: if scheme "w4a4" is requested and `params` have no input scales.
      NoBackendError: if no backend can run the call.

    Example:
      >>> import jax
      >>> import jax_nvfp4_moe as nvfp4
      >>> params = nvfp4.testing.random_moe_params(
      ...     jax.random.key(0), num_experts=4, hidden=64, intermediate=32
      ... )
      >>> params = nvfp4.prepare(params, scheme="w4a16", dtype="float32")
      >>> x = jax.random.normal(jax.random.key(1), (5, 64))
      >>> ids, weights = nvfp4.testing.random_routing(jax.random.key(2), 5, 4, 2)
      >>> y = nvfp4.ops.moe_mlp(x, params, ids, weights, scheme="w4a16")
      >>> y.shape, y.dtype.name
      ((5, 64), 'float32')

    Reference:
      `ops.experts.meaning.moe_mlp` defines the result, up to the order of summation.
    """
    call = find_activation(activation, alpha, beta, limit)
    check_moe_params(params)
    check_call(x, params, expert_ids, expert_weights, call)
    facts = {"dtype": x.dtype.name, "top_k": expert_ids.shape[1]}
    name = "params" if plan is None else "module.params"
    if plan is None:
        declared = find_checkpoint_scheme(params)
        how = {"checkpoint_scheme": declared, "scheme": scheme, "target": target}
        plan = plan_experts(params, **how, backend=backend, activation=call.name, **facts)
    else:
        plan.check(num_experts=params.num_experts, **facts)
    report_conversion("moe_mlp", params.layout, plan, name)
    params = in_float32(params.to_layout(plan.layout))
    if plan.scheme is not Scheme.W4A4:  # kernels read input scales under w4a4 only
        params = dataclasses.replace(params, gate_up_input_scale=None, down_input_scale=None)
    static = {"scheme": plan.scheme, "call": call, "weight_on_input": weight_on_input}
    assert plan.scheme is not None  # only ops without weights have plans without a scheme
    rows = _RunRows(call, plan.scheme, x.dtype)
    layer = ExpertLayer(params.num_experts, _read_expert, rows, weight_on_input)
    grouped = plan_grouped_bars(params, plan, x.shape[0], x.dtype, call, weight_on_input)
    find_bars = functools.partial(*((grouped_bars, grouped) if grouped else (visit_experts, layer)))
    run = with_expert_gradient(functools.partial(plan.lower, **static), find_bars)
    return run(x, params, narrow_ids(expert_ids), expert_weights.astype(jnp.float32))


def _read_expert(params, expert):
    """Return the two matrices and the input scales of one expert for the backward pass."""
    one = take_expert(params, expert)
    matrices = (weight.dequantize(jnp.float32) for weight in (one.gate_up, one.down))
    return *matrices, one.gate_up_input_scale, one.down_input_scale


@dataclasses.dataclass(frozen=True)
class _RunRows:
    """Run rows of one expert through both GEMMs in differentiable operations; see `ExpertLayer`.

    Attributes:
      call: the activation.
      scheme: how the inputs of the GEMMs are rounded.
      dtype: dtype of the tokens.
    """

    call: ActivationCall
    scheme: Scheme
    dtype: jnp.dtype

    def __call__(self, weights, biases, rows):
        """Return float32 ``[m, h]`` for rows ``[m, h]``."""
        gate_up, down, gate_up_scale, down_scale = weights
        inner = self._multiply(rows, gate_up, gate_up_scale, biases["gate_up_bias"])
        inner = activate(self.call, inner)
        inner = straight_through(lambda inner: round_to(inner, self.dtype), inner)
        return self._multiply(inner, down, down_scale, biases["down_bias"])

    def _multiply(self, rows, weight, scale, bias):
        """Round rows as the scheme says, multiply, and add the bias."""
        rows = straight_through(lambda rows: round_activations(rows, scale, self.scheme), rows)
        y = jnp.matmul(rows, weight.T, precision=precision_for(self.dtype))
        return y if bias is None else y + bias[None]


def check_call(x, params, expert_ids, expert_weights, call) -> None:
    """Check that the arguments of an expert layer fit together.

    Args:
      x: tokens ``[t, h]``.
      params: `MoEParams` or `DenseExperts`.
      expert_ids: integers ``[t, k]``.
      expert_weights: ``[t, k]``.
      call: the activation.

    Raises:
      ValueError: if they do not; the message names the argument.
    """
    check_floats(x=x)
    if x.ndim != 2 or x.shape[1] != params.hidden:
        raise ValueError(f"x: expected shape [t, {params.hidden}], got {x.shape}")
    if expert_ids.ndim != 2 or expert_ids.shape[0] != x.shape[0]:
        raise ValueError(f"expert_ids: expected shape [{x.shape[0]}, k], got {expert_ids.shape}")
    if not jnp.issubdtype(expert_ids.dtype, jnp.integer):
        raise ValueError(f"expert_ids: expected integers, got {expert_ids.dtype.name}")
    if expert_weights.shape != expert_ids.shape:
        raise ValueError(
            f"expert_weights: expected shape {expert_ids.shape}, the shape of expert_ids; "
            f"got {expert_weights.shape}"
        )
    if call.row.gated != params.gated:
        kind = "a gated activation" if params.gated else "an activation that is not gated"
        raise ValueError(
            f"activation: expected {kind}, because gate_up has shape {params.gate_up.shape} "
            f"and down has shape {params.down.shape}; got {call.name!r}"
        )
    check_row_order(params, call)


def check_row_order(params, call) -> None:
    """Check that the global scales of `gate_up` fit the order in which `call` expects its rows.

    Two scales per expert belong to the two halves of the rows. These are gate and up if the rows
    are in halves. If gate and up rows alternate, kernels would still apply one scale to gate and
    the other to up, and the result would be wrong.

    Raises:
      ValueError: if gate and up rows alternate, and `gate_up` has two scales per expert.
    """
    scale = getattr(params.gate_up, "global_scale", None)  # DenseExperts have no global scale
    if call.row.interleaved and scale is not None and scale.ndim > params.down.global_scale.ndim:
        raise ValueError(
            f"activation: {call.name!r} expects gate and up rows that alternate, with one global "
            f"scale per expert; got gate_up.global_scale of shape {scale.shape}, one scale for "
            "each half of the rows. Use activation 'swigluoai_uninterleave' if all gate rows come "
            "first, as quantize_experts returns them, or quantize both with one scale"
        )


def check_input_scales(name, params, scheme) -> None:
    """Check that experts have the input scales that `scheme` needs.

    Args:
      name: what the error message calls the argument.
      params: `MoEParams`.
      scheme: the chosen scheme.

    Raises:
      ValueError: if `scheme` is w4a4 and the experts have no input scales; the message says how to
        get them, and which schemes need none.
    """
    if scheme is Scheme.W4A4 and not params.has_input_scales:
        raise ValueError(f"{name}: {NEEDS_INPUT_SCALES}")
