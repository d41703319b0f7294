"""Test `add_lora`: which layers it adapts, what they compute, and that they learn."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.files.drafted import write_drafted
from support.files.given import CHECKPOINTS, MODELS, reference_tensors
from support.models.adapters import adapted, fill, load, loss_and_gradients, step
from support.models.own_model import Own

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.inference.balance import place_model
from jax_nvfp4_moe.models.loading import abstract_model
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.numerics.tensor import DenseExperts
from jax_nvfp4_moe.parallel.placement import balance_experts
from jax_nvfp4_moe.training.adaptable import find_adaptable

QWEN = CHECKPOINTS / "qwen3_moe-window-modelopt-w4a16"
IDS = np.random.default_rng(0).integers(0, 64, (2, 9)).astype(np.int32)
call = jax.jit(lambda model, ids: model(ids))
# Names and shapes of transformers' linears and experts, which tests/reference/adapters.py wrote.
NAMES = json.loads((CHECKPOINTS / "adapters" / "names.json").read_text())
# Folders whose names no transformers knows.
UNKNOWN = ("kimi_k2-modelopt-w4a16",)
# Folders whose files have other names than transformers. The slow tests have all.
NAMED_OTHERWISE = (
    "deepseek_v4-modelopt-w4a16",
    "gemma3-modelopt-w4a16",
    "gpt_oss-modelopt-w4a16",
    "hy_v3-modelopt-w4a16",
    "laguna-modelopt-w4a16",
    "llama4-ct-w4a4",
    "ministral3-modelopt-w4a16",
    "minimax_m2-modelopt-w4a16",
    "mixtral-window-modelopt-w4a16",
    "nemotron_h-latent-modelopt-w4a16",
    "phimoe-modelopt-w4a16",
)
# Of each kind of mixer, one model in the default tests; the slow tests have all.
FEW = ("deepseek_v3-direct-modelopt-w4a16", "nemotron_h-modelopt-w4a16")


def without_index(name):
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


@pytest.mark.parametrize(
    "name",
    [
        name if name in NAMED_OTHERWISE else pytest.param(name, marks=pytest.mark.slow)
        for name in MODELS
        if name not in UNKNOWN
    ],
)
def test_names_and_shapes_are_those_of_transformers(name):
    """Each layer that can be adapted is a linear, or a parameter of experts, of transformers."""
    known = NAMES[name]
    layers = find_adaptable(abstract_model(CHECKPOINTS / name).model)
    assert len({layer.name for layer in layers}) == len(layers)
    for layer in layers:
        if layer.group == "head" and not any(one.endswith("lm_head") for one in known):
            continue
        there = set(map(tuple, known[without_index(layer.name)]))
        assert there & {layer.shape, (*layer.shape[:-2], *layer.shape[:-3:-1])}, layer.name


@pytest.mark.parametrize(
    "name",
    [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in MODELS],
)
def test_adapters_of_every_family_learn(name):
    """Two steps lower the loss, and the adapters of all mixers have gradients.

    The model has the dtype and the kernels that users get.
    """
    model = adapted(nvfp4.load_model(CHECKPOINTS / name))
    ids = reference_tensors(CHECKPOINTS / name)["input_ids"][:, :12].astype(np.int32)
    first, second = step(model, ids), step(model, ids)
    last, gradients = loss_and_gradients(model, ids)
    assert float(last) < second < first
    nnx.update(model, gradients)
    still = [
        layer.name
        for layer in find_adaptable(model)
        if layer.group == "mixers" and not any(np.abs(one).max() > 0 for one in layer.take())
    ]
    assert not still


def test_nothing_changes_at_first():
    """Each operation gives what it gave without adapters, bit for bit."""
    model = load(QWEN)
    before = np.asarray(model(IDS))
    nvfp4.add_lora(model, 4, targets=("mixers", "lm_head"), rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(np.asarray(model(IDS)), before)
    fill(model)
    assert np.abs(np.asarray(model(IDS)) - before).max() > 0.1


def names_of(model):
    return {layer.name for layer in find_adaptable(model) if layer.pair is not None}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("q_proj", {f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)}),
        (("layers.1.*.v_proj",), {"model.layers.1.self_attn.v_proj"}),
        ("experts.down_proj", {"model.layers.1.mlp.experts.down_proj"}),
        (
            "experts",
            {f"model.layers.1.mlp.experts.{p}_proj" for p in ("gate_up", "down")},
        ),
        (
            ["mixers"],
            {f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qkvo"},
        ),
        ("lm_head", {"lm_head"}),
    ],
)
def test_targets(targets, expected):
    """A target is a group or a pattern; of layers that one module joins, only some may match."""

    def make():
        model = abstract_model(QWEN).model
        nvfp4.add_lora(model, 2, targets=targets, rngs=nnx.Rngs(0))
        return model

    assert names_of(nnx.eval_shape(make)) == expected


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (
            ValueError,
            r"targets: 'q_prj' matches no layer; .*self_attn.q_proj",
            {"targets": "q_prj"},
        ),
        (ValueError, r"'nothing', '\*.9.\*' matches", {"targets": ("q_proj", "nothing", "*.9.*")}),
        (ValueError, "targets: an empty sequence", {"targets": ()}),
        (TypeError, "targets", {"targets": [3]}),
        (TypeError, "targets: expected a name or a sequence", {"targets": None}),
        (TypeError, "alpha: expected a positive number or None, got str", {"alpha": "8"}),
        (ValueError, "dtype: expected .*, got int32", {"dtype": jnp.int32}),
        (ValueError, "alpha: expected a positive number, got 0", {"alpha": 0}),
        (ValueError, "alpha: expected a positive number, got nan", {"alpha": float("nan")}),
        (ValueError, "rank", {"rank": 0}),
        (TypeError, "rngs: expected nnx.Rngs", {"rngs": jax.random.key(0)}),
    ],
)
def test_errors_leave_the_model_as_it_is(error, words, arguments):
    model = abstract_model(QWEN).model
    before = nnx.graphdef(model)
    with pytest.raises(error, match=words):
        nvfp4.add_lora(model, **{"rank": 2, "rngs": nnx.Rngs(0), **arguments})
    assert nnx.graphdef(model) == before


def test_a_layer_has_one_adapter():
    """Other layers may get theirs later, also in a module that joins them with the first."""
    model = abstract_model(QWEN).model
    nvfp4.add_lora(model, 2, targets="q_proj", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"but model.layers.0.self_attn.q_proj, .* have one"):
        nvfp4.add_lora(model, 2, targets="mixers", rngs=nnx.Rngs(0))
    nvfp4.add_lora(model, 3, targets="v_proj", rngs=nnx.Rngs(0))
    adapter = model.layers[0].attention.qkv.q_k_v.adapter
    assert {n: pair.a.shape[0] for n, pair in adapter.pairs().items()} == {"q": 2, "v": 3}


def test_alpha_is_divided_by_the_rank():
    linear = nvfp4.NVFP4Linear(32, 16, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((3, 32), np.float32)
    before = np.asarray(linear(x))
    nvfp4.add_lora(linear, 4, targets="linear", alpha=6, rngs=nnx.Rngs(0))
    fill(linear)
    pair = linear.adapter.linear
    a, b = (np.asarray(part[...], np.float64) for part in (pair.a, pair.b))
    error = np.abs(linear(x) - (before + 6 / 4 * x @ a.T @ b.T))
    # The two products have 32 + 4 additions. Each of them, the scale and the sum round by half of
    # 2^-23 of the sum of magnitudes at most.
    bound = (32 + 4 + 2) * 2**-24 * (6 / 4 * np.abs(x) @ np.abs(a).T @ np.abs(b).T + np.abs(before))
    assert (error <= bound).all()
    assert (np.abs(x @ a.T @ b.T) > 4 * bound).any()  # another scale would be seen


def test_an_own_model():
    """Names are paths, and filters take adapters like other parameters."""
    model = Own(nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((5, 32), np.float32)
    nvfp4.add_lora(model, 2, targets=("linears.1", "experts"), rngs=nnx.Rngs(0))
    assert names_of(model) == {"linears.1", "moe.experts.gate_up_proj", "moe.experts.down_proj"}
    fill(model)
    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
    assert len(nnx.to_flat_state(adapters)) == 6
    merged = nnx.merge(graph, adapters, rest)
    np.testing.assert_array_equal(merged(x), model(x))


def test_layers_that_are_stacked():
    """A stack has the adapters of its layers; test_own_models.py scans over it."""

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0)
    def make(rngs):
        return Own(rngs)

    stack = make(nnx.Rngs(0))
    nvfp4.add_lora(stack, 2, targets=("linears.1", "experts"), rngs=nnx.Rngs(0))
    assert stack.linears[1].adapter.pairs()["1"].a.shape == (2, 2, 32)
    with pytest.raises(ValueError, match=r"linears\.1 is a stack of layers"):
        nvfp4.save_lora(stack, "nowhere")


def test_adapted_experts_are_experts_with_changed_matrices():
    """NVFP4 experts with adapters equal unquantized ones whose matrices have the changes."""
    moe = nvfp4.NVFP4MoE(4, 32, 16, top_k=2, dtype=jnp.float32, rngs=nnx.Rngs(0))
    params = moe.experts.params.get_value()
    x = np.random.default_rng(0).standard_normal((6, 32), np.float32)
    chosen = moe.route(x)
    nvfp4.add_lora(moe, 2, targets="experts", rngs=nnx.Rngs(0))
    fill(moe)
    own = []
    for part in ("gate_up", "down"):
        pair = getattr(moe.experts.adapter, part).read()
        change = pair.scale * jnp.einsum("enr,erk->enk", pair.b, pair.a)
        own.append(getattr(params, part).dequantize() + change)
    how = {"router": moe.router, "router_weight": moe.token_router.weight[...]}
    truth = nvfp4.NVFP4MoE(4, 32, 16, params=DenseExperts(*own), dtype=jnp.float32, **how)
    want = np.asarray(truth.experts(x, *chosen))
    assert np.abs(np.asarray(moe.experts(x, *chosen)) - want).max() <= 1e-5 * np.abs(want).max()


def fp8_matrices(*shape):
    values = np.random.default_rng(0).standard_normal(shape)
    scale = jnp.full(shape[:2], 0.1, jnp.float32)
    return FP8Tensor(jnp.asarray(values, jnp.float8_e4m3fn), scale)


@pytest.mark.parametrize(
    "scheme", ["w4a4", "w4a4_unit_scale", "w4a4_token_scale", "fp8_weights", "fp8", "fp8_token"]
)
def test_experts_round_their_inputs_as_before(scheme):
    """With B = 0, the two products apart give what the layer gives at once."""
    scale, how = jnp.full(4, 0.01, jnp.float32), {"scheme": scheme}
    if scheme.startswith("fp8"):
        matrices = fp8_matrices(4, 32, 32), fp8_matrices(4, 32, 16)
        how = {"checkpoint_scheme": scheme, "scheme": "checkpoint"}
        how["params"] = DenseExperts(*matrices, None, None, scale, scale)
    elif scheme == "w4a4":
        params = nvfp4.testing.random_moe_params(
            jax.random.key(0), num_experts=4, hidden=32, intermediate=16
        )
        scales = {"gate_up_input_scale": scale, "down_input_scale": scale}
        how["params"] = dataclasses.replace(params, **scales)
    moe = nvfp4.NVFP4MoE(4, 32, 16, top_k=2, dtype=jnp.float32, rngs=nnx.Rngs(0), **how)
    x = np.random.default_rng(0).standard_normal((6, 32), np.float32)
    before = np.asarray(moe(x))
    nvfp4.add_lora(moe, 2, targets="experts", rngs=nnx.Rngs(0))
    assert np.abs(np.asarray(moe(x)) - before).max() <= 1e-5 * np.abs(before).max()
    slope = nnx.grad(lambda moe: moe(x).sum(), argnums=nnx.DiffState(0, nnx.LoRAParam))(moe)
    assert np.abs(slope["experts"]["adapter"]["down"]["b"][...]).max() > 0


@pytest.mark.parametrize(
    "name", ["qwen3_moe-window-modelopt-w4a16", "deepseek_v3-direct-modelopt-w4a16"]
)
def test_generate_takes_adapters(name):
    """Decoding reads a cache, and latent attention then multiplies queries by its matrices."""
    model = load(CHECKPOINTS / name)
    plain = nvfp4.generate(model, IDS, max_new_tokens=4, stop_ids=())
    fill(adapted(model, 2))
    new = nvfp4.generate(model, IDS, max_new_tokens=4, stop_ids=())
    assert (np.asarray(new) != np.asarray(plain)).any()
    logits = call(model, np.concatenate([IDS, new], axis=1))
    np.testing.assert_array_equal(new, np.argmax(logits[:, IDS.shape[1] - 1 : -1], axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["lookup", "mtp"])
def test_generate_with_drafts(tmp_path, draft):
    """The drafting layers have no adapters; they propose, and the adapted model decides."""
    folder = write_drafted("qwen3moe-modelopt-w4a16", tmp_path / "drafted")
    model = load(folder, draft="mtp")
    fill(adapted(model, 2))
    assert not nnx.to_flat_state(nnx.state(model.drafter, nnx.LoRAParam))
    how = {"max_new_tokens": 6, "stop_ids": ()}
    plain = nvfp4.generate(model, IDS, **how)
    np.testing.assert_array_equal(nvfp4.generate(model, IDS, draft=draft, **how), plain)


def test_a_saved_model_has_its_adapters(tmp_path):
    model = load(QWEN)
    fill(adapted(model, 2))
    nvfp4.save(tmp_path / "saved", model)
    again = nvfp4.restore(tmp_path / "saved", nnx.eval_shape(lambda: adapted(load(QWEN), 2)))
    np.testing.assert_array_equal(call(again, IDS), call(model, IDS))


def test_experts_that_are_placed_have_no_adapters():
    """Adapters stay in the order of the checkpoint."""
    moe = nvfp4.NVFP4MoE(4, 32, 16, top_k=2, dtype=jnp.float32, rngs=nnx.Rngs(0))
    placements = [balance_experts(np.arange(4), 2)]
    nvfp4.add_lora(moe, 2, targets="experts", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="model: expected experts without adapters"):
        place_model(moe, placements)
    moe.experts.adapt(None)
    place_model(moe, placements)
    with pytest.raises(ValueError, match="`place_model` has replicated or moved them"):
        nvfp4.add_lora(moe, 2, targets="experts", rngs=nnx.Rngs(0))


def test_weights_for_a_gpu_are_converted_once(caplog):
    """The two products of an adapted layer have kernels, and read gate and up in another order."""
    hopper = nvfp4.Target("cuda", (9, 0))
    moe = nvfp4.NVFP4MoE(4, 64, 64, top_k=2, target=hopper, rngs=nnx.Rngs(0))
    whole = moe.experts.params.get_value()
    nvfp4.add_lora(moe, 2, targets="experts", rngs=nnx.Rngs(0))
    apart = moe.experts.params.get_value()
    assert (whole.gate_up.layout, apart.gate_up.layout) == ("mma_64x64_gated", "mma_64x64")
    x = jax.ShapeDtypeStruct((5, 64), jnp.bfloat16)
    lowered = jax.jit(lambda moe, x: moe(x)).trace(moe, x).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("nvfp4_grouped_gemm_w4a16_sm90") >= 2
    assert "converts weights" not in caplog.text
    moe.experts.adapt(None)
    again = moe.experts.params.get_value()
    jax.tree.map(np.testing.assert_array_equal, again, whole)
