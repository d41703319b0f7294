"""Run whole models on a mesh of eight host devices; `test_parallel.py` starts this and judges.

python tests/programs/eight_devices_models.py NAME ...  prints JSON for each: [name, figures]
"""

import functools
import os
import re
import tempfile
import unittest.mock

if __name__ == "__main__":
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from given import CHECKPOINTS, EXAMPLE
from host_devices import (
    IDS,
    SHAPES,
    call,
    collectives,
    compare,
    describe,
    difference,
    differing_copies,
    make_mesh,
    run_checks,
    tokens,
)
from jax.sharding import AxisType
from unquantized import dequantized

import jax_nvfp4_moe as nvfp4
import jax_nvfp4_moe.parallel.dispatch
import jax_nvfp4_moe.parallel.experts
from jax_nvfp4_moe.checkpoint import LoadOptions, WeightTable, open_checkpoint
from jax_nvfp4_moe.checkpoint.folder import merge_text_config
from jax_nvfp4_moe.checkpoint.safetensors import Tensors, open_tensors
from jax_nvfp4_moe.checkpoint.synthetic import SyntheticSizes, write_synthetic
from jax_nvfp4_moe.models import gpt_oss
from jax_nvfp4_moe.nn.building import Builder
from jax_nvfp4_moe.nn.filling import fill
from jax_nvfp4_moe.nn.settings import Settings
from jax_nvfp4_moe.parallel import ExpertMesh

SIZES = SyntheticSizes(
    layers=2,
    num_experts=8,
    top_k=2,
    hidden=64,
    intermediate=64,
    vocab=128,
    heads=4,
    kv_heads=2,
    head_dim=16,
)


def model(folder, shapes, **options):
    """Return what meshes change and send, and what another order of sums changes on one device."""
    load = functools.partial(nvfp4.load_model, folder, dtype=jnp.float32, **options)
    ids = jnp.asarray(IDS)
    reordered = difference(call(load(backend="reference"), ids), call(load(), ids))
    return {"meshes": compare(load, ids, shapes), "reordered": reordered}


def synthetic():
    """A small random model: heads, dense parts and vocabulary cut, fewer key heads than shards.

    Figures of logits, of decoding with a cache, and the tokens that it generates.
    """
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        write_synthetic(folder, SIZES, algorithm="W4A16_NVFP4")
        load = functools.partial(nvfp4.load_model, folder, dtype=jnp.float32)
        ids = jnp.asarray(IDS % SIZES.vocab)
        one = load()
        logits, (steps, _) = call(one, ids), decode(one, ids)
        for shape in SHAPES:
            eight = load(mesh=make_mesh(shape, AxisType.Explicit))
            compiled = call.lower(eight, ids).compile()
            errors = [difference(compiled(eight, ids), logits)]
            if shape == (2, 4):
                found, cache = decode(eight, ids)
                errors.append(difference(found, steps))
                new = {"max_new_tokens": 4}
                same = nvfp4.generate(one, ids[:, :4], **new) == nvfp4.generate(
                    eight, ids[:, :4], **new
                )
                figures["same_tokens"] = bool(np.asarray(same).all())
                figures["cache"] = cache
            figures["x".join(map(str, shape))] = [max(errors), collectives(compiled)]
        figures["read"] = bytes_read(folder)
    return figures


def trees():
    """Paths and dtypes of a model's arrays over each mesh and on one device; copies that differ.

    Figures are of a random model of NVFP4 experts, and of DeepSeek's attentions unquantized.
    """
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        write_synthetic(f"{folder}/nvfp4", SIZES, algorithm="W4A16_NVFP4")
        folders = {"nvfp4": f"{folder}/nvfp4"}
        for name in ("deepseek_v3-direct", "kimi_k2"):
            os.mkdir(f"{folder}/{name}")
            folders[name] = dequantized(f"{name}-modelopt-w4a16", f"{folder}/{name}")
        for name, path in folders.items():
            load = functools.partial(nvfp4.load_model, path, dtype=jnp.float32)
            expected = describe(load())
            for shape in SHAPES:
                model = load(mesh=make_mesh(shape))
                same = describe(model) == expected
                figures[f"{name} {shape}"] = [same, differing_copies(model)]
    return figures


def load_attention(folder, architecture, expert_mesh, scheme=None, layer=0):
    """Load the attention of one layer and nothing else, over a mesh or not (None)."""
    settings = Settings(nvfp4.Target("cpu"), scheme, dtype=jnp.float32, expert_mesh=expert_mesh)
    options = LoadOptions(
        dtype=jnp.float32,
        only=f"model.layers.{layer}.self_attn",
        input_scales="required" if scheme == "checkpoint" else "ignored",
    )
    with open_checkpoint(folder) as checkpoint:
        config = architecture.read_config(merge_text_config(checkpoint.config))
        table = WeightTable(checkpoint, options)
        make = Builder(table, architecture.KEYS, settings)
        attention = nnx.eval_shape(lambda: architecture.build_attention(config, layer, make))
        table.check()
        with table.open_reader() as reader:
            fill(attention, f"layers.{layer}.attention", make.parts, reader, settings)
    return attention


