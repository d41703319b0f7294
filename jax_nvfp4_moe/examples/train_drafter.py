"""Train a drafting layer for a checkpoint of Qwen3-MoE's form, whose own weights stay frozen.

Run it: ``python -m jax_nvfp4_moe.examples.train_drafter FOLDER_OF_TEXTS --output mtp.safetensors``.
Put the file beside the checkpoint's, and load it with ``load_model(path, draft="mtp")``.

The layer learns to predict what the model predicts one token further: the loss is the divergence
of its distribution from the model's. It is applied to its own vectors too, `DEPTH` times, as it
drafts several tokens. The weights are trained in float32. The experts are stored in NVFP4, with the
names and scales of ModelOpt's files, and all other tensors in bfloat16.

The drafting layer of the example model was made with ``--steps 16000 --batch 48`` from the sources
of Python's standard library (PSF License), NumPy, SciPy, JAX and Flax (BSD and Apache licenses), as
they are installed: 20,894,976 tokens. On an H200 this takes 258 seconds.
"""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.checkpoint.formats.modelopt import MODELOPT
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer
from jax_nvfp4_moe.numerics.nvfp4 import SCALE_RANGE

CHECKPOINT = pathlib.Path(__file__).parent / "tiny-python-moe"
DEPTH, DECAY = 3, 0.6  # drafts that are trained, and the weight of each relative to the one before
PARTS = ("gate_proj", "up_proj", "down_proj")
CALIBRATION_BATCHES = 8
_RANGE = np.float32(SCALE_RANGE)


def init(config, seed=0):
    """Return the tensors of a drafting layer, float32 by their names in the file.

    Before training, the layer hands on the model's vectors.
    """
    attention, rng = config.attention, np.random.default_rng(seed)
    h, width, e = config.hidden, attention.head_dim, config.num_experts
    layer = "mtp.layers.0"

    def matrix(rows, columns, scale=1.0):
        return rng.normal(size=(rows, columns)).astype(np.float32) * scale / columns**0.5

    made = {"mtp.fc.weight": np.concatenate([matrix(h, h, 0.5), np.eye(h, dtype=np.float32)], 1)}
    ones = {
        "mtp.pre_fc_norm_embedding": h,
        "mtp.pre_fc_norm_hidden": h,
        f"{layer}.input_layernorm": h,
        f"{layer}.post_attention_layernorm": h,
        f"{layer}.self_attn.q_norm": width,
        f"{layer}.self_attn.k_norm": width,
        "mtp.norm": h,
    }
    made |= {f"{name}.weight": np.ones(size, np.float32) for name, size in ones.items()}
    heads = {"q": attention.num_heads, "k": attention.num_kv_heads, "v": attention.num_kv_heads}
    for name, count in heads.items():
        made[f"{layer}.self_attn.{name}_proj.weight"] = matrix(count * width, h)
    made[f"{layer}.self_attn.o_proj.weight"] = matrix(h, attention.num_heads * width, 0.1)
    made[f"{layer}.mlp.gate.weight"] = matrix(e, h)
    for expert in range(e):
        stem = f"{layer}.mlp.experts.{expert}"
        made[f"{stem}.gate_proj.weight"] = matrix(config.intermediate, h)
        made[f"{stem}.up_proj.weight"] = matrix(config.intermediate, h)
        made[f"{stem}.down_proj.weight"] = matrix(h, config.intermediate, 0.1)
    return made


def stack_experts(tensors):
    """Return the tensors with those of all experts in one array, which gradients need."""
    made = {name: x for name, x in tensors.items() if ".experts." not in name}
    count = (len(tensors) - len(made)) // len(PARTS)
    for part in PARTS:  # names in a file are sorted as text, 10 before 2
        names = (f"mtp.layers.0.mlp.experts.{expert}.{part}.weight" for expert in range(count))
        made[part] = np.stack([tensors[name] for name in names])
    return made


def unstack_experts(stacked):
    """Return the tensors under the names of the file."""
    made = {name: x for name, x in stacked.items() if name not in PARTS}
    for part in PARTS:
        for expert, x in enumerate(stacked[part]):
            made[f"mtp.layers.0.mlp.experts.{expert}.{part}.weight"] = x
    return made


