"""moe_mlp: a whole expert layer as one op."""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_nvfp4_moe.backends.reference import round_activations, round_to
from jax_nvfp4_moe.backends.resolution import log_conversion
from jax_nvfp4_moe.numerics.activations import ActivationCall, activate, find_activation
from jax_nvfp4_moe.numerics.routing import narrow_ids
from jax_nvfp4_moe.numerics.tensor import MoEParams, check_moe_params
from jax_nvfp4_moe.ops.dense import precision_for
from jax_nvfp4_moe.ops.gradient import (
    ExpertLayer,
    in_float32,
    straight_through,
    take_expert,
    with_expert_gradient,
)
from jax_nvfp4_moe.ops.preparation import find_checkpoint_scheme, plan_experts
from jax_nvfp4_moe.scheme import NEEDS_INPUT_SCALES, Plan, Scheme, Target

DTYPES = ("bfloat16", "float16", "float32")


def check_dtype(dtype) -> jnp.dtype:
    """Return `dtype`, that of a module, as a type that kernels take.

    Raises:
      ValueError: it is another one.
    """
    if jnp.dtype(dtype).name not in DTYPES:
        raise ValueError(f"dtype: expected {' or '.join(DTYPES)}, got {jnp.dtype(dtype).name}")
    return jnp.dtype(dtype)


def check_activations(name, x):
    """Check that `x` has a dtype that kernels take.

    Raises:
      ValueError: it has not; names the argument.
    """
    if x.dtype.name not in DTYPES:
        raise ValueError(f"{name}: expected dtype {' or '.join(DTYPES)}, got {x.dtype.name}")


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

    With ``W1 = dequantize(params.gate_up)``, ``W2 = dequantize(params.down)`` and ``act`` of
    `numerics.activations`::

      y[t] = sum_j expert_weights[t, j] * (W2[e] @ act(W1[e] @ x[t] + b1[e]) + b2[e]),
      e = expert_ids[t, j]

    The result of ``act`` is rounded to the dtype of `x`; sums are float32. Under the w4a4 schemes
    the inputs of both products are first rounded to NVFP4.

    Gradients flow to `x`, `expert_weights` and biases, in plain XLA, as if nothing was rounded;
    the weights are frozen. See `ops.gradient`.

    Args:
      x: tokens ``[t, h]``, bfloat16, float16 or float32; t may be 0.
      params: the experts; canonical, or as `prepare` returns them. Another layout than the
        backend's is converted inside the trace.
      expert_ids: ``[t, k]`` integers. An id of -1 or out of range contributes nothing.
      expert_weights: ``[t, k]``, taken as float32.
      scheme: None, "checkpoint" or a `Scheme`; parameters count as w4a4 where they have input
        scales.
      target: the device to lower for; the current one where None.
      backend: name of a record; a sequence of names, tried in that order; None to choose.
      activation: name of a row of `numerics.activations.ACTIVATIONS`, or what `find_activation`
        returns.
      alpha, beta, limit: parameters of the activation, its row's where None.
      weight_on_input: multiply the expert's input by its weight instead of its output (Llama-4).
      plan: of `ops.preparation.plan_experts`, in place of `scheme`, `target` and `backend`: modules
        pass the plan that their weights were prepared for.

    Returns:
      ``[t, h]`` in the dtype of `x`.

    Raises:
      ValueError: shapes or dtypes disagree, or the scheme or the activation is unknown.
      NoBackendError: no backend can run this; says why, one by one.

    Reference:
      `backends.reference.moe_mlp` defines the result, up to the order of summation.
    """
    call = find_activation(activation, alpha, beta, limit)
    check_moe_params(params)
    check_call(x, params, expert_ids, expert_weights, call)
    facts = {"dtype": x.dtype.name, "top_k": expert_ids.shape[1]}
    if plan is None:
        declared = find_checkpoint_scheme(params)
        how = {"checkpoint_scheme": declared, "scheme": scheme, "target": target}
        plan = plan_experts(params, **how, backend=backend, activation=call.name, **facts)
    else:
        plan.check(num_experts=params.num_experts, **facts)
    if params.layout != plan.layout:
        log_conversion("moe_mlp", params.layout, plan.layout)
    params = in_float32(params.to_layout(plan.layout))
    if plan.scheme is not Scheme.W4A4:  # no kernel reads them
        params = dataclasses.replace(params, gate_up_input_scale=None, down_input_scale=None)
    static = {"scheme": plan.scheme, "call": call, "weight_on_input": weight_on_input}
    rows = functools.partial(_run_rows, call, plan.scheme, x.dtype)
    layer = ExpertLayer(params.num_experts, _read_expert, rows, weight_on_input)
    run = with_expert_gradient(functools.partial(plan.lower, **static), layer)
    return run(x, params, narrow_ids(expert_ids), expert_weights.astype(jnp.float32))


def _read_expert(params, expert):
    """Return one expert's two matrices and its input scales, for the backward pass."""
    one = take_expert(params, expert)
    matrices = (weight.dequantize(jnp.float32) for weight in (one.gate_up, one.down))
    return *matrices, one.gate_up_input_scale, one.down_input_scale


