"""Test drafting layers: against transformers, in steps, in all formats, and what is refused."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.files.checkpoint_edits import read_all
from support.files.drafted import (
    drafting_reference,
    in_bfloat16,
    in_fp8,
    in_fp8_blocks,
    packed,
    stacked,
    write_drafted,
)
from support.files.drafting_tensors import DRAFTED, drafting_tensors
from support.files.given import CHECKPOINTS, copy_with_config
from support.models.architecture import relative

from jax_nvfp4_moe import CheckpointError, explain, load_model, restore, save
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.nn.experts.routed_experts import RoutedExperts
from jax_nvfp4_moe.nn.linear.fp8_linear import FP8Linear
from jax_nvfp4_moe.numerics.tensor import MoEParams

EXACT = {"scheme": "checkpoint", "dtype": jnp.float32, "backend": "reference"}
QWEN, GLM = "qwen3_next-modelopt-w4a16", "glm4_moe-groups-modelopt-w4a16"
NEMOTRON, KIMI = "nemotron_h-latent-modelopt-w4a16", "kimi_k2-modelopt-w4a16"
DEEPSEEK_V4 = "deepseek_v4-modelopt-w4a16"
# The logits agree to about 1e-6. With the two halves that are joined in the other order, or with
# vectors from before the last norm, they differ by more than 0.1.
BOUND, WRONG = 1e-5, 0.1


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Return a function that writes a given checkpoint with drafting layers, and loads it."""

    def load(name, change=in_bfloat16, settings=EXACT, **options):
        folder = tmp_path_factory.mktemp("drafted") / "folder"
        return load_model(write_drafted(name, folder, change, **options), draft="mtp", **settings)

    return load


@jax.jit
def draft(model, hidden, ids):
    """Return the logits of all pairs of `ids`, of which `hidden` are the vectors."""
    cache = model.init_draft_cache(*ids.shape)
    logits, _, _ = model.draft(hidden[:, :-1], ids[:, 1:], cache)
    return logits


@jax.jit
def step(model, hidden, ids, cache, lengths=None, logits_at=None):
    """Return the results of one call of `draft`."""
    return model.draft(hidden, ids, cache, lengths=lengths, logits_at=logits_at)


@functools.partial(jax.jit, static_argnames="num_tokens")
def read(model, ids, cache=None, lengths=None, logits_at=None, num_tokens=None):
    """Return the results of one call of the model, with its vectors."""
    options = {"lengths": lengths, "logits_at": logits_at, "num_tokens": num_tokens}
    return model(ids, cache, with_hidden=True, **options)


@pytest.mark.parametrize("name", DRAFTED)
def test_draft_logits_are_those_of_transformers(name, load):
    ids, hidden, expected = drafting_reference(name)
    assert relative(draft(load(name), hidden, ids), expected) < BOUND


def test_the_order_of_joining_and_the_last_norm_matter(load):
    """The negative control: both mistakes are far beyond the bound."""
    ids, hidden, expected = drafting_reference(QWEN)
    model = load(QWEN)
    before = hidden / np.asarray(model.norm.weight[...])  # as of a model without weights in it
    assert relative(draft(model, before, ids), expected) > WRONG
    swapped = nnx.clone(model)
    halves = jnp.split(model.drafter.joint.weight[...], 2, axis=1)
    swapped.drafter.joint.weight[...] = jnp.concatenate(halves[::-1], axis=1)
    assert relative(draft(swapped, hidden, ids), expected) > WRONG


@pytest.mark.parametrize("name", [QWEN, DEEPSEEK_V4])
def test_the_model_returns_the_vectors_that_drafts_are_made_with(name, load):
    """Normalized vectors, and in DeepSeek-V4 all residual streams."""
    ids, hidden, expected = drafting_reference(name)
    model = load(name)
    _, found = read(model, ids)
    assert relative(found, hidden) < BOUND
    assert relative(draft(model, found, ids), expected) < BOUND


def test_vectors_of_all_positions_come_with_logits_of_one(load):
    model, ids = load(GLM), jnp.asarray([[1, 2, 3, 4], [5, 6, 0, 0]])
    lengths, at = jnp.asarray([4, 2]), jnp.asarray([3, 1])
    logits, hidden = read(model, ids, lengths=lengths)
    cache = model.init_cache(2, 8)
    last, packed_hidden, cache = read(model, ids, cache, lengths, at, num_tokens=6)
    chosen = logits[np.arange(2), at]
    assert relative(last[:, 0], chosen) < BOUND
    assert relative(packed_hidden[0], hidden[0]) < BOUND
    assert relative(packed_hidden[1, :2], hidden[1, :2]) < BOUND
    assert relative(last[:, 0], np.roll(chosen, 1, axis=0)) > WRONG
    assert relative(packed_hidden[1, :2], hidden[1, 1:3]) > WRONG
    assert cache.lengths.tolist() == [4, 2]


