"""Test the rounded head of drafts: its logits, when it is made, and that it changes no token."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from support.files.checkpoint_edits import read_all
from support.files.drafted import in_bfloat16, write_drafted
from support.files.given import CHECKPOINTS
from support.models.architecture import relative

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.models.draft_head import set_draft_head
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.nn.linear.fp8_linear import FP8Linear
from jax_nvfp4_moe.nn.linear.nvfp4_linear import NVFP4Linear

QWEN = "qwen3moe-modelopt-w4a16"
KINDS = {"nvfp4": NVFP4Linear, "fp8": FP8Linear, "exact": type(None)}
# The products of float32 vectors of 64 numbers with rounded weights are sums of 64 terms.
BOUND = 64 * 2.0**-24


def own_head(tensors):
    """Return tensors of drafting layers that have a head of their own."""
    head = read_all(CHECKPOINTS / QWEN)["lm_head.weight"]
    return in_bfloat16(tensors) | {"mtp.lm_head.weight": np.roll(head, 1, axis=0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a function that writes a given checkpoint with drafting layers."""

    @functools.cache
    def write(name=QWEN, change=in_bfloat16, rows=None):
        path = write_drafted(name, tmp_path_factory.mktemp("drafted") / "folder", change)
        return path if rows is None else with_rows(path, rows)

    return write


def with_rows(folder, rows):
    """Give a checkpoint a vocabulary of `rows` tokens, and return its folder."""
    tensors = read_all(folder)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.resize(tensors[name], (rows, tensors[name].shape[1]))
    write_safetensors(folder / "model.safetensors", tensors)
    config = folder / "config.json"
    found = config.read_text()
    size = read_all(CHECKPOINTS / QWEN)["lm_head.weight"].shape[0]
    assert f'"vocab_size": {size}' in found
    config.write_text(found.replace(f'"vocab_size": {size}', f'"vocab_size": {rows}'))
    return folder


def load(path, draft_head=None, **how):
    return nvfp4.load_model(path, draft="mtp", draft_head=draft_head, **{"dtype": "float32"} | how)


@jax.jit
def draft(model, hidden, ids):
    """Return the logits of pairs of `hidden` and `ids`, and the vectors that the head reads."""
    logits, vectors, _ = model.draft(hidden, ids, model.init_draft_cache(*ids.shape))
    return logits, vectors


def some_pairs(model, shape):
    hidden = np.random.default_rng(1).normal(size=(*shape, model.config.hidden))
    return hidden.astype(np.float32), some_ids(model, shape)


def some_ids(model, shape):
    return np.random.default_rng(0).integers(model.config.vocab_size, size=shape, dtype=np.int32)


