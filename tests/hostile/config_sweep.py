"""Set every field of every test configuration to odd values, one at a time.

``python tests/hostile/config_sweep.py [--sample N] [--workers N]`` inspects the folder of each
changed configuration, traces its model on three tokens and loads its tokenizer, if it has one. The
fields are those of ``config.json``, nested ones too, and those that other configurations have.
"""

import contextlib
import copy
import functools
import json
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import hostile
from support.files.given import CHECKPOINTS, EXAMPLE
from support.files.published_step import NOT_PUBLISHED, PUBLISHED

ABSENT = "(absent)"
HUGE = 10**400
# A name -> a value, or a function of the field's value.
VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "false": False,
    "empty text": "",
    "text": "x",
    "digit as text": "1",
    "surrogate": "\ud800\x1b[2J",
    "empty list": [],
    "empty object": {},
    "list of null": [None],
    "list of lists": [[1], [[2]]],
    "list of texts": ["x", "y"],
    "list of huge": [HUGE, -1, 2_000_000_000],
    "long list": [0] * 100_000,
    "object": {"x": {"y": [1]}},
    "0": 0,
    "1": 1,
    "-1": -1,
    "3": 3,
    "1.5": 1.5,
    "1e-308": 1e-308,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "1e308": 1e308,
    "-1e308": -1e308,
    "2**31 - 1": 2**31 - 1,
    "2**31": 2**31,
    "2e9": 2_000_000_000,
    "2e8": 200_000_000,
    "1e6": 1_000_000,
    "20000": 20_000,
    "10**400": HUGE,
    "twice": lambda value: value * 2 if _is_number(value) or isinstance(value, (list, str)) else 2,
    "one more": lambda value: value + 1 if _is_number(value) else [value],
    "shorter": lambda value: value[:-1] if isinstance(value, (list, str)) else -5,
    "of huge": lambda value: [HUGE] * len(value) if isinstance(value, list) else [value] * 3,
    "of 1e308": lambda value: [1e308] * len(value) if isinstance(value, list) else {"1": value},
    "(removed)": None,
}
# Values of fields that a configuration does not have. Most of them are fields of other families.
OF_ABSENT = ("true", "text", "empty list", "list of null", "object", "0", "-1", "1e308", "2e9",
             "1e6", "10**400", "list of huge")  # fmt: skip
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "truncate": True,
    "attention_factor": 1.25,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Configurations that no folder has: a name -> the folder, fields to remove, and fields to set. They
# have other forms of the same fields, as published files do, or names of architectures.
OTHERS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "qwen3, yarn": ("qwen3moe-modelopt-w4a16", ("rope_theta",), {"rope_parameters": _YARN}),
    "qwen3, linear": (
        "qwen3moe-modelopt-w4a16",
        ("rope_parameters",),
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "llama4, llama3": ("llama4_text-modelopt-w4a16", (), {"rope_parameters": _LLAMA3}),
    "hunyuan, dynamic": (
        "hunyuan_v1_moe-modelopt-w4a16",
        ("rope_parameters",),
        {
            "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
            "moe_topk": [2, 2],
            "moe_intermediate_size": [48, 48],
        },
    ),
    "kimi_linear, published": (
        "kimi_linear-modelopt-w4a16",
        ("layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"),
        {
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1],
                "head_dim": 16,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            }
        },
    ),
    "minimax_m3, published": (
        "minimax_m3-modelopt-w4a16",
        (
            "layer_types",
            "mlp_layer_types",
            "index_n_heads",
            "index_head_dim",
            "index_block_size",
            "index_topk_blocks",
            "index_local_blocks",
        ),
        {
            "sparse_attention_config": {
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 32,
                "sparse_block_size": 3,
                "sparse_topk_blocks": 3,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 1],
            },
            "moe_layer_freq": [0, 1],
            "hidden_act": "swigluoai",
        },
    ),
    "deepseek_v4, published": (
        "deepseek_v4-modelopt-w4a16",
        (
            "layer_types",
            "compress_rates",
            "mlp_layer_types",
            "partial_rotary_factor",
            "rope_parameters",
        ),
        {
            "compress_ratios": [0, 4, 128, 0],
            "compress_rate_csa": 2,
            "compress_rate_hca": 5,
            "num_hash_layers": 1,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        },
    ),
    "gemma4, published": (
        "gemma4-modelopt-w4a16",
        ("per_layer_config",),
        {"global_head_dim": 32, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0},
    ),
    "step3p7, published": (
        "step3p7-modelopt-w4a16",
        tuple(NOT_PUBLISHED),
        PUBLISHED | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "glm_moe_dsa, pattern": (
        "glm_moe_dsa-modelopt-w4a16",
        ("indexer_types",),
        {"index_topk_pattern": "FFS", "index_topk_freq": 2, "index_skip_topk_offset": 2},
    ),
    **{
        f"architecture {name}": (folder, (), {"architectures": [name]})
        for name, folder in {
            "Mistral3ForConditionalGeneration": "mistral4-modelopt-w4a16",
            "KimiK25ForConditionalGeneration": "kimi_k2-modelopt-w4a16",
            "NemotronH_Nano_Omni_Reasoning_V3": "nemotron_h-modelopt-w4a16",
            "MiniMaxM3SparseForConditionalGeneration": "minimax_m3-modelopt-w4a16",
            "Gemma4ForCausalLM": "gemma4-modelopt-w4a16",
            "Qwen3_5MoeForCausalLM": "qwen3_5_moe-modelopt-w4a16",
        }.items()
    },
}