@pytest.mark.parametrize("name", [DEEPSEEK_V4, "deepseek_v32-modelopt-w4a16"])
def test_steps_with_a_cache_draft_what_one_call_drafts(name, load):
    """The rows read different numbers of pairs, in steps of up to five pairs."""
    ids, hidden, _ = drafting_reference(name)
    model = load(name)
    ids, hidden = np.resize(ids, (2, 12)), np.resize(hidden, (2, 12, hidden.shape[-1]))
    hidden[1] += 0.25  # another row
    whole, vectors, _ = step(model, hidden, ids, model.init_draft_cache(2, 16))
    cache, read = model.init_draft_cache(2, 16), np.zeros(2, int)
    rows = np.arange(2)[:, None]
    for lengths in np.asarray([(5, 3), (1, 1), (1, 0), (4, 5)]):
        at = np.minimum(read[:, None] + np.arange(5), 11)
        logits, found, cache = step(model, hidden[rows, at], ids[rows, at], cache, lengths)
        for row, count in enumerate(lengths):
            past = slice(read[row], read[row] + count)
            if count:
                assert relative(logits[row, :count], whole[row, past]) < BOUND
                assert relative(found[row, :count], vectors[row, past]) < BOUND
        read += lengths
        assert cache.lengths.tolist() == read.tolist()
    assert read.tolist() == [11, 9]


def test_logits_at_are_those_of_one_pair(load):
    ids, hidden, expected = drafting_reference(QWEN)
    model, at = load(QWEN), jnp.asarray([40])
    logits, vectors, _ = step(
        model, hidden[:, :-1], ids[:, 1:], model.init_draft_cache(1, 70), logits_at=at
    )
    assert logits.shape == (1, 1, 64)
    assert vectors.shape == hidden[:, :-1].shape
    assert relative(logits[:, 0], expected[:, 40]) < BOUND


@pytest.mark.parametrize("name", [QWEN, "qwen3moe-modelopt-w4a16"])
def test_stacked_experts_in_bfloat16_draft_as_single_ones(name, load):
    """In the second checkpoint, gate and up together are square: their shape tells nothing."""
    ids, hidden, expected = drafting_reference(name)
    model = load(name, stacked)
    assert relative(draft(model, hidden, ids), expected) < BOUND


@pytest.mark.parametrize(
    ("name", "change", "kind", "stated"),
    [
        (GLM, packed, "nvfp4", {"excluded": True}),
        (GLM, in_fp8, "fp8", {}),
        ("qwen3_5-modelopt-w4a16", in_fp8, "fp8", {}),
        (KIMI, in_fp8_blocks, "fp8", {}),
    ],
)
def test_what_is_stored_decides_the_format(name, change, kind, stated, load):
    """The configs call all linears NVFP4, or say that no drafting layer is quantized."""
    ids, hidden, _ = drafting_reference(name)
    model = load(name, lambda tensors: change(tensors)[0], **stated)
    meant = load(name, lambda tensors: change(tensors)[1])
    assert relative(draft(model, hidden, ids), draft(meant, hidden, ids)) < BOUND
    found = set()
    for _, module in nnx.iter_modules(model.drafter):
        if isinstance(module, RoutedExperts) and isinstance(module.params.get_value(), MoEParams):
            found.add("nvfp4")
        if isinstance(module, FP8Linear):
            found.add("fp8")
    assert found == {kind}


@pytest.mark.parametrize(
    ("name", "wrapper"), [(DEEPSEEK_V4, "model."), (NEMOTRON, "language_model.")]
)
def test_names_below_a_wrapper(name, wrapper, load):
    ids, hidden, expected = drafting_reference(name)

    def change(tensors):
        return {wrapper + name: tensor for name, tensor in in_bfloat16(tensors).items()}

    assert relative(draft(load(name, change), hidden, ids), expected) < BOUND


