"""Write models of random weights for llama.cpp.

It needs the package ``gguf``. Linears and experts are NVFP4. The embedding, the head and the
projections of gated delta nets are bfloat16, and the router is float32. The tensors that ModelOpt's
checkpoints have beside each weight (its global scale) are left out, which spares llama.cpp a
multiplication.
"""

from collections.abc import Callable
from typing import NamedTuple

import gguf
import numpy as np

_BLOCK, _BLOCK_BYTES = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.NVFP4]
_SCALES = _BLOCK // 16  # a block begins with its scales, which are E4M3 bytes
_SCALE = 0x08  # 2**-6: sums stay finite
_ATTENTION_INTERVAL = 4  # Qwen3.5 has attention in each fourth layer


def write_model(path, config):
    """Write a GGUF file with random weights and the sizes of a config.

    Tensors of one shape and format have the same values, so that the file is written at the speed
    of the disk. `KINDS` has the architectures.
    """
    (architecture,) = config["architectures"]
    kind = KINDS[architecture]
    h, vocab = config["hidden_size"], config["vocab_size"]
    writer = gguf.GGUFWriter(path, kind.name)
    add_sizes(writer, config)
    if kind.add_sizes:
        kind.add_sizes(writer, config)
    tensors = RandomTensors(writer)
    tensors.bfloat16("token_embd", vocab, h)
    tensors.bfloat16("output", vocab, h)
    tensors.norm("output_norm", h)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"blk.{layer}"
        tensors.norm(f"{prefix}.attn_norm", h)
        tensors.norm(f"{prefix}.{kind.second_norm}", h)
        kind.write_mixer(tensors, prefix, config, layer)
        kind.write_mlp(tensors, prefix, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_attention(tensors, prefix, config, layer):
    """Write the attention of a layer."""
    del layer  # all layers have it
    h, d = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    tensors.nvfp4(f"{prefix}.attn_q", queries, h)
    tensors.nvfp4(f"{prefix}.attn_k", keys, h)
    tensors.nvfp4(f"{prefix}.attn_v", keys, h)
    tensors.nvfp4(f"{prefix}.attn_output", h, queries)


def write_attention_with_head_norms(tensors, prefix, config, layer):
    """Write the attention of a layer of Qwen3-MoE, and the norms of its heads."""
    write_attention(tensors, prefix, config, layer)
    for name in ("attn_q", "attn_k"):
        tensors.norm(f"{prefix}.{name}_norm", config["head_dim"])


def write_mixer_of_qwen35(tensors, prefix, config, layer):
    """Write the gated delta net of a layer of Qwen3.5, or the gated attention of each fourth."""
    if (layer + 1) % _ATTENTION_INTERVAL == 0:
        h, d = config["hidden_size"], config["head_dim"]
        queries, keys = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
        tensors.nvfp4(f"{prefix}.attn_q", 2 * queries, h)  # with the gates of the heads
        tensors.nvfp4(f"{prefix}.attn_k", keys, h)
        tensors.nvfp4(f"{prefix}.attn_v", keys, h)
        tensors.nvfp4(f"{prefix}.attn_output", h, queries)
        for name in ("attn_q", "attn_k"):
            tensors.norm(f"{prefix}.{name}_norm", d)
        return
    h, net = config["hidden_size"], delta_net(config)
    keys, values = net.key_heads * net.width, net.value_heads * net.width
    tensors.bfloat16(f"{prefix}.attn_qkv", 2 * keys + values, h)
    tensors.bfloat16(f"{prefix}.attn_gate", values, h)
    tensors.bfloat16(f"{prefix}.ssm_alpha", net.value_heads, h)
    tensors.bfloat16(f"{prefix}.ssm_beta", net.value_heads, h)
    tensors.bfloat16(f"{prefix}.ssm_out", h, values)
    tensors.float32(f"{prefix}.ssm_conv1d", 2 * keys + values, net.taps)
    tensors.norm(f"{prefix}.ssm_norm", net.width)
    tensors.vector(f"{prefix}.ssm_dt.bias", net.value_heads, 1.0)
    tensors.vector(f"{prefix}.ssm_a", net.value_heads, -1.0)


def write_experts(tensors, prefix, config):
    """Write the router and the experts of a layer."""
    h, i, experts = (
        config[name] for name in ("hidden_size", "moe_intermediate_size", "num_experts")
    )
    tensors.float32(f"{prefix}.ffn_gate_inp", experts, h)
    tensors.nvfp4(f"{prefix}.ffn_gate_exps", experts, i, h)
    tensors.nvfp4(f"{prefix}.ffn_up_exps", experts, i, h)
    tensors.nvfp4(f"{prefix}.ffn_down_exps", experts, h, i)


def write_experts_with_a_shared_one(tensors, prefix, config):
    """Write the experts of a layer of Qwen3.5, and its shared expert with the gate."""
    write_experts(tensors, prefix, config)
    h, i = config["hidden_size"], config["shared_expert_intermediate_size"]
    tensors.vector(f"{prefix}.ffn_gate_inp_shexp.weight", h, 0.02)
    tensors.nvfp4(f"{prefix}.ffn_gate_shexp", i, h)
    tensors.nvfp4(f"{prefix}.ffn_up_shexp", i, h)
    tensors.nvfp4(f"{prefix}.ffn_down_shexp", h, i)


def write_mlp(tensors, prefix, config):
    """Write the MLP of a layer without experts."""
    h, i = config["hidden_size"], config["intermediate_size"]
    tensors.nvfp4(f"{prefix}.ffn_gate", i, h)
    tensors.nvfp4(f"{prefix}.ffn_up", i, h)
    tensors.nvfp4(f"{prefix}.ffn_down", h, i)


class DeltaNet(NamedTuple):
    """The sizes of the gated delta nets of a model."""

    key_heads: int
    value_heads: int
    width: int  # channels of a head
    taps: int  # of the convolution


def delta_net(config):
    """Return the sizes of the gated delta nets, with the defaults of transformers."""
    sizes = DeltaNet(
        config.get("linear_num_key_heads", 16),
        config.get("linear_num_value_heads", 32),
        config.get("linear_key_head_dim", 128),
        config.get("linear_conv_kernel_dim", 4),
    )
    if config.get("linear_value_head_dim", 128) != sizes.width:
        raise SystemExit("llama.cpp needs keys and values of one width in gated delta nets")
    return sizes


def add_sizes_of_qwen35(writer, config):
    """Write what a model of Qwen3.5 must know beside the common sizes."""
    net = delta_net(config)
    rotated = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    writer.add_rope_dimension_count(rotated)
    # Pairs of channels that rotate by the position in time, in height and in width. Of text, all
    # three are equal, and so is the result for any division.
    third = rotated // 2 // 3
    writer.add_rope_dimension_sections([rotated // 2 - 2 * third, third, third, 0])
    writer.add_full_attention_interval(_ATTENTION_INTERVAL)
    writer.add_ssm_conv_kernel(net.taps)
    writer.add_ssm_inner_size(net.value_heads * net.width)
    writer.add_ssm_state_size(net.width)
    writer.add_ssm_time_step_rank(net.value_heads)
    writer.add_ssm_group_count(net.key_heads)
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


class Kind(NamedTuple):
    """How llama.cpp stores the models of an architecture."""

    name: str
    second_norm: str  # the norm before the MLP
    write_mixer: Callable
    write_mlp: Callable
    add_sizes: Callable | None = None  # what `add_sizes` of all models does not write


# The architecture -> how llama.cpp stores it.
KINDS = {
    "Qwen3MoeForCausalLM": Kind(
        "qwen3moe", "ffn_norm", write_attention_with_head_norms, write_experts
    ),
    "LlamaForCausalLM": Kind("llama", "ffn_norm", write_attention, write_mlp),
    "Qwen3_5ForCausalLM": Kind(
        *("qwen35", "post_attention_norm", write_mixer_of_qwen35, write_mlp, add_sizes_of_qwen35)
    ),
    "Qwen3_5MoeForCausalLM": Kind(
        *("qwen35moe", "post_attention_norm", write_mixer_of_qwen35),
        *(write_experts_with_a_shared_one, add_sizes_of_qwen35),
    ),
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
    rope = config.get("rope_parameters", config)
    if "partial_rotary_factor" not in rope:
        writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(rope["rope_theta"])
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
        self.vector(f"{name}.weight", width, 1.0)

    def vector(self, name, width, value):
        self._writer.add_tensor(name, np.full(width, value, np.float32))

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