def _is_number(value) -> bool:
    return type(value) in (int, float)


@functools.cache
def bases() -> dict[str, pathlib.Path]:
    """Return the name of each configuration -> its folder."""
    folders = {path.parent.name: path.parent for path in sorted(CHECKPOINTS.glob("*/config.json"))}
    others = {name: CHECKPOINTS / folder for name, (folder, _, _) in OTHERS.items()}
    return {EXAMPLE.name: EXAMPLE, **folders, **others}


@functools.cache
def config_of(base: str) -> dict[str, Any]:
    """Return a configuration as it is before the change."""
    config = json.loads((bases()[base] / "config.json").read_text(encoding="utf-8"))
    if base not in OTHERS:
        return config
    _, removed, added = OTHERS[base]
    inner = config.pop("text_config", {})
    text = {name: value for name, value in (config | inner).items() if name not in removed} | added
    if "ConditionalGeneration" not in text["architectures"][0]:
        return text
    outer = {name: text[name] for name in ("architectures", "quantization_config") if name in text}
    return {**outer, "text_config": text}


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each field: keys of objects, and the first and last index of lists."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from fields(value[key], (*path, key))
    elif isinstance(value, list) and value:
        for index in sorted({0, len(value) - 1}):
            yield from fields(value[index], (*path, index))


def _text(config) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return where the fields of the language model are, and those fields."""
    inner = config.get("text_config")
    return (("text_config",), inner) if isinstance(inner, dict) else ((), config)


@functools.cache
def known_names() -> tuple[str, ...]:
    """Return the fields of the language models of all configurations."""
    published = json.loads((CHECKPOINTS / "published_configurations.json").read_text())
    found = dict.fromkeys(name for base in bases() for name in _text(config_of(base))[1])
    return tuple(found | dict.fromkeys(name for one in published.values() for name in one))


def list_cases() -> Sequence[str]:
    """Return ``BASE FIELD VALUE`` for all changes."""
    made = []
    for base in bases():
        config = config_of(base)
        for path in fields(config):
            made += [json.dumps([base, path, value]) for value in VALUES]
        place, text = _text(config)
        absent = [name for name in known_names() if name not in text]
        made += [json.dumps([base, (*place, name), v]) for name in absent for v in OF_ABSENT]
    return made


def change(config: Any, path: Sequence[Any], name: str) -> Any:
    """Return a copy of a configuration with one field changed."""
    config = copy.deepcopy(config)
    *parents, last = path
    holder = functools.reduce(lambda one, key: one[key], parents, config)
    if name == "(removed)":
        del holder[last]
        return config
    value = VALUES[name]
    old = holder.get(last) if isinstance(holder, dict) else holder[last]
    holder[last] = value(old) if callable(value) else value
    return config


@functools.cache
def _root() -> tempfile.TemporaryDirectory:
    """Return a folder of this process. It is deleted when the process ends."""
    memory = pathlib.Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)


@functools.cache
def copied(base: str) -> pathlib.Path:
    """Return a copy of a configuration's folder that this process may change."""
    folder = pathlib.Path(_root().name) / base
    folder.mkdir()
    for path in bases()[base].iterdir():
        if not path.name.startswith("reference"):
            shutil.copy(path, folder)
    return folder


@contextlib.contextmanager
def open_case(case: str) -> Iterator[list[hostile.Step]]:
    """Write the changed configuration, and yield what a user runs on its folder."""
    base, path, value = json.loads(case)
    folder = copied(base)
    text = json.dumps(change(config_of(base), path, value))
    (folder / "config.json").write_text(text, encoding="utf-8")
    steps = [
        ("inspect", hostile.command("inspect", str(folder))),
        ("trace", hostile.as_command(lambda: trace(folder, sizes_of(base)))),
    ]
    if (folder / "tokenizer.json").exists():
        steps.append(("tokenizer", hostile.as_command(lambda: load_tokenizer(folder))))
    yield steps


@functools.cache
def sizes_of(base: str) -> Any:
    """Return the sizes of a configuration's model before the change."""
    from jax_nvfp4_moe.checkpoint.folder import merge_text_config
    from jax_nvfp4_moe.models.loading import find_architecture

    config = merge_text_config(config_of(base))
    return find_architecture(config).read_config(config)


def trace(folder: pathlib.Path, known: Any = None) -> None:
    """Trace the model of a folder on three tokens and one more, without compiling anything.

    Args:
      folder: the folder.
      known: sizes of a model that need no trace, because nothing has changed.
    """
    import jax
    from flax import nnx

    from jax_nvfp4_moe.models.loading import abstract_model

    def run(model, ids):
        _, cache = model(ids, model.init_cache(1, 8))
        return model(ids[:, :1], cache)

    model = abstract_model(folder).model
    if model.config != known:
        nnx.eval_shape(run, model, jax.ShapeDtypeStruct((1, 3), "int32"))


def load_tokenizer(folder: pathlib.Path) -> None:
    """Load the tokenizer of a folder, and use it."""
    import jax_nvfp4_moe as nvfp4

    tokenizer = nvfp4.load_tokenizer(folder)
    tokenizer.decode(tokenizer.encode("def f(x): return x"))


if __name__ == "__main__":
    hostile.run_program(__file__, list_cases, open_case)