def test_the_default_scheme_and_dtype_run_packed_and_stacked_drafters(load):
    """Against float32: bfloat16 has a relative precision of 0.004, through one layer."""
    for name, change in ((GLM, lambda tensors: packed(tensors)[0]), (QWEN, stacked)):
        ids, hidden, _ = drafting_reference(name)
        exact = draft(load(name, change), hidden, ids)
        plain = draft(load(name, change, settings={}), hidden, ids)
        assert plain.dtype == jnp.float32
        assert relative(plain, np.asarray(exact)) < 0.05


@pytest.mark.parametrize("name", [KIMI, QWEN])
def test_an_embedding_and_a_head_of_its_own(name, load, caplog):
    """Copies of the model's are left out; others are used."""
    caplog.set_level(logging.INFO, "jax_nvfp4_moe")
    ids, hidden, expected = drafting_reference(name)
    given = read_all(CHECKPOINTS / name)
    embedding, head = given["model.embed_tokens.weight"], given["lm_head.weight"]
    stem = "mtp" if name == QWEN else "model.layers.2"
    head_stem = "mtp.lm_head" if name == QWEN else f"{stem}.shared_head.head"

    def add(embedding, head):
        new = {f"{stem}.embed_tokens.weight": embedding, f"{head_stem}.weight": head}
        return lambda tensors: in_bfloat16(tensors) | new

    copies = load(name, add(embedding, head))
    assert copies.drafter.embedding is None
    assert copies.drafter.head is None
    assert "the embedding of the drafting layers equals that of the model (1)" in caplog.text
    assert "the head of the drafting layers equals that of the model (1)" in caplog.text
    assert relative(draft(copies, hidden, ids), expected) < BOUND
    own = load(name, add(np.roll(embedding, 1, axis=0), np.roll(head, 1, axis=0)))
    logits = draft(own, hidden, np.concatenate([ids[:, :1], (ids[:, 1:] + 1) % len(head)], axis=1))
    assert relative(np.roll(logits, -1, axis=-1), expected) < BOUND


def test_drafting_layers_in_a_file_that_no_index_names(load):
    ids, hidden, expected = drafting_reference(GLM)
    assert relative(draft(load(GLM, file="mtp"), hidden, ids), expected) < BOUND


@pytest.mark.parametrize(("name", "stem"), [(KIMI, "model.layers.3"), (QWEN, "mtp.layers.1")])
def test_of_several_drafters_the_first_is_read(name, stem, load, caplog):
    caplog.set_level(logging.INFO, "jax_nvfp4_moe")
    ids, hidden, expected = drafting_reference(name)
    further = {f"{stem}.input_layernorm.weight": np.ones(64, np.float32)}
    model = load(name, lambda tensors: in_bfloat16(tensors) | further, num_nextn_predict_layers=2)
    assert (
        "further drafting layers left out: the first one is applied repeatedly (1)" in caplog.text
    )
    assert relative(draft(model, hidden, ids), expected) < BOUND


def test_drafting_layers_are_left_out_unless_asked_for(tmp_path, caplog):
    caplog.set_level(logging.INFO, "jax_nvfp4_moe")
    model = load_model(write_drafted(QWEN, tmp_path / "drafted"), **EXACT)
    assert model.drafter is None
    assert f"multi-token prediction ({len(drafting_tensors(CHECKPOINTS / QWEN))})" in caplog.text
    with pytest.raises(ValueError, match=r"load it with load_model\(path, draft='mtp'\)"):
        model.init_draft_cache(1, 8)
    with pytest.raises(ValueError, match="no drafting layers"):
        model.draft(jnp.zeros((1, 1, 64)), jnp.zeros((1, 1), jnp.int32), model.init_cache(1, 8))


@pytest.mark.parametrize("name", [KIMI, "qwen3_5_moe-modelopt-w4a16", NEMOTRON])
def test_a_file_without_drafting_layers(name):
    wanted = {"kimi": r"model\.layers\.2\.eh_proj", "qwen": r"mtp\.fc", "nemo": r"mtp.*\.enorm"}
    with pytest.raises(CheckpointError, match=f"no drafting layers; .*{wanted[name[:4]]}"):
        load_model(CHECKPOINTS / name, draft="mtp")


def test_an_architecture_whose_drafting_layers_are_not_read():
    message = r"of \['MixtralForCausalLM'\] are not read.*: Qwen3MoeForCausalLM, Deepseek"
    with pytest.raises(CheckpointError, match=message):
        load_model(CHECKPOINTS / "mixtral-window-modelopt-w4a16", draft="mtp")


