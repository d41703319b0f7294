"""Test calibration: the inputs of each product, against ModelOpt's observers and by hand."""

import functools
import gc
import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.devices.young_objects import collects_new_objects_alone
from support.files.checkpoint_edits import GIVEN, read_all
from support.files.unquantized import SMALL, dequantized, tokens
from support.models.architecture import LONG_TEXTS

from jax_nvfp4_moe.checkpoint.opening import open_checkpoint
from jax_nvfp4_moe.models.loading import UnreadModel, find_unquantized
from jax_nvfp4_moe.nn.experts.routed_experts import RoutedTokens
from jax_nvfp4_moe.numerics.activations import find_activation
from jax_nvfp4_moe.numerics.tensor import DenseExperts
from jax_nvfp4_moe.quantization import calibration
from jax_nvfp4_moe.quantization.calibration import Inputs, calibrate, observe_experts
from jax_nvfp4_moe.testing import activate_float64, assert_as_accurate_as

SCALE = 2688.0
LAYER = "model.layers.0"


def watch(folder, windows, **options):
    with open_checkpoint(folder) as checkpoint:
        return calibrate(find_unquantized(checkpoint), windows, **options)


def file_names(folder):
    """Return the name that models use for each tensor -> the name in the file."""
    with open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.tensors.info(name).name for name in checkpoint.tensors.names()}


def slow(name):
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name",
    [
        "mixtral-window-modelopt-w4a16",
        "deepseek_v3-direct-modelopt-w4a16",
        slow("gpt_oss-modelopt-w4a16"),
        slow("llama4_text-modelopt-w4a16"),
        slow("nemotron_h-latent-modelopt-w4a16"),
        slow("glm_moe_dsa-modelopt-w4a16"),
        slow("qwen3_next-modelopt-w4a16"),
        slow("qwen3_5_moe-modelopt-w4a16"),
        slow("gemma4-modelopt-w4a16"),
        "gemma4_edge-modelopt-w4a16",
        slow("deepseek_v4-modelopt-w4a16"),
    ],
)
def test_input_scales_are_those_of_modelopt(tmp_path, name):
    """All scales of the dequantized checkpoint agree. Both tools ran in float32."""
    facts = json.loads((GIVEN / name / "calibration.json").read_text())
    folder = dequantized(name, tmp_path / "source")
    windows = np.array(facts["windows"], np.int32)
    compare_scales(input_scales(folder, windows), facts)
    assert len(facts["input_scales"]) >= 7


