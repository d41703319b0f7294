"""Write checkpoints of any size with random weights, to measure loading and to test it."""

import dataclasses
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from jax_nvfp4_moe.checkpoint.export import LazyTensor, write_checkpoint
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK

# The E4M3 bytes of 1 and 256. The block scales of real checkpoints lie in about this range.
_LOWEST_SCALE, _HIGHEST_SCALE = 0x38, 0x78
_GLOBAL_SCALE = 2.0**-14  # weights up to 6 * 256 * 2^-14, about 0.1
_INPUT_SCALE = 2.0**-9  # activations up to 2688 * 2^-9, about 5


@dataclasses.dataclass(frozen=True)
class SyntheticSizes:
    """The sizes of a Qwen3-MoE model; each is one number of its ``config.json``."""

    layers: int
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int

    def config(self) -> dict[str, Any]:
        """Return the contents of ``config.json``."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 4096,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "moe_intermediate_size": self.intermediate,
            "norm_topk_prob": True,
            "num_attention_heads": self.heads,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab,
        }


def write_synthetic(
    folder: str | pathlib.Path,
    sizes: SyntheticSizes,
    *,
    algorithm: str = "NVFP4",
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a Qwen3-MoE checkpoint in ModelOpt's format, with random weights from fixed seeds.

    Args:
      folder: the folder to write. It is created if it is missing.
      sizes: the sizes of the model.
      algorithm: a key of `modelopt.ALGORITHMS`.
      shard_bytes: the most bytes in one file.
    """
    dense = ["lm_head", "model.embed_tokens"]
    dense += [f"model.layers.{layer}.mlp.gate" for layer in range(sizes.layers)]
    tensors: dict[str, LazyTensor] = {}
    for name, shape in _dense(sizes):
        tensors[name] = _lazy(name, shape, ml_dtypes.bfloat16, _normal)
    for module, n, k in _linears(sizes):
        tensors[f"{module}.weight"] = _lazy(f"{module}.weight", (n, k // 2), np.uint8, _codes)
        name = f"{module}.weight_scale"
        tensors[name] = _lazy(name, (n, k // BLOCK), ml_dtypes.float8_e4m3fn, _scales)
        tensors[f"{module}.weight_scale_2"] = _scalar(_GLOBAL_SCALE)
        if algorithm == "NVFP4":
            tensors[f"{module}.input_scale"] = _scalar(_INPUT_SCALE)
    write_checkpoint(
        folder,
        dict(sorted(tensors.items())),
        sizes.config(),
        algorithm=algorithm,
        exclude=tuple(dense),
        shard_bytes=shard_bytes,
    )


def _dense(sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of each tensor that is not quantized."""
    h = sizes.hidden
    yield "model.embed_tokens.weight", (sizes.vocab, h)
    yield "lm_head.weight", (sizes.vocab, h)
    yield "model.norm.weight", (h,)
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (h,)
        yield f"{prefix}.post_attention_layernorm.weight", (h,)
        yield f"{prefix}.self_attn.q_norm.weight", (sizes.head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (sizes.head_dim,)
        yield f"{prefix}.mlp.gate.weight", (sizes.num_experts, h)


def _linears(sizes) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the outputs and the inputs of each linear that is quantized."""
    h, i = sizes.hidden, sizes.intermediate
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj", queries, h
        yield f"{prefix}.self_attn.k_proj", keys, h
        yield f"{prefix}.self_attn.v_proj", keys, h
        yield f"{prefix}.self_attn.o_proj", h, queries
        for expert in range(sizes.num_experts):
            for name, n, k in (("gate_proj", i, h), ("up_proj", i, h), ("down_proj", h, i)):
                yield f"{prefix}.mlp.experts.{expert}.{name}", n, k


def _lazy(name, shape, dtype, draw) -> LazyTensor:
    seed = zlib.crc32(name.encode())  # weights depend on the name, not on the order of writing
    return LazyTensor(shape, np.dtype(dtype), lambda: draw(np.random.default_rng(seed), shape))


def _scalar(value) -> LazyTensor:
    return LazyTensor((), np.dtype(np.float32), lambda: np.array(value, np.float32))


def _normal(rng, shape):
    return (0.02 * rng.standard_normal(shape, np.float32)).astype(ml_dtypes.bfloat16)


def _codes(rng, shape):
    return rng.integers(0, 256, shape, np.uint8)


def _scales(rng, shape):
    raw = rng.integers(_LOWEST_SCALE, _HIGHEST_SCALE + 1, shape, np.uint8)
    return raw.view(ml_dtypes.float8_e4m3fn)