@pytest.mark.parametrize(("draft", "hint"), [("lookup", "pass it to `generate`"), (1, "got 1")])
def test_other_drafts_are_refused_before_files_are_read(draft, hint):
    with pytest.raises(ValueError, match=f"draft: expected None or 'mtp', .*{hint}"):
        load_model("no such folder", draft=draft)


def test_missing_and_surplus_drafting_tensors_are_problems(load):
    def change(tensors):
        made = in_bfloat16(tensors) | {"mtp.layers.0.mlp.other.weight": np.ones(3, np.float32)}
        del made["mtp.norm.weight"], made["mtp.layers.0.mlp.experts.3.up_proj.weight"]
        return made

    with pytest.raises(CheckpointError, match="3 problems") as caught:
        load(QWEN, change)
    problems = "\n".join(caught.value.problems)
    for name in ("mtp.norm.weight", "mtp.layers.0.mlp.experts.3.up_proj.weight"):
        assert f"'{name}' is missing" in problems
    assert "'mtp.layers.0.mlp.other.weight' ('model.safetensors'): F32 [3] is not part" in problems


def test_arguments_of_draft(load):
    model = load(GLM)
    cache, hidden = model.init_draft_cache(2, 4), jnp.zeros((2, 3, 64))
    ids = jnp.zeros((2, 3), jnp.int32)
    for changed, message in (
        (
            {"hidden": hidden[:, :2]},
            r"hidden: expected floats \(2, 3, 64\).*got float32 \(2, 2, 64\)",
        ),
        ({"next_ids": ids + 128}, "next_ids: expected ids from 0 to 127"),
        ({"next_ids": ids[:1], "hidden": hidden[:1]}, r"next_ids: expected shape \[2, t\]"),
        ({"lengths": jnp.asarray([4, 0])}, "lengths: expected 2 integers from 0 to 3"),
    ):
        with pytest.raises(ValueError, match=message):
            model.draft(**{"hidden": hidden, "next_ids": ids, "cache": cache} | changed)


def test_a_saved_model_keeps_its_drafter(load, tmp_path):
    ids, hidden, expected = drafting_reference(GLM)
    model = load(GLM)
    save(tmp_path / "saved", model)
    found = restore(tmp_path / "saved", nnx.eval_shape(lambda: model))
    assert relative(draft(found, hidden, ids), expected) < BOUND


@pytest.mark.two_devices
def test_over_a_mesh(tmp_path):
    """There are two rows, which `data` shards. The experts of the drafter are packed."""
    name, shape = "qwen3moe-modelopt-w4a16", {"data": 2, "expert": 2, "tensor": 2}
    ids, hidden, _ = drafting_reference(name)
    ids, hidden = np.resize(ids, (2, 12)), np.resize(hidden, (2, 12, hidden.shape[-1]))
    folder = write_drafted(name, tmp_path / "drafted", lambda tensors: packed(tensors)[0])
    expected = draft(load_model(folder, draft="mtp", **EXACT), hidden, ids)
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), devices=jax.devices()[:8])
    model = load_model(folder, draft="mtp", mesh=mesh, **EXACT)
    assert relative(draft(model, hidden, ids), np.asarray(expected)) < BOUND
    with pytest.raises(ValueError, match="next_ids: expected ids"):
        model.draft(hidden, ids + 512, model.init_draft_cache(2, 12))


def test_explain_describes_the_model_before_its_drafter(load):
    model = load(GLM, lambda tensors: packed(tensors)[0])
    names = [name for name, _ in explain(model).modules]
    assert names[0] == "layers.0.attention.out"
    assert names[-1] == "drafter.layers.0.mlp.experts"


@pytest.mark.parametrize("scheme", ["checkpoint", None])
def test_drafting_layers_need_no_input_scales(scheme, tmp_path, caplog):
    """Tools calibrate the model alone. The file declares W4A4 for all linears."""
    drafting, _ = packed(drafting_tensors(CHECKPOINTS / "qwen3moe-modelopt-w4a16"))
    folder = copy_with_config(CHECKPOINTS / "qwen3moe-modelopt-w4a4", tmp_path / "drafted")
    write_safetensors(folder / "mtp.safetensors", drafting)
    model = load_model(folder, draft="mtp", scheme=scheme)
    assert model.drafter.layers[0].mlp.experts.scheme == "w4a16"
    assert model.layers[0].mlp.experts.scheme == ("w4a16" if scheme is None else "w4a4")
    said = "no input scale for this drafting layer: activations are not rounded (w4a16)"
    assert said in caplog.text
