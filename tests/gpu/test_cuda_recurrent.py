"""Run the suites of recurrent mixers on a GPU, and check repeated calls and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.kernels.axes import axis
from support.kernels.recurrent_chain import lower_behind_layer
from support.kernels.recurrent_suite import (
    DELTA_CASES,
    KIMI_CASES,
    MAMBA_CASES,
    PADDING,
    DeltaStepSuite,
    KimiStepSuite,
    Mamba2StepSuite,
    make_delta,
    make_kimi,
    make_mamba,
    many_tokens,
)
from support.ops.gradients import gradients

from jax_nvfp4_moe import ops

pytestmark = pytest.mark.gpu

delta_step = functools.partial(ops.gated_delta_step, backend="recurrent_cuda")
kimi_step = functools.partial(ops.kimi_delta_step, backend="recurrent_cuda")
mamba2_step = functools.partial(ops.mamba2_step, backend="recurrent_cuda")


class TestDeltaStep(DeltaStepSuite):
    case = axis(*DELTA_CASES)
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self):
        return jax.jit(delta_step, static_argnames=("interleaved", "eps"))


class TestKimiStep(KimiStepSuite):
    case = axis(*KIMI_CASES)
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self):
        return jax.jit(kimi_step, static_argnames=("lower_bound", "eps"))


class TestMamba2Step(Mamba2StepSuite):
    case = axis(*MAMBA_CASES)
    dtype = axis("bfloat16", "float16", "float32")

    @pytest.fixture
    def run(self):
        names = ("activation", "step_limits", "eps")
        return jax.jit(mamba2_step, static_argnames=names)


def delta_call(case):
    """Return the tokens of a case, and the step as a function of them."""
    tokens, weights = make_delta(case, np.dtype("bfloat16"))
    interleaved = DELTA_CASES[case].interleaved
    return tokens, functools.partial(delta_step, **weights, interleaved=interleaved)


def kimi_call(case):
    """Return the tokens of a case, and the step as a function of them."""
    tokens, weights = make_kimi(case, np.dtype("bfloat16"))
    weights = dict(weights)  # they are kept for other tests
    apart = {name: weights.pop(name) for name in ("decays", "gates", "rates")}

    def step(projected, positions, inputs, state):
        rows = len(positions) // len(tokens[1])
        own = {k: x if x is None else jnp.concatenate([x] * rows) for k, x in apart.items()}
        own |= {"positions": positions, "inputs": inputs, "state": state}
        return kimi_step(projected, **own, **weights, lower_bound=KIMI_CASES[case].lower_bound)

    return tokens, step


def mamba_call(case):
    """Return the tokens of a case, and the step as a function of them."""
    tokens, weights = make_mamba(case, np.dtype("bfloat16"))
    return tokens, functools.partial(mamba2_step, **weights, **MAMBA_CASES[case].options)


CALLS = [
    *(pytest.param(delta_call, case, id=f"delta {case}") for case in DELTA_CASES),
    *(pytest.param(kimi_call, case, id=f"kimi {case}") for case in KIMI_CASES),
    *(pytest.param(mamba_call, case, id=f"mamba2 {case}") for case in MAMBA_CASES),
]


@pytest.mark.parametrize(("make", "case"), CALLS)
def test_steps_are_the_same_each_time(make, case):
    """Blocks that read the past of shared channels must not see what another block writes."""
    tokens, step = make(case)
    rows = 40
    tokens = [jnp.concatenate([jnp.asarray(x)] * rows) for x in tokens]

    @jax.jit
    def run(projected, positions, inputs, state):
        def body(_, carry):
            return step(projected, positions, *carry[1:])

        first = step(projected, positions, inputs, state)
        return jax.lax.fori_loop(0, 20, body, first)

    first, second = ([np.asarray(x).tobytes() for x in run(*tokens)] for _ in range(2))
    assert first == second
    for result in map(np.asarray, run(*tokens)):
        repeated = result.reshape(rows, -1)
        assert (repeated.view(np.uint8) == repeated[:1].view(np.uint8)).all()


EARLY_CALLS = [call for call in CALLS if call.values[1].startswith(("full widths", "usual sizes"))]


@pytest.mark.parametrize(("make", "case"), EARLY_CALLS)
def test_steps_in_a_chain_have_the_bits_of_steps_alone(make, case):
    """In a chain, a step reads its state and the past while the layer ahead of it runs."""
    (projected, positions, inputs, state), step = make(case)
    lowered, operands = lower_behind_layer(step, projected, positions, inputs, state)
    assert lowered.as_text().count("nvfp4_call_chain_cuda") == 1
    assert "nvfp4_dense_few_cuda" in lowered.as_text()
    run, alone = lowered.compile(), jax.jit(step)
    expected = [jnp.asarray(x) for x in (inputs, state)]
    *layer, positions = operands[:3]
    found = operands[3:]
    for _ in range(20):
        y, *found = run(*layer, positions, *found)
        true_y, *expected = alone(jnp.asarray(projected), positions, *expected)
        assert np.asarray(y).tobytes() == np.asarray(true_y).tobytes()
        for own, true in zip(found, expected, strict=True):
            assert np.asarray(own).tobytes() == np.asarray(true).tobytes()


@pytest.mark.parametrize(
    ("suite", "step", "case"),
    [
        (DeltaStepSuite(), delta_step, "full widths, rates apart"),
        (KimiStepSuite(), kimi_step, "full widths"),
        (Mamba2StepSuite(), mamba2_step, "usual sizes"),
    ],
    ids=["delta", "kimi", "mamba2"],
)
def test_windows_in_a_chain_have_the_bits_of_windows_alone(suite, step, case):
    """A window in a chain reads `kept`, and the state that it names, before it waits."""
    tokens, weights = suite.make(case, np.dtype("bfloat16"))

    def behind_layer(*tokens, **options):
        names = ("positions", "inputs", "state", "kept")
        projected, *rest = tokens
        options |= dict(zip(names, rest, strict=False))
        moved = {name: options.pop(name) for name in names}

        def chained(projected, *moved):
            return step(projected, **dict(zip(names, moved, strict=True)), **options)

        lowered, operands = lower_behind_layer(chained, projected, *moved.values())
        assert "nvfp4_call_chain_cuda" in lowered.as_text()
        return lowered.compile()(*operands)

    expected = suite.call_window(step, case, tokens, weights, 1)
    found = suite.call_window(behind_layer, case, tokens, weights, 1)
    for own, true in zip(found, expected, strict=True):
        assert np.asarray(own).tobytes() == np.asarray(true).tobytes()


WINDOWS = [
    *(pytest.param(DeltaStepSuite(), delta_step, case, id=f"delta {case}") for case in DELTA_CASES),
    *(pytest.param(KimiStepSuite(), kimi_step, case, id=f"kimi {case}") for case in KIMI_CASES),
]


@pytest.mark.parametrize(("suite", "step", "case"), WINDOWS)
def test_windows_have_the_bits_of_steps(suite, step, case):
    """Accepted drafts then leave the state that decoding without drafts would have left."""
    tokens, weights = suite.make(case, np.dtype("bfloat16"))
    y, *found = map(np.asarray, suite.call_window(step, case, tokens, weights, 1))
    projected, positions = many_tokens(*tokens[:2])
    past = tokens[2:]
    for token in range(positions.shape[1]):
        now = projected[:, token : token + 1], positions[:, token : token + 1]
        own_y, *past = suite.call(step, case, (*now, *past), suite.weights_of_token(weights, token))
        real = now[1][:, 0] < PADDING
        assert y[real, token].tobytes() == np.asarray(own_y)[real, 0].tobytes()
        for window, own in zip(found, past, strict=True):
            assert window[:, token].tobytes() == np.asarray(own).tobytes()


def test_a_step_without_donation_keeps_its_operands():
    tokens, weights = make_delta("full widths", np.dtype("bfloat16"))
    given = [jnp.asarray(x) for x in tokens]
    jax.block_until_ready(jax.jit(delta_step)(*given, **weights))
    for kept, before in zip(given, tokens, strict=True):
        np.testing.assert_array_equal(kept, before)


def test_gradients_and_batches():
    """Gradients are those of the reference, and `vmap` equals a loop."""
    tokens, weights = make_delta("full widths", np.dtype("float32"))
    tokens = [jnp.asarray(x) for x in tokens]

    def gradient(backend):
        def run(state):
            return ops.gated_delta_step(*tokens[:3], state, **weights, backend=backend)

        return gradients(run, tokens[3])[0]

    expected = gradient("reference")
    assert float(jnp.abs(expected).max()) > 0
    np.testing.assert_array_equal(gradient("recurrent_cuda"), expected)
    stacked = [jnp.stack([x, x]) for x in tokens]
    batched = jax.vmap(lambda *given: delta_step(*given, **weights))(*stacked)
    for both, alone in zip(batched, delta_step(*tokens, **weights), strict=True):
        np.testing.assert_array_equal(both[1], alone)


def in_windows(projected, positions, inputs, state):
    """Return the tokens of a case as the kernels take them, with one state in each window."""
    return projected, positions, inputs[:, None], state[:, None]


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("projected", jnp.zeros((2, 1, 171)), r"projected \[b, t, n\]: expected \[2, 1, 172\]"),
        ("projected", jnp.zeros((2, 1, 172), jnp.bfloat16), "rates: expected bfloat16, got float"),
        ("positions", jnp.zeros((2, 2), jnp.int32), r"positions \[b, t\]: expected \[2, 1\]"),
        ("positions", jnp.zeros((2, 1)), "positions: expected int32, got float32"),
        ("conv_weight", jnp.zeros((110, 3)), r"conv_weight \[c, taps\]: expected \[112, 3\]"),
        ("A_log", jnp.zeros(5), r"A_log \[m r\]: expected \[6\]"),
        ("norm", jnp.zeros(16), r"norm \[e\]: expected \[8\]"),
        ("rates", jnp.zeros((2, 1, 6)), r"rates \[b, t, 2 m r\]: expected \[2, 1, 12\]"),
        ("rates", jnp.zeros(12), r"rates \[b, t, 2 m r\]: expected \[2, 1, 12\], got \[12\]"),
        ("rates", jnp.zeros((2, 1, 12)), r"projected \[b, t, n\]: expected \[2, 1, 160\]"),
        (
            "inputs",
            jnp.zeros((2, 1, 3, 112)),
            r"inputs \[b, w, taps - 1, c\]: expected \[2, 1, 2, 112\]",
        ),
        ("kept", jnp.zeros(3, jnp.int32), r"kept \[b\]: expected \[2\], got \[3\]"),
        ("kept", jnp.zeros(2), "kept: expected int32, got float32"),
        (
            "state",
            jnp.zeros((2, 2, 2, 3, 16, 8)),
            r"inputs \[b, w, taps - 1, c\]: expected \[2, 2, 2, 112\]",
        ),
        ("state", jnp.zeros((2, 1, 2, 3, 132, 8)), r"d \(state\): expected at most 128, got 132"),
        (
            "state",
            jnp.zeros((2, 1, 2, 3, 16, 6)),
            r"e \(state\): expected a positive multiple of 4",
        ),
    ],
)
def test_kernel_names_a_wrong_operand(name, wrong, message):
    cuda_calls.register()
    tokens, weights = make_delta("three value heads", np.dtype("float32"))
    names = ("projected", "positions", "inputs", "state")
    given = dict(zip(names, in_windows(*tokens), strict=True)) | weights
    given |= {"kept": np.zeros(0, np.int32)}
    given |= {"rates": np.zeros(0, np.float32), name: wrong}
    names = ("projected", "positions", *weights, "rates", "kept", "inputs", "state")
    operands = [jnp.asarray(given[name]) for name in names]
    shapes = ((2, 1, 48), operands[8].shape, operands[9].shape)
    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    call = jax.ffi.ffi_call("nvfp4_delta_step_cuda", outputs, input_output_aliases={8: 1, 9: 2})
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(call(*operands, interleaved=True, eps=np.float32(1e-6)))


def test_kernel_names_a_window_without_kept():
    cuda_calls.register()
    (projected, positions, inputs, state), weights = make_delta("three value heads", np.float32)
    arrays = [np.repeat(x[:, None], 2, axis=1) for x in (inputs, state)]
    operands = (projected, positions, *weights.values(), np.zeros(0, np.float32))
    shapes = [(2, 1, 48), *(x.shape for x in arrays)]
    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    call = jax.ffi.ffi_call("nvfp4_delta_step_cuda", outputs)
    given = [jnp.asarray(x) for x in (*operands, np.zeros(0, np.int32), *arrays)]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"w \(state\).*at most 1, got 2"):
        jax.block_until_ready(call(*given, interleaved=True, eps=np.float32(1e-6)))


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("projected", jnp.zeros((2, 1, 122)), r"projected \[b, t, n\]: expected \[2, 1, 123\]"),
        ("dt_bias", jnp.zeros(3), r"dt_bias \[n d\]: expected \[48\]"),
        ("rates", jnp.zeros((2, 1, 6)), r"rates \[b, t, n\]: expected \[2, 1, 3\]"),
        ("rates", jnp.zeros((2, 1, 3)), r"projected \[b, t, n\]: expected \[2, 1, 120\]"),
        ("decays", jnp.zeros((2, 1, 24)), r"decays \[b, t, n d\]: expected \[2, 1, 48\]"),
        ("gates", jnp.zeros((2, 1, 48)), r"gates \[b, t, n e\]: expected \[2, 1, 24\]"),
        ("gates", jnp.zeros((2, 1, 24), jnp.bfloat16), "gates: expected float32, got bfloat16"),
        ("state", jnp.zeros((2, 1, 3, 132, 8)), r"d \(state\): expected at most 128, got 132"),
        ("state", jnp.zeros((2, 1, 3, 16, 6)), r"e \(state\): expected a positive multiple of 4"),
        ("lower_bound", np.float32(1), "lower_bound: expected at most 0, got 1.0"),
        ("lower_bound", np.float32(np.nan), "lower_bound: expected at most 0, got nan"),
    ],
)
def test_kernel_names_a_wrong_operand_of_kimi(name, wrong, message):
    cuda_calls.register()
    tokens, weights = make_kimi("three heads", np.dtype("float32"))
    names = ("projected", "positions", "inputs", "state")
    given = dict(zip(names, in_windows(*tokens), strict=True)) | weights
    given |= {"kept": np.zeros(0, np.int32)}
    given |= {"rates": np.zeros(0, np.float32), "lower_bound": np.float32(0), name: wrong}
    names = ("projected", "positions", "conv_weight", "A_log", "dt_bias", "norm")
    names += ("rates", "decays", "gates", "kept", "inputs", "state")
    operands = [jnp.asarray(given[name]) for name in names]
    shapes = ((2, 1, 24), operands[10].shape, operands[11].shape)
    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    call = jax.ffi.ffi_call(
        "nvfp4_kimi_delta_step_cuda", outputs, input_output_aliases={10: 1, 11: 2}
    )
    attributes = {"lower_bound": given["lower_bound"], "eps": np.float32(1e-5)}
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(call(*operands, **attributes))


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("projected", jnp.zeros((2, 1, 245)), r"projected \[b, t, n\]: expected \[2, 1, 246\]"),
        ("conv_bias", jnp.zeros(143), r"conv_bias \[c\]: expected \[144\]"),
        ("D", jnp.zeros(5), r"D \[h\]: expected \[6\]"),
        ("norm", jnp.zeros(16), r"norm \[h p\]: expected \[96\]"),
        ("state", jnp.zeros((2, 1, 6, 132, 8)), r"p \(state\): expected at most 128, got 132"),
        ("state", jnp.zeros((2, 1, 6, 16, 6)), r"n \(state\): expected a positive multiple of 4"),
        ("groups", np.int64(4), r"h \(state\): expected a positive multiple of 4, got 6"),
        ("activation", "silu", "activation: expected one that is not gated, got silu"),
        ("scratch", 4 * 2 * 96 - 4, "workspace, bytes: expected at least 768, got 764"),
    ],
)
def test_kernel_names_a_wrong_operand_of_mamba2(name, wrong, message):
    cuda_calls.register()
    tokens, weights = make_mamba("small", np.dtype("float32"))
    names = ("projected", "positions", "inputs", "state")
    given = dict(zip(names, in_windows(*tokens), strict=True)) | weights
    given |= {"kept": np.zeros(0, np.int32)}
    given |= {"scratch": 768, "groups": np.int64(3)}
    given |= {"activation": "relu2", name: wrong}
    names = ("projected", "positions", *weights, "kept", "inputs", "state")
    operands = [jnp.asarray(given[name]) for name in names]
    shapes = ((2, 1, 96), operands[9].shape, operands[10].shape)
    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    outputs.append(jax.ShapeDtypeStruct((given["scratch"],), jnp.uint8))
    call = jax.ffi.ffi_call("nvfp4_mamba2_step_cuda", outputs, input_output_aliases={9: 1, 10: 2})
    numbers = ("alpha", "limit", "smallest_step", "largest_step", "eps")
    attributes = {name: np.float32(1) for name in numbers}
    attributes |= {name: given[name] for name in ("activation", "groups")}
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(call(*operands, **attributes))