def rounded(weight, draft_head):
    """Return a head as the copy stands for it, in float64."""
    if draft_head == "nvfp4":
        return np.asarray(nvfp4.quantize(weight).dequantize(np.float32), np.float64)
    scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(448)
    return (weight / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


@pytest.mark.parametrize("draft_head", ["nvfp4", "fp8"])
@pytest.mark.parametrize("source", ["head", "embedding", "head of the drafting layers"])
def test_logits_are_products_with_the_rounded_weights(draft_head, source, folder):
    model = load(folder(change=own_head if source.endswith("layers") else in_bfloat16), "exact")
    if source == "embedding":
        model.head = None
    settings = Settings(nvfp4.Target.current(), dtype=model.dtype)
    variable = {
        "head": lambda: model.head.weight,
        "embedding": lambda: model.embedding,
        "head of the drafting layers": lambda: model.drafter.head.weight,
    }[source]()
    weight = np.asarray(variable.get_value())
    set_draft_head(model, draft_head, settings)
    assert isinstance(model.drafter.rounded_head, KINDS[draft_head])
    logits, vectors = draft(model, *some_pairs(model, (2, 12)))
    vectors = np.asarray(vectors, np.float64)
    expected = vectors @ rounded(weight, draft_head).T
    assert relative(logits, expected) < BOUND
    assert relative(vectors @ weight.T, expected) > 0.01  # the weights are rounded indeed


def test_rows_are_rounded_in_parts(folder, monkeypatch):
    """The last part overlaps with the one before: 512 rows in parts of 24."""
    whole = load(folder(), "nvfp4").drafter.rounded_head.weight.get_value()
    monkeypatch.setattr("jax_nvfp4_moe.models.draft_head._ROWS", 24)
    jax.clear_caches()
    parts = load(folder(), "nvfp4").drafter.rounded_head.weight.get_value()
    jax.tree.map(np.testing.assert_array_equal, parts, whole)


def test_tokens_are_those_without_drafts(folder):
    """A bias lets the copy draft one token alone: one that the model never draws, or often."""
    model = load(folder(), "nvfp4")
    ids, given = some_ids(model, (4, 9)), {"max_new_tokens": 12, "stop_ids": ()}
    plain = np.asarray(nvfp4.generate(model, ids, **given))
    counts = np.bincount(plain.ravel(), minlength=model.config.vocab_size)
    assert counts.min() == 0
    accepted, bias = {}, np.zeros(len(counts), np.float32)
    for name, token in {"as it is": 0, "never": counts.argmin(), "often": counts.argmax()}.items():
        biased = jnp.asarray(bias).at[token].set(0 if name == "as it is" else 1e4)
        model.drafter.rounded_head.bias = nnx.data(nnx.Param(biased))
        how = {"draft": "mtp", "draft_tokens": 2, "stats": True}
        drafted, stats = nvfp4.generate(model, ids, **given, **how)
        np.testing.assert_array_equal(drafted, plain)
        assert int(stats.drafted.min()) > 0
        accepted[name] = int(stats.accepted.sum())
    assert accepted["never"] == 0 < accepted["often"]


@pytest.mark.parametrize(
    ("rows", "draft_head", "backend", "kind"),
    [
        (1 << 15, None, None, "nvfp4"),
        (1 << 15, "exact", None, "exact"),
        (1 << 15, None, "reference", "exact"),  # it would unpack the copy in each call
        ((1 << 15) - 1, None, None, "exact"),
        (None, None, None, "exact"),
        (None, "nvfp4", "reference", "nvfp4"),
    ],
)
def test_which_head_drafts(rows, draft_head, backend, kind, folder):
    """By default, large heads have a copy in NVFP4 if a kernel runs it, and small ones none."""
    model = load(folder(rows=rows), draft_head, backend=backend)
    assert isinstance(model.drafter.rounded_head, KINDS[kind])


def test_a_model_without_drafting_layers_has_no_copy(folder):
    model = nvfp4.load_model(folder(rows=1 << 15), dtype="float32")
    assert model.drafter is None


@pytest.mark.parametrize("draft_head", ["nvfp4", "fp8"])
def test_a_quantized_head_is_not_rounded_again(draft_head, folder):
    model = load(folder(), "exact")
    model.head = NVFP4Linear(64, 64, rngs=nnx.Rngs(0), dtype=model.dtype)
    settings = Settings(nvfp4.Target.current(), dtype=model.dtype)
    set_draft_head(model, None, settings)
    assert model.drafter.rounded_head is None
    with pytest.raises(ValueError, match="draft_head: expected None or 'exact', because the head"):
        set_draft_head(model, draft_head, settings)


@pytest.mark.parametrize(
    ("draft", "draft_head", "message"),
    [
        ("mtp", "int8", "one of 'exact', 'nvfp4', 'fp8'; got 'int8'"),
        ("mtp", 4, "one of 'exact', 'nvfp4', 'fp8'; got 4"),
        (None, "nvfp4", "without drafting layers, got 'nvfp4'; load them with draft='mtp'"),
    ],
)
def test_what_is_refused_before_files_are_read(draft, draft_head, message):
    with pytest.raises(ValueError, match=f"draft_head: expected None .*{message}"):
        nvfp4.load_model("no such folder", draft=draft, draft_head=draft_head)


@pytest.mark.parametrize("draft_head", ["nvfp4", "fp8"])
def test_a_save_leaves_the_copy_out(draft_head, folder, tmp_path):
    """A model with and one without a copy are saved alike, and `restore` makes the copy again."""
    model, exact = load(folder(), draft_head), load(folder(), "exact")
    nvfp4.save(tmp_path / "saved", model)
    saved = (tmp_path / "saved/layouts.json").read_text()
    assert "drafter" in saved
    assert "rounded_head" not in saved
    again = nvfp4.restore(tmp_path / "saved", nnx.eval_shape(lambda: model))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))
    without = nvfp4.restore(tmp_path / "saved", nnx.eval_shape(lambda: exact))
    assert without.drafter.rounded_head is None


def test_a_copy_whose_weights_are_not_restored(folder, tmp_path):
    drafter = load(folder(), "nvfp4").drafter
    nvfp4.save(tmp_path / "saved", drafter)
    with pytest.raises(ValueError, match="of which rounded_head/weight is a copy"):
        nvfp4.restore(tmp_path / "saved", nnx.eval_shape(lambda: drafter))


def test_explain_lists_the_copy(folder):
    names = [name for name, _ in nvfp4.explain(load(folder(), "nvfp4")).modules]
    assert names[-1] == "drafter.rounded_head"


@pytest.mark.eight_devices
@pytest.mark.parametrize(
    ("axes", "formats"),
    [({"tensor": 2}, ("nvfp4", "fp8")), ({"data": 2, "expert": 2}, ("nvfp4",))],
)
def test_over_a_mesh(axes, formats, folder):
    """`tensor` shards the rows of the copy; other axes leave it whole."""
    mesh, shards = jax.make_mesh(tuple(axes.values()), tuple(axes)), axes.get("tensor", 1)
    for draft_head in formats:
        one, several = load(folder(), draft_head), load(folder(), draft_head, mesh=mesh)
        pairs = some_pairs(one, (2, 6))
        found, expected = (draft(model, *pairs)[0] for model in (several, one))
        assert relative(found, np.asarray(expected)) < 1e-5  # between sums in another order
        for leaf in jax.tree.leaves(several.drafter.rounded_head.weight.get_value()):
            own = leaf.addressable_shards[0].data.size
            assert own == leaf.size // (shards if leaf.ndim else 1)


@pytest.mark.eight_devices
def test_tokens_and_saves_over_a_mesh(folder, tmp_path):
    mesh = jax.make_mesh((2,), ("tensor",))
    one, several = load(folder(), "nvfp4"), load(folder(), "nvfp4", mesh=mesh)
    ids, given = some_ids(one, (2, 6)), {"max_new_tokens": 6, "stop_ids": ()}
    drafted = nvfp4.generate(several, ids, **given, draft="mtp", draft_tokens=2)
    np.testing.assert_array_equal(drafted, nvfp4.generate(several, ids, **given))
    nvfp4.save(tmp_path / "saved", one)
    again = nvfp4.restore(tmp_path / "saved", nnx.eval_shape(lambda: several))
    states = (nnx.state(model.drafter) for model in (again, several))
    jax.tree.map(np.testing.assert_array_equal, *states)
