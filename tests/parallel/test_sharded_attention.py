"""Test attentions sharded by heads: latent ones, Llama 4's, and those normalized as a whole."""

import functools
import re
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.devices.divided_attention import IDS, load_attention
from support.devices.host_devices import (
    call,
    decode,
    difference,
    make_mesh,
    name_shape,
    run_counted,
)
from support.files.given import CHECKPOINTS
from support.files.unquantized import dequantized

from jax_nvfp4_moe import load_model
from jax_nvfp4_moe.models import deepseek_v3, deepseek_v32, llama4, minimax_m2, olmoe
from jax_nvfp4_moe.models.gemma4 import DenseMLP
from jax_nvfp4_moe.nn.attention.grouped_query import Attention
from jax_nvfp4_moe.nn.experts.gated_mlp import GatedMLP
from jax_nvfp4_moe.parallel import ExpertMesh
from jax_nvfp4_moe.parallel.sharded_variable import sharded_axes

pytestmark = [pytest.mark.slow, pytest.mark.eight_devices]

# Bound for float32 sums in another order. Each all-reduce adds up to four of them, and logits pass
# through several layers of that.
BOUND = 1e-6
SHAPES = ((4, 2), (2, 4), (1, 2))
# Models without quantization: the checkpoint, and the meshes of each.
MODELS = {
    # Over (8, 1), only its one expert block is sharded.
    "latent": ("kimi_k2-modelopt-w4a16", ((8, 1), *SHAPES)),
    "direct": ("deepseek_v3-direct-modelopt-w4a16", ((2, 4),)),
    "llama4": ("llama4_text-modelopt-w4a16", SHAPES),
    "normalized": ("olmoe-bias-modelopt-w4a16", ((2, 4), (1, 2))),
    "minimax": ("minimax_m2-modelopt-w4a16", ((2, 4),)),
    "qwen3_vl": ("qwen3_vl_moe-modelopt-w4a16", ((2, 4),)),
    "qwen2": ("qwen2_moe-modelopt-w4a16", ((2, 4),)),
    "ernie": ("ernie4_5_moe-modelopt-w4a16", ((2, 4),)),
    "mistral4": ("mistral4-modelopt-w4a16", ((2, 4),)),
    "deepseek_v32": ("deepseek_v32-modelopt-w4a16", ((2, 4),)),
    "deepseek_v4": ("deepseek_v4-modelopt-w4a16", ((2, 4),)),
    "glm_moe_dsa": ("glm_moe_dsa-modelopt-w4a16", ((2, 4), (1, 2))),
    "granite": ("granitemoeshared-modelopt-w4a16", ((2, 4),)),
    "hunyuan": ("hunyuan_v1_moe-modelopt-w4a16", ((2, 4),)),
    "exaone": ("exaone_moe-modelopt-w4a16", ((2, 4),)),
    "lfm2": ("lfm2_moe-modelopt-w4a16", ((2, 4),)),
    "kimi_linear": ("kimi_linear-modelopt-w4a16", ((2, 4),)),
    "ling": ("bailing_hybrid-modelopt-w4a16", ((2, 4),)),
    "gemma4": ("gemma4-modelopt-w4a16", ((2, 4),)),
    "minimax_m3": ("minimax_m3-modelopt-w4a16", ((2, 4),)),
    "afmoe": ("afmoe-modelopt-w4a16", ((2, 4),)),
    "hy_v3": ("hy_v3-modelopt-w4a16", ((2, 4),)),
    "solar_open": ("solar_open-modelopt-w4a16", ((2, 4),)),
    "dots1": ("dots1-modelopt-w4a16", ((2, 4),)),
    "glm4v_moe": ("glm4v_moe-modelopt-w4a16", ((2, 4),)),
    "phimoe": ("phimoe-modelopt-w4a16", ((2, 4),)),
    "qwen3_omni": ("qwen3_omni_moe-modelopt-w4a16", ((2, 4),)),
    # Its layers have 4 query heads, or 8 with a window. Each device has 1 or 2.
    "step3p7": ("step3p7-modelopt-w4a16", ((2, 4),)),
    # Dense models, which have nothing to shard along `expert`.
    "llama": ("llama-modelopt-w4a16", ((2, 4), (1, 2))),
    "ministral3": ("ministral3-modelopt-w4a16", ((2, 4),)),
    # One linear has its queries and its two key heads, which more shards do not divide.
    "phi3": ("phi3-modelopt-w4a16", ((2, 2), (1, 2))),
    "olmo3": ("olmo3-modelopt-w4a16", ((2, 4),)),
    "apertus": ("apertus-modelopt-w4a16", ((2, 4),)),
    "laguna": ("laguna-modelopt-w4a16", ((2, 4),)),
    "cohere2": ("cohere2_moe-modelopt-w4a16", ((2, 4),)),
    "qwen4_exp": ("qwen4_exp-modelopt-w4a16", ((2, 4),)),
    "glm5_next": ("glm5_next-modelopt-w4a16", ((2, 4),)),
    "mimo": ("mimo_v2_flash-modelopt-w4a16", ((2, 4),)),
}
# All-reduces of attentions, experts, dense MLPs, the embedding, and means of queries and keys; then
# those of shared experts. The latter join those of the experts if both add over the same devices.
SENT = {
    "latent": (2 + 1 + 1 + 1, 1),
    "direct": (2 + 2 + 0 + 1, 2),
    "llama4": (4 + 2 + 2 + 1, 2),
    "normalized": (2 + 2 + 0 + 1 + 2, 0),
    "minimax": (2 + 2 + 0 + 1 + 2, 0),
    "qwen3_vl": (2 + 1 + 1 + 1, 0),
    "qwen2": (3 + 2 + 1 + 1, 2),
    "ernie": (2 + 1 + 1 + 1, 1),
    "mistral4": (2 + 1 + 1 + 1, 1),
    "deepseek_v32": (3 + 2 + 1 + 1, 2),
    "deepseek_v4": (3 + 3 + 0 + 1, 3),
    "glm_moe_dsa": (3 + 2 + 1 + 1, 2),
    "granite": (2 + 2 + 0 + 1, 2),
    "hunyuan": (2 + 2 + 0 + 1, 2),
    "exaone": (3 + 2 + 1 + 1, 2),
    "lfm2": (3 + 2 + 1 + 1, 0),
    "kimi_linear": (2 + 1 + 1 + 1, 1),
    "ling": (2 + 1 + 1 + 1, 1),
    "gemma4": (2 + 2 + 0 + 1, 2),
    "minimax_m3": (2 + 1 + 1 + 1, 1),
    "afmoe": (2 + 1 + 1 + 1, 1),
    "hy_v3": (2 + 1 + 1 + 1, 1),
    "solar_open": (1 + 1 + 0 + 1, 1),
    "dots1": (2 + 1 + 1 + 1, 1),
    "glm4v_moe": (2 + 1 + 1 + 1, 1),
    "phimoe": (1 + 1 + 0 + 1, 0),
    "qwen3_omni": (2 + 1 + 1 + 1, 0),
    "step3p7": (3 + 2 + 1 + 1, 2),
    "llama": (2 + 0 + 2 + 1, 0),
    "ministral3": (2 + 0 + 2 + 1, 0),
    "phi3": (2 + 0 + 2 + 1, 0),
    "olmo3": (2 + 0 + 2 + 1 + 2, 0),
    "apertus": (2 + 0 + 2 + 1, 0),
    "laguna": (3 + 2 + 1 + 1, 2),
    # Attentions add together with the dense MLP or the shared experts, which read the same tokens.
    "cohere2": (3 + 2 + 0 + 1, 0),
    # Its two key heads of delta rules cannot be divided into four parts.
    "qwen4_exp": (1 + 2 + 0 + 1, 2),
    "glm5_next": (2 + 1 + 1 + 1, 1),
    "mimo": (3 + 2 + 1 + 1, 0),
}
# Folder, its architecture, and the scheme to load with.
ATTENTIONS = {
    "latent-w4a16": ("glm4_moe_lite-modelopt-w4a16", deepseek_v3, None),
    "latent-biases": ("deepseek_v3-direct-modelopt-w4a16", deepseek_v3, None),
    "latent-w4a4": ("deepseekv3-modelopt-w4a4", deepseek_v3, "checkpoint"),
    "latent-fp8": ("deepseek_v3-modelopt-mixed-w4a16-kv8", deepseek_v3, "checkpoint"),
    "latent-fp8-weights": ("deepseek_v3-modelopt-mixed-w4a16-kv8", deepseek_v3, None),
    "latent-sparse": ("deepseek_v32-modelopt-w4a16", deepseek_v32, None),
    "llama4-w4a16": ("llama4_text-modelopt-w4a16", llama4, None),
    "llama4-w4a4": ("llama4-ct-w4a4", llama4, "checkpoint"),
    "normalized-biases": ("olmoe-bias-modelopt-w4a16", olmoe, None),
    "normalized": ("minimax_m2-modelopt-w4a16", minimax_m2, None),
}


