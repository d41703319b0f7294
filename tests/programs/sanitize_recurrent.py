"""Call the kernels of recurrent mixers, as parts of `sanitize_cuda.py`."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from sanitize_check import check
from support.kernels.convolution_suite import CONVOLUTIONS, make_convolution
from support.kernels.delta_rule_suite import CHANNEL_DELTA, DELTA
from support.kernels.mamba2_scan_suite import MAMBA2
from support.kernels.recurrent_chain import lower_behind_layer
from support.kernels.recurrent_suite import (
    DELTA_CASES,
    KIMI_CASES,
    MAMBA_CASES,
    DeltaStepSuite,
    KimiStepSuite,
    Mamba2StepSuite,
    make_delta,
    make_kimi,
    make_mamba,
    take_rates,
)

from jax_nvfp4_moe import ops

DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)


def run_recurrent_steps():
    """Run the kernels of recurrent mixers in decoding with each dtype."""
    for dtype in DTYPES:
        run_recurrent_step(dtype)


def run_recurrent_step(dtype):
    """Decode a token of rows with and without padding, in place."""
    names, backend = ("positions", "inputs", "state"), {"backend": "recurrent_cuda"}
    for name, case in DELTA_CASES.items():
        tokens, weights = take_rates(name, *make_delta(name, np.dtype(dtype)))
        options = weights | backend | {"interleaved": case.interleaved}
        check_step("delta", dtype, name, ops.gated_delta_step(*map(jnp.asarray, tokens), **options))
        step = functools.partial(ops.gated_delta_step, **options)
        check_in_chain("delta", dtype, name, step, tokens)
    for name, case in KIMI_CASES.items():
        tokens, weights = make_kimi(name, np.dtype(dtype))
        projected, *rest = map(jnp.asarray, tokens)
        options = weights | backend | {"lower_bound": case.lower_bound}
        options |= dict(zip(names, rest, strict=True))
        check_step("kimi", dtype, name, ops.kimi_delta_step(projected, **options))
        step = functools.partial(kimi_step_of, options)
        check_in_chain("kimi", dtype, name, step, tokens)
    for name, case in MAMBA_CASES.items():
        tokens, weights = make_mamba(name, np.dtype(dtype))
        options = weights | backend | case.options
        check_step("mamba2", dtype, name, ops.mamba2_step(*map(jnp.asarray, tokens), **options))
        step = functools.partial(ops.mamba2_step, **options)
        check_in_chain("mamba2", dtype, name, step, tokens)


def run_state_windows():
    """Decode windows of tokens, from a state inside of the window, in place."""
    steps = (
        (DeltaStepSuite(), ops.gated_delta_step, DELTA_CASES),
        (KimiStepSuite(), ops.kimi_delta_step, KIMI_CASES),
        (Mamba2StepSuite(), ops.mamba2_step, MAMBA_CASES),
    )
    for dtype, (suite, step, cases) in itertools.product(DTYPES, steps):
        run = functools.partial(step, backend="recurrent_cuda")
        for name in cases:
            results = suite.call_window(run, name, *suite.make(name, np.dtype(dtype)), kept=2)
            check_step(f"window {step.__name__}", dtype, name, results)


def kimi_step_of(options, projected, positions, inputs, state):
    """Run a step of Kimi delta attention."""
    own = options | {"positions": positions, "inputs": inputs, "state": state}
    return ops.kimi_delta_step(projected, **own)


def check_in_chain(kind, dtype, name, step, tokens):
    """Run a step of the sizes that models have behind the layer that writes its token."""
    if name.startswith(("full widths", "usual sizes")) and np.dtype(dtype) != np.float32:
        lowered, operands = lower_behind_layer(step, *tokens)
        check_step(f"{kind} in a chain", dtype, name, lowered.compile()(*operands))


def check_step(kind, dtype, name, results):
    """Check what a step of a recurrent mixer returns."""
    for part, result in zip(("y", "inputs", "state"), results, strict=True):
        check(f"{kind} {np.dtype(dtype)} {name} {part}", result)


def run_delta_rules():
    """Apply the delta rule to prompts, with a decay for each head and for each channel."""
    rule = functools.partial(ops.gated_delta_rule, backend="delta_rule_cuda")
    run_recurrence("delta rule", DELTA, rule)
    run_recurrence("delta rule with channel decays", CHANNEL_DELTA, rule)


def run_mamba2_scans():
    """Run the recurrence of Mamba-2 over prompts."""
    scan = functools.partial(ops.mamba2_scan, backend="mamba2_scan_cuda")
    run_recurrence("mamba2 scan", MAMBA2, scan)


def run_recurrence(kind, recurrence, run):
    """Run a recurrence over the prompts of its cases."""
    for name in recurrence.cases:
        operands, lengths = map(jnp.asarray, recurrence.make(name)), recurrence.lengths(name)
        for part, result in zip(("y", "state"), run(*operands, lengths=lengths), strict=True):
            check(f"{kind} {name} {part}", result)


def run_convolutions():
    """Convolve prompts, in place."""
    for dtype in DTYPES[:2]:
        for name in CONVOLUTIONS:
            operands, options = make_convolution(name, np.dtype(dtype))
            options = options | {"backend": "convolution_cuda"}
            results = ops.causal_convolution(*map(jnp.asarray, operands), **options)
            for i, result in enumerate(jax.tree.leaves(results)):
                check(f"convolution {np.dtype(dtype)} {name} {i}", result)