def exchanged_models():
    """Errors of prompts and of decoding of a small random model whose tokens are shared out too.

    By mesh and rows of the batch, of 11 tokens and then 1: 24 and 2 tokens, or 3 x 12 and 3.
    """
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        write_synthetic(folder, SIZES, algorithm="W4A16_NVFP4")
        load = functools.partial(nvfp4.load_model, folder, dtype=jnp.float32)
        one = load()
        for rows, shape in ((2, (8, 1)), (3, (2, 2))):
            ids = jnp.asarray(np.resize(IDS % SIZES.vocab, (rows, 12)))
            eight = load(mesh=make_mesh(shape), dispatch="all_to_all")
            compiled = call.lower(eight, ids).compile()
            errors = [difference(compiled(eight, ids), call(one, ids))]
            errors.append(difference(decode(eight, ids)[0], decode(one, ids)[0]))
            figures[f"{rows} rows"] = [errors, collectives(compiled)["all-to-all"]]
        block = nvfp4.load_moe(folder, 0, mesh=make_mesh((8, 1)), dispatch="all_to_all")
        figures["load_moe"] = block.experts.options.dispatch
    return figures


def shared_experts():
    """Error of a model with NVFP4 shared experts whose tokens are shared out, and their rows.

    24 tokens over four shards along `expert`: a linear of a shared expert is a custom call, of 6 of
    them in each shard.
    """
    folder = CHECKPOINTS / "deepseekv3-modelopt-w4a4"
    figures = {}
    one = nvfp4.load_model(folder, dtype=jnp.float32)
    ids = jnp.asarray(IDS % one.config.vocab_size)
    for dispatch in ("psum", "all_to_all"):
        eight = nvfp4.load_model(
            folder, dtype=jnp.float32, mesh=make_mesh((4, 2)), dispatch=dispatch
        )
        compiled = call.lower(eight, ids).compile()
        call_line = r"= \(f32\[(\d+),\d+\].* custom-call\(.*/shared_experts/"
        rows = re.findall(call_line, compiled.as_text())
        error = difference(compiled(eight, ids), call(one, ids))
        figures[dispatch] = [error, sorted(set(map(int, rows)))]
    return figures


def sinks():
    """The attention of gpt-oss alone: heads with sinks, and biases that count once."""
    x, positions = tokens(6)[None], jnp.arange(6, dtype=jnp.int32)[None]

    def attend(expert_mesh):
        attention = load_attention(CHECKPOINTS / "gpt_oss-modelopt-w4a16", gpt_oss, expert_mesh)
        return call(attention, x, positions, None)[0]

    return difference(attend(ExpertMesh(make_mesh((2, 2)))), attend(None))


def decode(model, ids):
    """Return the logits of a prefill and one step, and how keys are cut."""
    cache = model.init_cache(ids.shape[0], 12)
    first, cache = call(model, ids[:, :11], cache)
    last, cache = call(model, ids[:, 11:], cache)
    keys = cache.layers[0]["k"]
    return np.concatenate([first, last], axis=1), [keys.shape, str(keys.sharding)]


def bytes_read(folder):
    """Load for one shard of eight alone, as a process with one device does; what did it read?

    Returns:
      Experts whose weights were read, and the bytes of experts read over those in the file.
    """
    seen, count, total = set(), 0, 0
    into = Tensors.read_into

    def recorded(self, name, out, *rest):
        nonlocal count
        if found := re.search(r"experts\.(\d+)\.", name):
            seen.add(int(found.group(1)))
            count += out.nbytes
        return into(self, name, out, *rest)

    def own_part(shape, sharding, part):
        """Read the part of the device 3; zeros for those that other processes would read."""
        own = sharding.devices_indices_map(tuple(shape))[jax.devices()[3]]
        kept = part(own)
        return jax.make_array_from_callback(
            tuple(shape), sharding, lambda index: kept if index == own else np.zeros_like(kept)
        )

    with (
        unittest.mock.patch.object(Tensors, "read_into", recorded),
        unittest.mock.patch.object(jax_nvfp4_moe.parallel.experts, "stack_parts", own_part),
    ):
        nvfp4.load_model(folder, mesh=make_mesh((8, 1)))
    with open_tensors(folder) as tensors:
        names = [name for name in tensors.names() if ".experts." in name]
        total = sum(tensors.info(name).nbytes for name in names)
    return [sorted(seen), count / total]


def elsewhere():
    """Numbers of the devices of all arrays that are loaded where the caller's default is another.

    That default is of the thread that sets it, and experts are read in another one.
    """
    with jax.default_device(jax.devices()[3]):
        loaded = nvfp4.load_model(CHECKPOINTS / "qwen3moe-modelopt-w4a16")
    leaves = jax.tree.leaves(nnx.state(loaded))
    return sorted({device.id for leaf in leaves for device in leaf.devices()})


def qwen():
    return model(CHECKPOINTS / "qwen3moe-modelopt-w4a16", [(2, 4)])


def deepseek():
    return model(CHECKPOINTS / "deepseekv3-modelopt-w4a4", ((4, 2),), scheme="checkpoint")


def mixed():
    """A layer of FP8 experts beside one of NVFP4."""
    return model(CHECKPOINTS / "qwen3_moe-ct-mixed", ((8, 1),))


def example():
    return model(EXAMPLE, ((4, 2),))


CHECKS = {
    check.__name__: check
    for check in (
        synthetic,
        trees,
        exchanged_models,
        shared_experts,
        sinks,
        elsewhere,
        qwen,
        deepseek,
        mixed,
        example,
    )
}

if __name__ == "__main__":
    run_checks(CHECKS)