def normalize(x, weight, eps):
    """Return the RMS norm of `x`."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * jnp.expand_dims(weight, range(x.ndim - 1))


def rotate(x, frequencies):
    """Return heads ``[b, t, n, d]`` rotated to their positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1], dtype=x.dtype)[:, None] * jnp.asarray(frequencies)[None]
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def draft(config, weights, embedded, hidden):
    """Return the vectors of all pairs ``[b, t, h]``, as `Decoder.draft` computes them.

    The second result is that of `run_experts`.
    """
    eps, attention, layer = config.eps, config.attention, "mtp.layers.0"

    def at(name):
        return weights[f"{name}.weight"]

    parts = (
        normalize(embedded, at("mtp.pre_fc_norm_embedding"), eps),
        normalize(hidden, at("mtp.pre_fc_norm_hidden"), eps),
    )
    x = jnp.concatenate(parts, axis=-1) @ at("mtp.fc").T
    normal = normalize(x, at(f"{layer}.input_layernorm"), eps)
    q, k, v = (
        (normal @ at(f"{layer}.self_attn.{name}_proj").T).reshape(
            *x.shape[:2], -1, attention.head_dim
        )
        for name in ("q", "k", "v")
    )
    frequencies = attention.rope.frequencies
    q = rotate(normalize(q, at(f"{layer}.self_attn.q_norm"), eps), frequencies)
    k = rotate(normalize(k, at(f"{layer}.self_attn.k_norm"), eps), frequencies)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + y.reshape(*x.shape[:2], -1) @ at(f"{layer}.self_attn.o_proj").T
    normal = normalize(x, at(f"{layer}.post_attention_layernorm"), eps)
    y, largest = run_experts(config, weights, normal)
    return normalize(x + y, at("mtp.norm"), eps), largest


def run_experts(config, weights, x):
    """Return the weighted sum of the experts that each token chooses. All experts are computed.

    The second result has the largest magnitudes that enter the two products, ``[2]``.
    """
    logits = x @ weights["mtp.layers.0.mlp.gate.weight"].T
    chances = jax.nn.softmax(logits, axis=-1)
    kept, ids = jax.lax.top_k(chances, config.router.top_k)
    kept = kept / kept.sum(axis=-1, keepdims=True)
    shares = jnp.einsum("btk,btke->bte", kept, jax.nn.one_hot(ids, config.num_experts))
    gate = jnp.einsum("bth,eih->btei", x, weights["gate_proj"])
    up = jnp.einsum("bth,eih->btei", x, weights["up_proj"])
    inner = jnp.where(shares[..., None] > 0, jax.nn.silu(gate) * up, 0.0)
    largest = jnp.stack([jnp.abs(x).max(), jnp.abs(inner).max()])
    return jnp.einsum("btei,ehi->bth", inner * shares[..., None], weights["down_proj"]), largest


def loss(weights, model, ids):
    """Return the mean divergence of the drafts from what the model predicts.

    The second result is a pair: how often each draft is the model's choice, and the largest
    magnitudes that enter the products of the experts.

    Args:
      weights: the drafting layer, as `stack_experts` returns it.
      model: the model, whose head is its embedding.
      ids: tokens ``[b, t]``.
    """
    logits, hidden = model(ids, with_hidden=True)
    table, hidden = (x.astype(jnp.float32) for x in (model.embedding.get_value(), hidden))
    embedded, wanted = table[ids[:, 1:]], logits[:, 1:]
    chosen, total, right, largest = jnp.argmax(wanted, axis=-1), 0.0, [], []
    vectors = hidden[:, :-1]
    for depth in range(DEPTH):
        vectors, entering = draft(model.config, weights, embedded, vectors)
        drafted = jax.nn.log_softmax(vectors @ table.T, axis=-1)
        each = optax.kl_divergence(drafted, jax.nn.softmax(wanted, axis=-1))
        total += DECAY**depth * jnp.mean(each[:, depth:])
        right.append(jnp.mean((jnp.argmax(drafted, axis=-1) == chosen)[:, depth:]))
        largest.append(entering)
        # The next draft reads this one's vector, one token further.
        vectors = jnp.concatenate([hidden[:, :1], vectors[:, :-1]], axis=1)
    return total, (jnp.stack(right), jnp.stack(largest).max(axis=0))


