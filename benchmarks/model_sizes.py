"""Compute how much memory models of true sizes take. Nothing is measured, and no array is made.

    python benchmarks/model_sizes.py [--model qwen3-30b-a3b ...] [--output FILE]

The models are those of `whole_model.py` and some that no GPU here holds, built as abstract arrays.
Experts are NVFP4. The other linear layers are NVFP4, or bfloat16 as in checkpoints that quantize
only the experts. Embedding, head, norms, routers and delta nets are bfloat16 or float32, as
ModelOpt's default configuration leaves them. Vision parts and drafting layers are not counted.

Writes ``benchmarks/results/model_sizes.json``, from which ``docs/memory_tables.py`` makes tables.
"""

import argparse
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from moe_cases import CASES
from whole_model import (
    MODELS,
    RandomWeights,
    WholeModel,
    cache_bytes,
    count_bytes,
    expert_modules,
)

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.models.loading import find_architecture
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.settings import Settings

HERE = pathlib.Path(__file__).resolve().parent
_TOKENS = 1000  # the cache is counted for so many tokens

_DEEPSEEK = MODELS["deepseek-v3-4-layers"]
_MIXTRAL = CASES["mixtral-8x7b"]
_MIXTRAL_CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": _MIXTRAL.hidden,
    "intermediate_size": _MIXTRAL.intermediate,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": _MIXTRAL.experts,
    "num_experts_per_tok": _MIXTRAL.top_k,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
}
# All layers of DeepSeek-V3; the first three have a dense MLP.
_DEEPSEEK_CONFIG = {**_DEEPSEEK.config, "num_hidden_layers": 61, "first_k_dense_replace": 3}
SIZED = {
    name: model
    for name, model in MODELS.items()
    if not name.startswith("tiny") and name != _DEEPSEEK.name
} | {
    "mixtral-8x7b": WholeModel("mixtral-8x7b", _MIXTRAL, _MIXTRAL_CONFIG, (1, 1), 32, 256),
    "deepseek-v3": WholeModel(
        "deepseek-v3", _DEEPSEEK.case, _DEEPSEEK_CONFIG, (1, 1), 128, 320, (58, 61)
    ),
}


def build_abstract(whole: WholeModel, linear_format: str) -> Any:
    """Return the model with abstract arrays instead of weights."""
    row = find_architecture(whole.config)
    config = row.read_config(whole.config)
    weights = RandomWeights(whole.case, linear_format)
    make = Builder(weights, row.keys, Settings(nvfp4.Target.current()))
    return nnx.eval_shape(lambda: row.build_model(config, make))


def _expert_layers(model) -> list[Any]:
    """Return the weights of the experts of each layer."""
    return [module.params for module in expert_modules(model)]


def _count(tree) -> int:
    """Return the number of elements of all arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _vocabulary_bytes(model) -> int:
    """Return the bytes of the embedding and of the head."""
    head = 0 if model.head is None else count_bytes(nnx.state(model.head))
    return count_bytes(model.embedding.get_value()) + head


def sizes(whole: WholeModel) -> dict[str, Any]:
    """Return the parameters of a model, and the bytes of its weights and of its cache."""
    formats = {name: build_abstract(whole, name) for name in ("nvfp4", "bfloat16")}
    layers = _expert_layers(formats["bfloat16"])
    experts = count_bytes(layers)
    # In bfloat16, each weight beside the experts is one element.
    beside = _count(nnx.state(formats["bfloat16"])) - _count(layers)
    inside = 0
    if whole.case is not None:
        inside = len(layers) * whole.case.experts * whole.case.expert_weights
    cache, states = cache_bytes(formats["nvfp4"], 1, _TOKENS)
    return {
        "model": whole.name,
        "parameters": beside + inside,
        "experts_bytes": experts,
        "vocabulary_bytes": _vocabulary_bytes(formats["nvfp4"]),
        "weights_bytes": {name: count_bytes(nnx.state(model)) for name, model in formats.items()},
        "cache_tokens": _TOKENS,
        "cache_bytes": cache,
        "states_bytes": states,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=SIZED, default=list(SIZED))
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    rows = [sizes(SIZED[name]) for name in arguments.model]
    path = arguments.output or HERE / "results" / "model_sizes.json"
    result: Mapping[str, Any] = {"kind": "computed", "command": "python benchmarks/model_sizes.py"}
    path.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} models: {path}")


if __name__ == "__main__":
    main()