LATENT = {"q": 4, "kv_up": 4, "out": 4, "q_norm": 1, "kv_norm": 1}
JOINED_LATENT = LATENT | {"down.q_a_kv": 1}
# Four shards have two key heads, so each device keeps one of them. Joined queries, keys and values
# have four heads, two and two, and a device has one of each.
ALONE = {"qkv.q": 4, "qkv.k": 2, "qkv.v": 2, "out": 4}
JOINED = {"qkv.q_k_v": 8 / 3, "out": 4}
SHARES = {
    # 24 rows of queries fill a tile of 16 and half of another.
    "latent-w4a16": JOINED_LATENT | {"q": 96 / 32},
    # Of 96 rows of queries and 40 of the latent, a device has 24 and 40, also in tiles of 16.
    "latent-biases": {"down.q_kv": 144 / 64, "kv_up": 4, "out": 4, "kv_norm": 1},
    "latent-w4a4": LATENT | {"down.q_a": 1, "down.kv": 1},
    # Also the scales of keys and values. The activations have calibrated scales.
    "latent-fp8": LATENT | {"down.q_a": 1, "down.kv": 1, "kv": 4},
    "latent-fp8-weights": JOINED_LATENT,
    "latent-sparse": JOINED_LATENT | {"q": 96 / 32, "indexer": 1},
    "llama4-w4a16": JOINED,
    "llama4-w4a4": ALONE,
    "normalized-biases": JOINED | {"q_norm": 4, "k_norm": 2},
    "normalized": JOINED | {"q_norm": 4, "k_norm": 2},
}