def read_tokens(tokenizer, folders, length):
    """Return all Python sources below some folders as rows of tokens, int32 ``[n, length]``."""
    found = []
    for folder in folders:
        for path in sorted(pathlib.Path(folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            found += [*tokenizer.encode(text), *tokenizer.stop_ids[:1]]
    rows = len(found) // length
    return np.asarray(found[: rows * length], np.int32).reshape(rows, length)


def train(model, ids, *, steps, batch=16, learning_rate=2e-3, seed=0):
    """Return the trained tensors, float32 by their names in the file.

    Args:
      model: from `load_model`, with a tied head.
      ids: rows of tokens ``[n, t]``.
      steps: number of steps.
      batch: number of rows of a step.
      learning_rate: the largest one, after a warm-up; a cosine leads it to zero.
      seed: seed of the order of the rows.
    """
    weights = jax.tree.map(jnp.asarray, stack_experts(init(model.config, seed)))
    rate = optax.warmup_cosine_decay_schedule(0.0, learning_rate, min(200, steps // 4 + 1), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.98))

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def step(model, weights, state, ids):
        (value, (right, _)), gradient = jax.value_and_grad(loss, has_aux=True)(weights, model, ids)
        change, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, change), state, value, right

    state, rng = optimizer.init(weights), np.random.default_rng(seed)
    for index in range(steps):
        rows = rng.choice(len(ids), batch, replace=len(ids) < batch)
        weights, state, value, right = step(model, weights, state, ids[rows])
        if index % 100 == 0 or index == steps - 1:
            shares = ", ".join(f"{share:.3f}" for share in np.asarray(right))
            print(f"step {index}: loss {float(value):.3f}, right drafts {shares}", flush=True)
    return unstack_experts(jax.tree.map(np.asarray, weights))


def find_largest_inputs(model, tensors, ids, batch=16, seed=0):
    """Return the largest magnitudes that enter the products of the experts, float32 ``[2]``.

    Args:
      model: as for `train`.
      tensors: the drafting layer, by the names in the file.
      ids: as for `train`. Some of the rows are read.
      batch: number of rows to read at once.
      seed: seed of the choice of rows.
    """
    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), stack_experts(tensors))
    count = min(CALIBRATION_BATCHES * batch, len(ids))
    rows = np.random.default_rng(seed).choice(len(ids), count, replace=False)
    run = jax.jit(lambda *given: loss(*given)[1][1])
    found = [run(wide, model, ids[rows[at : at + batch]]) for at in range(0, count, batch)]
    return np.max(found, axis=0)


def pack_experts(tensors, largest):
    """Return the tensors with the experts in NVFP4, as ModelOpt stores them.

    Gate and up of an expert share one global scale, and all experts share the input scale of each
    product.

    Args:
      tensors: the drafting layer, by the names in the file.
      largest: the largest magnitudes that enter the two products, from `find_largest_inputs`.
    """
    made = {name: x for name, x in tensors.items() if ".experts." not in name}
    names, (first, second) = MODELOPT.names, np.asarray(largest, np.float32) / _RANGE
    for name in tensors.keys() - made.keys():
        module = name.removesuffix(".weight")
        stem, part = module.rsplit(".", 1)
        merged, entering = (PARTS[2:], second) if part == PARTS[2] else (PARTS[:2], first)
        amax = np.float32(max(np.abs(tensors[f"{stem}.{one}.weight"]).max() for one in merged))
        weight = nvfp4.quantize(tensors[name], amax / _RANGE)
        arrays = {
            names.packed: weight.packed,
            names.block_scale: weight.block_scale,
            names.weight_global: weight.global_scale,
            names.input_global: entering,
        }
        made |= {f"{module}.{kind}": np.asarray(array) for kind, array in arrays.items()}
    return made


def main(arguments=None):
    """Train a drafting layer, and write it."""
    parser = argparse.ArgumentParser(description="Train a drafting layer.")
    parser.add_argument("texts", nargs="+", help="folders of Python sources")
    parser.add_argument("--checkpoint", default=CHECKPOINT)
    parser.add_argument("--output", default="mtp.safetensors")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--experts", choices=("nvfp4", "bfloat16"), default="nvfp4")
    given = parser.parse_args(arguments)
    model = nvfp4.load_model(given.checkpoint)
    ids = read_tokens(load_tokenizer(given.checkpoint), given.texts, given.length)
    print(f"{ids.size} tokens")
    trained = train(model, ids, steps=given.steps, batch=given.batch)
    stored = {name: x.astype(ml_dtypes.bfloat16) for name, x in trained.items()}
    if given.experts == "nvfp4":
        stored = pack_experts(stored, find_largest_inputs(model, stored, ids))
    write_safetensors(given.output, stored, {"format": "pt"})


if __name__ == "__main__":
    main()