def test_the_bound_of_input_scales_catches_attention_to_one_token_too_many(tmp_path):
    name = "mixtral-window-modelopt-w4a16"
    facts = json.loads((GIVEN / name / "calibration.json").read_text())
    folder = dequantized(name, tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    config["sliding_window"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(AssertionError, match="Not equal to tolerance rtol=2e-05"):
        compare_scales(input_scales(folder, np.array(facts["windows"], np.int32)), facts)


def input_scales(folder, windows):
    """Return our input scales, under the module names of the file.

    Squares are not summed, because nothing asks for them.
    """
    seen = watch(folder, windows)
    assert all(inputs.importance() is None for inputs in seen.linears.values())
    names = file_names(folder)
    ours = {}
    for prefix, inputs in seen.linears.items():
        ours[names[f"{prefix}.weight"].removesuffix(".weight")] = inputs.amax / SCALE
    for prefix, products in seen.experts.items():
        stem = next(v for k, v in names.items() if k.startswith(f"{prefix}."))
        stem = stem[: stem.index(".experts") + len(".experts")]
        for parts, inputs in zip((("gate", "up", "gate_up"), ("down",)), products, strict=True):
            for part in parts:
                ours[f"{stem}.{part}_proj"] = inputs.amax.max() / SCALE
    return ours


def compare_scales(ours, facts):
    """Compare with the tool's scales. The order of float32 sums changes none by this much.

    There is no yardstick: the tool gives no sums in another order. A window that is one token too
    wide, the smallest fault that a model can have, changes a scale by more.
    """
    renamed = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for module, scale in facts["input_scales"].items():
        parent, _, leaf = module.rpartition(".")
        name = module if module in ours else f"{parent}.{renamed[leaf]}"
        np.testing.assert_allclose(ours[name], scale, rtol=2e-5, err_msg=module)


def rms_norm(x, weight):
    """Normalize rows in the dtype of `x`."""
    mean = np.mean(x * x, -1, keepdims=True) + x.dtype.type(1e-6)
    return x / np.sqrt(mean) * weight.astype(x.dtype)


def in_turn(rows):
    """Sum float32 rows one after the other, as the yardstick of a sum."""
    return np.cumsum(rows, axis=0)[-1] if len(rows) else rows.sum(0)


def test_inputs_by_hand():
    """The input of the first attention is the normalized embedding of the tokens."""
    seen = watch(SMALL / "source", tokens(), squares=True)
    tensors = read_all(SMALL / "source")
    table = tensors["model.embed_tokens.weight"]
    norm = tensors[f"{LAYER}.input_layernorm.weight"]
    exact, x = (
        rms_norm(table.astype(dtype)[tokens()], norm).reshape(-1, 64)
        for dtype in (np.float64, np.float32)
    )
    for part in "qkv":
        inputs = seen.linears[f"{LAYER}.self_attn.{part}_proj"]
        assert_as_accurate_as(inputs.amax, np.abs(x).max(), np.abs(exact).max())
        mean = in_turn(x * x) / len(x)
        assert_as_accurate_as(inputs.importance(), mean, np.mean(exact * exact, 0))
        assert inputs.count == tokens().size
    first, second = seen.experts[f"{LAYER}.mlp.experts"]
    assert first.count.sum() == 2 * tokens().size  # two experts a token
    np.testing.assert_array_equal(first.count, second.count)
    assert (first.squares.shape, second.squares.shape) == ((4, 64), (4, 32))


def test_importance_of_an_expert_without_tokens_is_that_of_all():
    squares = np.array([[4.0, 8.0], [0.0, 0.0], [2.0, 2.0]], np.float32)
    inputs = Inputs(np.ones(3, np.float32), np.array([2, 0, 2]), squares)
    np.testing.assert_array_equal(inputs.importance(), [[2, 4], [1.5, 2.5], [1, 1]])


@pytest.mark.parametrize(("gated", "weight_on_input"), [(True, False), (False, True)])
def test_what_enters_each_expert(gated, weight_on_input):
    """Inputs are observed by expert, exactly in the first product. Invalid ids leave no trace."""
    rng = np.random.default_rng(0)
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    e, h, i, t = 5, 32, 48, 150
    up = normal((e, i * (1 + gated), h)) / 6
    experts = DenseExperts(up, normal((e, h, i)) / 7, 0.1 * up[..., 0], np.ones((e, h), np.float32))
    x = normal((t, h))
    ids = rng.integers(0, e - 1, (t, 2)).astype(np.int32)
    ids[::7, 0], ids[::9, 1] = -1, e
    weights = rng.random((t, 2), np.float32)
    call = find_activation("silu" if gated else "relu2")

    @jax.jit
    def run(experts, x, ids, weights):
        routed = RoutedTokens(x, ids, weights)
        how = {"weight_on_input": weight_on_input, "squares": True}
        return observe_experts(experts, call, routed, **how)

    first, second = jax.tree.map(np.asarray, run(experts, x, ids, weights))
    largest = []
    for expert in range(e):
        rows, slots = np.nonzero(ids == expert)
        inputs = x[rows]
        if weight_on_input:
            inputs = inputs * weights[rows, slots][:, None]
        assert first["count"][expert] == second["count"][expert] == len(rows)
        assert first["amax"][expert] == np.abs(inputs).max(initial=0)
        squares = np.square(inputs.astype(np.float64)).sum(0)
        assert_as_accurate_as(first["squares"][expert], in_turn(np.square(inputs)), squares)
        inner, exact = (
            middle(call, inputs.astype(dtype), experts, expert)
            for dtype in (np.float32, np.float64)
        )
        largest.append([np.abs(one).max(initial=0) for one in (inner, exact)])
    assert_as_accurate_as(second["amax"], *np.transpose(largest))
    assert first["count"][e - 1] == 0


def middle(call, rows, experts, expert):
    """Return the input of one expert's second product, in the dtype of `rows`."""
    up, bias = (np.asarray(a[expert], rows.dtype) for a in (experts.gate_up, experts.gate_up_bias))
    return activate_float64(call, rows @ up.T + bias)  # it keeps the dtype


@pytest.mark.parametrize(
    ("name", "on_input"),
    [("llama4_text-modelopt-w4a16", True), ("mixtral-window-modelopt-w4a16", False)],
)
def test_calibration_weights_inputs_as_the_model_does(name, on_input, monkeypatch, tmp_path):
    seen, observe = [], calibration.observe_experts

    def note(*operands, **how):
        seen.append(how["weight_on_input"])
        return observe(*operands, **how)

    monkeypatch.setattr(calibration, "observe_experts", note)
    with open_checkpoint(dequantized(name, tmp_path / "source")) as checkpoint:
        model = find_unquantized(checkpoint).model
    ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    stream = jax.eval_shape(model.open_stream, model.embedding.get_value(), ids)
    run = functools.partial(calibration._run.__wrapped__, entries=None, squares=False)
    for layer in model.layers:
        jax.eval_shape(run, layer, stream, jax.ShapeDtypeStruct((), jnp.int32))
    assert set(seen) == {on_input}


def compare_statistics(found, expected):
    """Compare with the bound of `compare_scales`; the numbers of rows must be equal."""
    pairs = [(found.linears[name], expected.linears[name]) for name in expected.linears]
    for name, products in expected.experts.items():
        pairs += zip(found.experts[name], products, strict=True)
    for one, other in pairs:
        np.testing.assert_array_equal(one.count, other.count)
        np.testing.assert_allclose(one.amax, other.amax, rtol=2e-5)
        largest = 2e-5 * other.squares.max()
        np.testing.assert_allclose(one.squares, other.squares, rtol=0, atol=largest)


def test_a_long_window_runs_through_a_layer_in_pieces(monkeypatch):
    """Statistics are those of a window in one piece, but not if a piece does not see the others."""
    whole = watch(SMALL / "source", tokens(), squares=True)
    monkeypatch.setattr(calibration, "_TOKENS", tokens().shape[1] // 2 + 1)
    assert [len(batch) for batch in calibration._divide(tokens())] == [2] * len(tokens())
    compare_statistics(watch(SMALL / "source", tokens(), squares=True), whole)
    monkeypatch.setattr(calibration, "_make_entries", lambda *_: None)
    with pytest.raises(AssertionError):
        compare_statistics(watch(SMALL / "source", tokens(), squares=True), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_TEXTS)
def test_pieces_of_each_mixer(name, monkeypatch, tmp_path):
    folder = dequantized(name, tmp_path / "source")
    windows = np.random.default_rng(0).integers(64, size=(2, 37)).astype(np.int32)
    whole = watch(folder, windows, squares=True)
    monkeypatch.setattr(calibration, "_TOKENS", 15)
    compare_statistics(watch(folder, windows, squares=True), whole)


@pytest.mark.parametrize(
    ("shape", "pieces"),
    [
        ((3, 512), [[(2, 512)], [(1, 512)]]),
        ((1, 1024), [[(1, 1024)]]),
        ((2, 2500), [[(1, 1024), (1, 1024), (1, 452)]] * 2),
    ],
)
def test_about_1024_tokens_run_together(shape, pieces):
    windows = np.arange(np.prod(shape)).reshape(shape)
    found = [*calibration._divide(windows)]
    assert [[piece.shape for piece in batch] for batch in found] == pieces
    joined = np.concatenate([np.concatenate(batch, axis=1) for batch in found])
    np.testing.assert_array_equal(joined, windows)


def test_the_memory_of_a_piece_does_not_grow_with_the_window():
    """Growth is less than a byte for each token of the piece and each further key."""
    with open_checkpoint(SMALL / "source") as checkpoint:
        model = find_unquantized(checkpoint).model
    layer, short, long = model.layers[0], 8192, 32768
    ids = jax.ShapeDtypeStruct((1, calibration._TOKENS), jnp.int32)
    table = model.embedding.get_value()
    stream = jax.eval_shape(model.open_stream, table, ids)

    def temporary_bytes(length):
        entries = jax.eval_shape(lambda: layer.init_cache(1, length))
        start = jax.ShapeDtypeStruct((), jnp.int32)
        program = calibration._run.lower(layer, stream, start, entries, True)
        return program.compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(long) - temporary_bytes(short) < calibration._TOKENS * (long - short)


def test_one_layer_is_alive_at_a_time(monkeypatch, tmp_path):
    """Memory must not grow with the number of layers."""
    name = "deepseek_v3-direct-modelopt-w4a16"
    folder = dequantized(name, tmp_path / "source")
    facts = json.loads((GIVEN / name / "calibration.json").read_text())
    layers, alive, made = [], [], UnreadModel.materialize

    def materialize(self, reader, path=None):
        gc.collect(0)
        alive.append(sum(layer() is not None for layer in layers))
        layer = made(self, reader, path)
        layers.append(weakref.ref(layer))
        return layer

    monkeypatch.setattr(UnreadModel, "materialize", materialize)
    with collects_new_objects_alone():
        watch(folder, np.array(facts["windows"], np.int32))
    assert alive == [0, 0]