def _run_rows(call, scheme, dtype, weights, biases, rows):
    """Run rows of one expert through both products, differentiably; see `ExpertLayer`."""
    gate_up, down, gate_up_scale, down_scale = weights

    def product(rows, weight, scale, bias):
        rows = straight_through(lambda rows: round_activations(rows, scale, scheme), rows)
        y = jnp.matmul(rows, weight.T, precision=precision_for(dtype))
        return y if bias is None else y + bias[None]

    inner = activate(call, product(rows, gate_up, gate_up_scale, biases["gate_up_bias"]))
    inner = straight_through(lambda inner: round_to(inner, dtype), inner)
    return product(inner, down, down_scale, biases["down_bias"])


def check_call(x, params, expert_ids, expert_weights, call) -> None:
    """Check that the arguments of an expert layer go together.

    Raises:
      ValueError: they do not; names the argument.
    """
    check_activations("x", x)
    if x.ndim != 2 or x.shape[1] != params.hidden:
        raise ValueError(f"x: expected shape [t, {params.hidden}], got {x.shape}")
    if expert_ids.ndim != 2 or expert_ids.shape[0] != x.shape[0]:
        raise ValueError(f"expert_ids: expected shape [{x.shape[0]}, k], got {expert_ids.shape}")
    if not jnp.issubdtype(expert_ids.dtype, jnp.integer):
        raise ValueError(f"expert_ids: expected integers, got {expert_ids.dtype.name}")
    if expert_weights.shape != expert_ids.shape:
        raise ValueError(
            f"expert_weights: expected shape {expert_ids.shape}, that of expert_ids; "
            f"got {expert_weights.shape}"
        )
    if call.row.gated != params.gated:
        kind = "a gated" if params.gated else "a non-gated"
        raise ValueError(
            f"activation: expected {kind} one, since gate_up is {params.gate_up.shape} and down "
            f"{params.down.shape}; got {call.name!r}"
        )
    check_row_order(params, call)


def check_row_order(params, call) -> None:
    """Check that the global scales of `gate_up` go with the order in which `call` takes its rows.

    Two scales an expert belong to the halves of its rows, which is gate and up where they stand in
    halves and nothing where they alternate: kernels would take one for gate and one for up.

    Raises:
      ValueError: gate and up rows alternate, and `gate_up` has two scales an expert.
    """
    scale = getattr(params.gate_up, "global_scale", None)  # those of DenseExperts have none
    if call.row.interleaved and scale is not None and scale.ndim > params.down.global_scale.ndim:
        raise ValueError(
            f"activation: {call.name!r} takes gate and up rows that alternate, with one global "
            f"scale an expert; got {call.name!r} with gate_up.global_scale {scale.shape}, one for "
            "each half of the rows. Give gate rows, then up rows (as quantize_experts returns "
            "them) with activation 'swigluoai_uninterleave', or quantize both with one scale"
        )


def check_input_scales(name, params, scheme) -> None:
    """Check that experts have the input scales that `scheme` multiplies by.

    Raises:
      ValueError: they have none; says how to get them, and which schemes need none.
    """
    if scheme is Scheme.W4A4 and not params.has_input_scales:
        raise ValueError(f"{name}: {NEEDS_INPUT_SCALES}")