load = functools.partial(load_model, dtype=jnp.float32)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function from a model's name to its folder, which it writes once."""
    return functools.cache(lambda name: dequantized(MODELS[name][0], tmp_path_factory.mktemp(name)))


@functools.cache
def one_device(folder):
    """Return the logits of one device for a whole prompt, and for a prefill and one step."""
    model = load(folder)
    return call(model, IDS), decode(model, IDS, [11])[0]


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name, (_, shapes) in MODELS.items() for shape in shapes],
    ids=name_shape,
)
def test_models_with_cut_heads_equal_one_device(written, name, shape):
    """Logits agree, over (2, 4) also of a prefill and a step. The all-gather is for the logits."""
    logits, steps = one_device(written(name))
    cut = load(written(name), mesh=make_mesh(shape))
    found, sent = run_counted(cut, IDS)
    assert difference(found, logits) <= BOUND
    joint, shared = SENT[name]
    reduced = joint if shape[0] == 1 else joint + shared
    uncut = shape[1] == 1
    assert sent == ({"all-reduce": 1} if uncut else {"all-reduce": reduced, "all-gather": 1})
    if shape == (2, 4):
        assert difference(decode(cut, IDS, [11])[0], steps) <= BOUND


@pytest.mark.parametrize("name", MODELS)
def test_decoding_equals_prefill(written, name):
    """On one device, in float32: a prefill and one step have the logits of the whole prompt."""
    logits, steps = one_device(written(name))
    assert difference(steps, logits) <= BOUND


def test_norms_around_a_cut_mlp_with_exchanged_tokens(written):
    """The dense MLP of Gemma 4 normalizes the sum of its shards, on each device's own tokens."""
    one = one_device(written("gemma4"))[0]
    cut = load(written("gemma4"), mesh=make_mesh((2, 2)), dispatch="all_to_all")
    assert difference(call(cut, IDS), one) <= BOUND
    with unittest.mock.patch.object(DenseMLP, "finish", GatedMLP.finish):
        wrong = jax.jit(lambda model, ids: model(ids))(cut, IDS)  # `call` has traced the norm
    assert difference(wrong, one) > 1e4 * BOUND


