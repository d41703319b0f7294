"""Write models of random weights for llama.cpp.

It needs the package ``gguf``. Linears and experts are NVFP4, the embedding and the head are
bfloat16, and the router is float32. The tensors that ModelOpt's checkpoints have beside each weight
(its global scale) are left out, which spares llama.cpp a multiplication.
"""

import gguf
import numpy as np

_BLOCK, _BLOCK_BYTES = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.NVFP4]
_SCALES = _BLOCK // 16  # a block begins with its scales, which are E4M3 bytes
_SCALE = 0x08  # 2**-6: sums stay finite


def write_model(path, config):
    """Write a GGUF file with random weights and the sizes of a config of Qwen3-MoE or of Llama.

    Tensors of one shape and format have the same values, so that the file is written at the speed
    of the disk.
    """
    (kind,) = config["architectures"]
    name, write_layer = LAYERS[kind]
    h, vocab = config["hidden_size"], config["vocab_size"]
    writer = gguf.GGUFWriter(path, name)
    add_sizes(writer, config)
    tensors = RandomTensors(writer)
    tensors.bfloat16("token_embd", vocab, h)
    tensors.bfloat16("output", vocab, h)
    tensors.norm("output_norm", h)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"blk.{layer}"
        write_attention(tensors, prefix, config)
        write_layer(tensors, prefix, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_attention(tensors, prefix, config):
    """Write the attention of a layer, and the norms before it and before the MLP."""
    h, d = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    for name in ("attn", "ffn"):
        tensors.norm(f"{prefix}.{name}_norm", h)
    tensors.nvfp4(f"{prefix}.attn_q", queries, h)
    tensors.nvfp4(f"{prefix}.attn_k", keys, h)
    tensors.nvfp4(f"{prefix}.attn_v", keys, h)
    tensors.nvfp4(f"{prefix}.attn_output", h, queries)


def write_experts(tensors, prefix, config):
    """Write the experts of a layer of Qwen3-MoE, and the norms of its heads."""
    h, i, experts = (
        config[name] for name in ("hidden_size", "moe_intermediate_size", "num_experts")
    )
    for name in ("attn_q", "attn_k"):
        tensors.norm(f"{prefix}.{name}_norm", config["head_dim"])
    tensors.float32(f"{prefix}.ffn_gate_inp", experts, h)
    tensors.nvfp4(f"{prefix}.ffn_gate_exps", experts, i, h)
    tensors.nvfp4(f"{prefix}.ffn_up_exps", experts, i, h)
    tensors.nvfp4(f"{prefix}.ffn_down_exps", experts, h, i)


def write_mlp(tensors, prefix, config):
    """Write the MLP of a layer of Llama."""
    h, i = config["hidden_size"], config["intermediate_size"]
    tensors.nvfp4(f"{prefix}.ffn_gate", i, h)
    tensors.nvfp4(f"{prefix}.ffn_up", i, h)
    tensors.nvfp4(f"{prefix}.ffn_down", h, i)


# The architecture -> its name in llama.cpp, and what writes a layer beside its attention.
LAYERS = {
    "Qwen3MoeForCausalLM": ("qwen3moe", write_experts),
    "LlamaForCausalLM": ("llama", write_mlp),
}


def add_sizes(writer, config):
    """Write what the model must know beside its tensors."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if "num_experts" in config:
        writer.add_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    else:
        writer.add_feed_forward_length(config["intermediate_size"])


class RandomTensors:
    """Adds tensors to a file, and draws the values of each shape and format once."""

    def __init__(self, writer):
        self._writer = writer
        self._rng = np.random.default_rng(0)
        self._drawn = {}

    def nvfp4(self, name, *shape):
        self._add(name, self._draw_nvfp4, shape, gguf.GGMLQuantizationType.NVFP4)

    def bfloat16(self, name, *shape):
        self._add(name, self._draw_bfloat16, shape, gguf.GGMLQuantizationType.BF16)

    def float32(self, name, *shape):
        self._add(name, self._draw_float32, shape)

    def norm(self, name, width):
        self._writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))

    def _add(self, name, draw, shape, raw_dtype=None):
        if (raw_dtype, shape) not in self._drawn:
            self._drawn[raw_dtype, shape] = draw(shape)
        values = self._drawn[raw_dtype, shape]
        self._writer.add_tensor(f"{name}.weight", values, raw_dtype=raw_dtype)

    def _draw_nvfp4(self, shape):
        rows, width = shape[:-1], shape[-1]
        if width % _BLOCK:
            raise SystemExit(f"llama.cpp's NVFP4 needs multiples of {_BLOCK} channels, not {width}")
        blocks = self._rng.integers(0, 256, (*rows, width // _BLOCK, _BLOCK_BYTES), np.uint8)
        blocks[..., :_SCALES] = _SCALE
        return blocks.reshape(*rows, -1)

    def _draw_bfloat16(self, shape):
        bits = self._rng.integers(0, 1 << 16, shape, np.uint16)
        bits &= 0x80FF  # random sign, last bit of the exponent, and mantissa
        bits |= 0x3C00  # from 2**-7 to 2**-5
        return bits.view(np.uint8)

    def _draw_float32(self, shape):
        return 0.02 * self._rng.standard_normal(shape, np.float32)
