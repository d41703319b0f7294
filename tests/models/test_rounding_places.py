"""Test that the roundings of a decoding step for a GPU do not depend on what XLA fuses.

If XLA computes a cast to 16 bits and the cast back in one fused kernel, it may drop both. Models
therefore use `numerics.casts` wherever operations of XLA follow each other.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params
from support.files.given import CHECKPOINTS
from support.models.architecture import EACH_MIXER

from jax_nvfp4_moe import Target
from jax_nvfp4_moe.checkpoint import open_checkpoint
from jax_nvfp4_moe.models.loading import find_model
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.numerics.casts import cast, compute

HALVES = (jnp.bfloat16, jnp.float16)
# Operations whose results are some of their operands' values. All others round a result of 16 bits.
EXACT = {
    *("abs", "broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "dynamic_update_slice"),
    *("gather", "max", "min", "neg", "pad", "reduce_max", "reduce_min", "reshape", "rev"),
    *("scatter", "select_n", "sign", "slice", "sort", "split", "squeeze", "stop_gradient"),
    "transpose",
}
CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"}
OTHER = {"ffi_call", "optimization_barrier"}  # XLA fuses nothing across these


def find_pairs(closed: ClosedJaxpr) -> list[str]:
    """Return the casts to float32 of numbers that nothing but a cast, or XLA, has rounded."""
    pairs: list[str] = []
    _follow(closed.jaxpr, {}, pairs)
    return pairs


def _follow(jaxpr, known, pairs):
    """Follow the arrays of a program, and append to `pairs`.

    Args:
      jaxpr: the program.
      known: its operands -> "rounds" if operations of XLA round them to 16 bits, or "is round" for
        float32 numbers that need no rounding. Others are not in here.
      pairs: what has been found.

    Returns:
      The same for its results.
    """

    def read(atom):
        return None if isinstance(atom, Literal) else known.get(atom)

    padded = {v for eqn in jaxpr.eqns if eqn.primitive.name == "pad" for v in eqn.outvars}
    for eqn in jaxpr.eqns:
        name, inner = eqn.primitive.name, list(jaxprs_in_params(eqn.params))
        states = [read(atom) for atom in eqn.invars]
        if name in CALLS:
            own = {v: s for v, s in zip(inner[0].invars, states, strict=True) if s}
            found = _follow(inner[0], own, pairs)
        else:
            for body in inner:
                _follow(body, {}, pairs)
            found = [None for _ in eqn.outvars]
            if name not in OTHER and not inner:
                found = [_state_after(eqn, states, v.aval, padded, pairs) for v in eqn.outvars]
        known |= {v: s for v, s in zip(eqn.outvars, found, strict=True) if s}
    return [read(atom) for atom in jaxpr.outvars]


def _state_after(eqn, states, result, padded, pairs):
    """Return what is known of a result of an operation; `padded` are padded arrays."""
    name, halves = eqn.primitive.name, result.dtype in HALVES
    if name == "reduce_precision":
        return "is round"
    if name == "convert_element_type":
        source = eqn.invars[0].aval.dtype
        if source == result.dtype:
            return states[0]
        if source == jnp.float32 and halves:
            return None if states[0] == "is round" else "rounds"
        if source in HALVES and result.dtype == jnp.float32 and states[0] == "rounds":
            pairs.append(str(eqn.source_info.name_stack))
        return None
    # The causal convolution adds two padded arrays, one of which is zero.
    added = {v for v in eqn.invars if not isinstance(v, Literal)}
    if name not in EXACT and not (name == "add" and added <= padded):
        return "rounds" if halves else None
    known = {state for state in states if state}
    return "rounds" if "rounds" in known else next(iter(known), None)


@pytest.mark.parametrize("folder", [*EACH_MIXER, "qwen3_5_moe-modelopt-w4a16"])
def test_a_step_has_no_rounding_that_xla_may_drop(folder):
    with open_checkpoint(CHECKPOINTS / folder) as checkpoint:
        model = find_model(checkpoint, Settings(Target("cuda", (9, 0)))).model
    for tokens in (1, 9):
        cache = jax.eval_shape(lambda: model.init_cache(3, 34))
        ids = jax.ShapeDtypeStruct((3, tokens), jnp.int32)
        step = jax.make_jaxpr(lambda model, *rest: model(*rest))(model, ids, cache)
        assert find_pairs(step) == []


def widen(y):
    return 2 * y.astype(jnp.float32)


PAIRS = {
    "cast": lambda x: widen(x.astype(jnp.bfloat16)),
    "in_functions": lambda x: jax.jit(widen)(jax.jit(lambda x: x.astype(jnp.bfloat16))(x)[:, None]),
    "sum": lambda x: widen(x[:4].astype(jnp.bfloat16) + x[4:].astype(jnp.bfloat16)),
    "loop": lambda x: jax.lax.fori_loop(0, 2, lambda _, x: widen(x.astype(jnp.float16)), x),
}
ROUNDED = {
    "cast": lambda x: widen(cast(x, jnp.bfloat16)),
    "sum": lambda x: widen(compute(jnp.add, *(cast(part, jnp.bfloat16) for part in (x, x)))),
    "operand": lambda x: x.astype(jnp.bfloat16),
}


@pytest.mark.parametrize("program", PAIRS.values(), ids=PAIRS)
def test_pairs_are_found(program):
    assert len(find_pairs(jax.make_jaxpr(program)(jnp.ones(8)))) == 1


@pytest.mark.parametrize("program", ROUNDED.values(), ids=ROUNDED)
def test_other_casts_are_no_pairs(program):
    assert not find_pairs(jax.make_jaxpr(program)(jnp.ones(8)))