@functools.cache
def attention(case, shape=None):
    """Load only the attention of one case, as its file quantizes it, over a mesh or one device."""
    name, architecture, scheme = ATTENTIONS[case]
    mesh = shape and ExpertMesh(make_mesh(shape))
    return load_attention(CHECKPOINTS / name, architecture, mesh, scheme=scheme)


@functools.cache
def expected(case):
    return run(attention(case))


def run(attention, apply=call):
    """Return the outputs for seven tokens and one after them, and the entries of the cache."""
    hidden = attention.config.hidden
    x = np.asarray(jax.random.normal(jax.random.key(2), (2, 8, hidden)))
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), (2, 8))
    first, cache = apply(attention, x[:, :7], positions[:, :7], attention.init_cache(2, 8))
    last, cache = apply(attention, x[:, 7:], positions[:, 7:], cache)
    return [np.concatenate([first, last], axis=1), *map(np.asarray, cache.values())]


def misplaced(cut):
    """Return an attention whose shards have another shard's columns of the output projection."""
    graph, state = nnx.split(cut.out)

    def roll(variable):
        leaves, tree = jax.tree.flatten(variable)
        axes = sharded_axes(variable)
        rolled = [
            leaf if axis is None else jnp.roll(leaf, leaf.shape[axis] // 4, axis=axis)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        return tree.unflatten(rolled)

    other = nnx.clone(cut)
    other.out = nnx.merge(graph, jax.tree.map(roll, state, is_leaf=is_variable))
    return other


def is_variable(leaf):
    return isinstance(leaf, nnx.Variable)


def held(tree):
    """Return the bytes of all arrays on one device; all devices hold equally many."""
    found = 0
    for leaf in jax.tree.leaves(tree):
        on = {shard.device.id: shard.data.nbytes for shard in leaf.addressable_shards}
        assert len(set(on.values())) == 1
        found += on[max(on)]
    return found


def shares(one, stacked):
    """Return how many times larger each module's largest array is than its part on a device."""
    largest, found = {}, {}
    wholes, parts = map(jax.tree_util.tree_leaves_with_path, (one, stacked))
    for (path, whole), (_, part) in zip(wholes, parts, strict=True):
        name = ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        name = re.match(r"((?:down|qkv)\.)?\w+", name.replace("..", ".").lstrip("."))[0]
        if whole.nbytes > largest.get(name, 0):
            largest[name], found[name] = whole.nbytes, whole.nbytes / held(part)
    return found


@pytest.mark.parametrize("case", ATTENTIONS)
def test_quantized_attentions_by_heads(case):
    """Prefill, one step and the cache agree over four shards, quantized as in the files.

    If four shards have two key heads, pairs of shards keep the same head.
    """
    for own, alone in zip(run(attention(case, (1, 4))), expected(case), strict=True):
        copies = own.shape[1] // alone.shape[1]
        assert difference(own, np.repeat(alone, copies, axis=1)) <= BOUND


@pytest.mark.parametrize("case", ATTENTIONS)
def test_heads_out_of_place_are_seen(case):
    """Negative control: shards have another shard's columns of the output projection."""
    wrong = run(misplaced(attention(case, (1, 4))))
    assert difference(wrong[0], expected(case)[0]) > 0.1


@pytest.mark.parametrize("case", ATTENTIONS)
def test_a_device_holds_its_own_heads(case):
    """A device holds a quarter of what belongs to heads, and the whole of a latent cache."""
    one, cut = attention(case), attention(case, (1, 4))
    assert shares(one, cut) == SHARES[case]
    whole, part = (held(module.init_cache(2, 8)) for module in (one, cut))
    assert whole == part * (1 if "latent" in case else 2)


def test_a_part_does_not_normalize_its_heads_alone():
    """Queries and keys need the mean over all heads: a mean of each part's own gives an error."""
    name, architecture, _ = ATTENTIONS["normalized-biases"]
    cut = load_attention(CHECKPOINTS / name, architecture, ExpertMesh(make_mesh((1, 4))))
    apply = jax.jit(lambda module, *args: module(*args))  # `call` may have traced the mean
    with unittest.mock.patch.object(Attention, "_means", return_value=(None, None)):
        wrong = run(cut, apply)[0]
    assert difference(wrong, expected("normalized-biases")[0]) > 1e-2
