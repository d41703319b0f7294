"""Make whole models of real sizes with random weights, and say what a step must read and compute.

The sizes are those of the published ``config.json`` files. Experts are random NVFP4 bytes. The
other linear layers are NVFP4, FP8 or bfloat16. Embedding, head, norms, routers and delta nets are
bfloat16 or float32, as ModelOpt's default configuration leaves them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from layer import random_params
from moe_cases import CASES, Case, Ceilings, floor_us

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.checkpoint import LinearWeights, Source
from jax_nvfp4_moe.checkpoint.key_mapping import KeyMapping
from jax_nvfp4_moe.checkpoint.values import CacheScales
from jax_nvfp4_moe.models.drafting_layers import build_drafter
from jax_nvfp4_moe.models.loading import find_architecture
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.filling import fill
from jax_nvfp4_moe.nn.building.projection_names import name_projections
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.parallel.expert_mesh import find_expert_mesh
from jax_nvfp4_moe.parallel.partition_specs import note_shardings
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Scheme

FORMATS = ("nvfp4", "fp8", "bfloat16")  # formats of linear layers beside the experts
_SCHEMES: Mapping[str, CheckpointScheme] = {
    "nvfp4": Scheme.W4A16,
    "fp8": FP8ActivationScaling.WEIGHTS,
    "bfloat16": None,
}
# Modules that no format changes, by parts of their names in the file.
_UNQUANTIZED = ("lm_head", "linear_attn", "shared_expert_gate")
_LONGEST = 1 << 18  # positions that each model accepts


@dataclasses.dataclass(frozen=True)
class WholeModel:
    """A model by its sizes.

    Attributes:
      name: name on the command line.
      case: sizes of one expert layer, or None for a dense model.
      config: contents of ``config.json``.
      attention_layers: number of layers with a softmax attention, out of how many layers; the
        layers between have another mixer.
      expert_layers: number of layers with experts, out of how many layers.
      heads: number of query heads.
      head_channels: channels of a query head plus those of a value head.
    """

    name: str
    case: Case | None
    config: Mapping[str, Any]
    attention_layers: tuple[int, int]
    heads: int
    head_channels: int
    expert_layers: tuple[int, int] = (1, 1)

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]

    @property
    def layers_of_experts(self) -> float:
        """Return the number of layers with experts. It is exact for a model that is not cut."""
        some, out_of = self.expert_layers
        return self.layers * some / out_of

    def cut(self, layers: int | None) -> "WholeModel":
        """Return the model with another number of layers. None keeps the number.

        A model whose config lists its layers, such as nemotron3-nano, can only get fewer.
        """
        if layers is None:
            return self
        config = {**self.config, "num_hidden_layers": layers}
        if "hybrid_override_pattern" in config:
            config["hybrid_override_pattern"] = config["hybrid_override_pattern"][:layers]
        return dataclasses.replace(self, config=config)

    def attention_flops(self, tokens: int) -> float:
        """Return the FLOPs of the causal attention of a prompt, in all layers."""
        some, out_of = self.attention_layers
        return self.layers * some / out_of * self.heads * self.head_channels * tokens**2


def _qwen3(name, case, **sizes):
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": case.hidden,
        "moe_intermediate_size": case.intermediate,
        "num_experts": case.experts,
        "num_experts_per_tok": case.top_k,
        "norm_topk_prob": True,
        "max_position_embeddings": _LONGEST,
        "rope_theta": 1e6,
        **sizes,
    }
    heads, width = sizes["num_attention_heads"], sizes["head_dim"]
    return WholeModel(name, case, config, (1, 1), heads, 2 * width)


def _qwen36(name, case):
    config = {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "vocab_size": 248320,
        "hidden_size": case.hidden,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "moe_intermediate_size": case.intermediate,
        "shared_expert_intermediate_size": 512,
        "num_experts": case.experts,
        "num_experts_per_tok": case.top_k,
        "max_position_embeddings": _LONGEST,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
    }
    return WholeModel(name, case, config, (1, 4), 16, 512)


def _qwen36_27b():
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "max_position_embeddings": _LONGEST,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
    }
    return WholeModel("qwen3.6-27b", None, config, (1, 4), 24, 512)


def _llama(name, **sizes):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": _LONGEST,
        "rope_theta": 5e5,
        **sizes,
    }
    return WholeModel(name, None, config, (1, 1), sizes["num_attention_heads"], 256)


def _deepseek(name, case):
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129280,
        "hidden_size": case.hidden,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 0,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": case.intermediate,
        "n_routed_experts": case.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": case.top_k,
        "max_position_embeddings": _LONGEST,
        "rope_theta": 1e4,
    }
    return WholeModel(name, case, config, (1, 1), 128, 192 + 128)


def _nemotron3(name, case):
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "vocab_size": 131072,
        "hidden_size": case.hidden,
        "num_hidden_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "moe_intermediate_size": case.intermediate,
        "moe_shared_expert_intermediate_size": 3712,
        "n_routed_experts": case.experts,
        "num_experts_per_tok": case.top_k,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": _LONGEST,
    }
    attention, experts = ((pattern.count(kind), len(pattern)) for kind in "*E")
    return WholeModel(name, case, config, attention, 32, 256, experts)


def _kimi_linear(name, case):
    attention = [4, 8, 12, 16, 20, 24, 27]  # the first layer is 1
    config = {
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": 163840,
        "hidden_size": case.hidden,
        "num_hidden_layers": 27,
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "full_attn_layers": attention,
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 9216,
        "moe_intermediate_size": case.intermediate,
        "num_experts": case.experts,
        "num_experts_per_token": case.top_k,
        "num_shared_experts": 1,
        "model_max_length": _LONGEST,
    }
    return WholeModel(name, case, config, (len(attention), 27), 32, 192 + 128, (26, 27))


_REAL_QWEN3 = {
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
_TINY_QWEN3 = {
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
_LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_TINY_LLAMA = _LLAMA_8B | {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MODELS = {
    model.name: model
    for model in (
        _qwen3("qwen3-30b-a3b", CASES["qwen3-30b-a3b"], **_REAL_QWEN3),
        _qwen36("qwen3.6-35b-a3b", CASES["qwen3.6-35b-a3b"]),
        _nemotron3("nemotron3-nano", CASES["nemotron3-nano"]),
        _kimi_linear("kimi-linear-48b-a3b", Case("kimi-linear-48b-a3b", 2304, 1024, 256, 8)),
        _deepseek("deepseek-v3-4-layers", CASES["deepseek-v3"]),
        _qwen36_27b(),
        _llama("llama-3.1-8b", **_LLAMA_8B),
        _llama("tiny-dense", **_TINY_LLAMA),  # to try the benchmarks themselves, as the next
        _qwen3("tiny", CASES["tiny"], **_TINY_QWEN3),  # to try the benchmarks themselves
    )
}


class RandomWeights:
    """A `WeightTable` of a model of random values, which are made on the device.

    Each value is made whole, also for a mesh, and the filling then shards it. The seed of a value
    is its number in the order of the model's parts. Values are therefore equal on all meshes.

    Attributes:
      linear_weights: number of weights of all linear layers beside the experts and the head.
      absent: None, or how names of weights begin that do not exist.
    """

    absent: str | None = None

    def __init__(
        self,
        case: Case | None,
        linear_format: str,
        dtype=jnp.bfloat16,
        fp8_cache: bool = False,
    ):
        """Store the sizes of the experts, the format of the other linear layers, and of the cache.

        A dense model has no `case`. An FP8 cache has scales of 1.
        """
        self._case, self._format, self._dtype = case, linear_format, dtype
        self._fp8_cache = fp8_cache
        self._made = 0
        self.linear_weights = 0

    def has_under(self, prefix):
        """Return whether a weight exists: all do but those of drafting layers behind the first."""
        return self.absent is None or not prefix.startswith(self.absent)

    def checkpoint_scheme(self, prefix) -> CheckpointScheme:
        """Return the scheme of the linear layer `prefix`; None if it is not quantized."""
        if any(part in prefix for part in _UNQUANTIZED):
            return None
        return _SCHEMES[self._format]

    def claim(self, prefix):
        """Do nothing: all drafting layers are made."""

    def array(self, name, shape, *, dtype=None, stored=None, keeps_bfloat16=False):
        shape, dtype = tuple(shape), jnp.dtype(dtype or self._dtype)
        if keeps_bfloat16:  # routers are bfloat16 in the published files
            dtype = jnp.dtype(jnp.bfloat16)
        seed = self._next_seed()

        def make():
            if len(shape) == 1:  # a norm, or a vector of a recurrent mixer
                return jnp.ones(shape, dtype)
            return _normal(jax.random.key(seed), shape, dtype)

        return _source(name, make)

    def linear(self, prefix, n, k, *, bias=False):
        del bias  # these models have no biases
        if "lm_head" not in prefix:
            self.linear_weights += n * k
        if self.checkpoint_scheme(prefix) is None:
            weight = self.array(prefix, (n, k))
            return _source(prefix, lambda: LinearWeights(weight.read(None)))
        make = {"nvfp4": _nvfp4_linear, "fp8": _fp8_linear}[self._format]
        seed = self._next_seed()
        return _source(prefix, lambda: make(jax.random.key(seed), n, k))

    def experts(self, prefix, num_experts, hidden, intermediate, **options):
        assert self._case is not None, prefix
        sizes = (num_experts, hidden, intermediate)
        assert sizes == (self._case.experts, self._case.hidden, self._case.intermediate), sizes
        seed = self._next_seed()
        return _source(prefix, lambda: random_params(self._case, seed=seed), Scheme.W4A16)

    def cache_scales(self, prefix, **heads):
        if not self._fp8_cache:
            return None

        def make():
            scales = {name: jnp.ones(count, jnp.float32) for name, count in heads.items()}
            return CacheScales(scales, multiply_by_reciprocal=False)

        return _source(f"{prefix} cache scales", make)

    def ignore(self, prefix, reason):
        """Do nothing: no weight is left over."""

    def same(self, module, name):
        """Return True: a head that is tied equals the embedding."""
        return True

    def fork(self):
        """Return this table, which is the reader of all parts too."""
        return self

    def raise_problems(self):
        """Do nothing: values that are made here have no faults."""

    def _next_seed(self):
        self._made += 1
        return self._made


def _source(name, make, scheme=None):
    return _Made(name, jax.eval_shape(make), scheme, make)


@dataclasses.dataclass(frozen=True)
class _Made(Source):
    """A source of a value that is made here, in place of one that is read."""

    make: Callable[[], Any] | None = None

    def read(self, reader):
        return self.make()


def _normal(key, shape, dtype):
    values = jax.jit(jax.random.normal, static_argnums=(1, 2))(key, shape, dtype)
    return values * jnp.asarray(shape[1] ** -0.5, dtype)


def _nvfp4_linear(key, n, k):
    codes, scales = jax.random.split(key)
    packed = jax.random.bits(codes, (n, k // 2), jnp.uint8)
    exponents = jax.random.randint(scales, (n, k // 16), 0x30, 0x51).astype(jnp.uint8)
    weight = nvfp4.NVFP4Tensor(
        packed,
        jax.lax.bitcast_convert_type(exponents, jnp.float8_e4m3fn),
        jnp.float32(0.1 / math.sqrt(k)),
    )
    return LinearWeights(weight, checkpoint_scheme=_SCHEMES["nvfp4"])


def _fp8_linear(key, n, k):
    values = jax.random.normal(key, (n, k), jnp.bfloat16).astype(jnp.float8_e4m3fn)
    weight = FP8Tensor(values, jnp.full(n, 1 / math.sqrt(k), jnp.float32))
    return LinearWeights(weight, checkpoint_scheme=_SCHEMES["fp8"])


@dataclasses.dataclass(frozen=True)
class Built:
    """A model, and what it weighs.

    Attributes:
      model: the model.
      read_bytes: bytes of the weights that each step reads whole: not the experts, and not the
        embedding. Over a mesh, they are the bytes of the global arrays.
      linear_weights: number of weights of all linear layers beside the experts and the head.
      settings: the settings of its modules.
    """

    model: Any
    read_bytes: int
    linear_weights: int
    settings: Settings


def build_model(
    whole: WholeModel,
    linear_format: str,
    backend: str | None = None,
    fp8_cache: bool = False,
    drafts: bool = False,
    mesh: Any = None,
) -> Built:
    """Make the model, one layer after the other; `drafts` adds its drafting layers.

    The model is sharded over `mesh`, as by `load_model`. None, the default, makes it on one device.
    Drafting layers have linear layers of the same format, and experts in NVFP4. Published files
    often store both in bfloat16.
    """
    row = find_architecture(whole.config)
    config = row.read_config(whole.config)
    # Without FP4 tensor cores, keys and values are rounded to FP8 only if the scheme says so.
    scheme = "checkpoint" if fp8_cache else None
    expert_mesh = None if mesh is None else find_expert_mesh(mesh).automatic()
    target = nvfp4.Target.current() if expert_mesh is None else expert_mesh.target
    settings = Settings(target, scheme=scheme, backend=backend, expert_mesh=expert_mesh)
    weights = RandomWeights(whole.case, linear_format, fp8_cache=fp8_cache)
    make = Builder(weights, row.keys, settings)
    if drafts:
        last = row.drafting.indices(config)[1]
        weights.absent = row.drafting.names["further.*"].replace("*", f"{last + 1}.")

    def build():
        model = row.build_model(config, make)
        model.drafter = build_drafter(row, config, make) if drafts else None
        return model

    model = nnx.eval_shape(build)
    read = count_bytes(nnx.state(model)) - count_bytes(model.embedding.get_value())
    read -= sum(count_bytes(module.params) for module in expert_modules(model))
    fill(model, "", make.parts, weights, settings)
    if expert_mesh is not None:
        note_shardings(model, expert_mesh)
    jax.block_until_ready(nnx.state(model))
    model.projection_names = name_projections(make.parts, KeyMapping(), row.renamed)
    return Built(model, read, weights.linear_weights, settings)


def expert_modules(model):
    """Yield the modules that hold routed experts."""
    for _, module in nnx.iter_modules(model):
        if isinstance(getattr(module, "params", None), nnx.Variable):
            yield module


def count_bytes(tree) -> int:
    """Return the bytes of all arrays, abstract ones too."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def expected_active(case: Case, tokens: int) -> float:
    """Return the mean number of experts that uniform routing touches."""
    return case.experts * (1 - (1 - case.top_k / case.experts) ** tokens)


def experts_floor(whole: WholeModel, tokens: int, ceilings: Ceilings) -> float:
    """Return the lower bound of the time of all expert layers, in microseconds."""
    if whole.case is None:
        return 0.0
    active = expected_active(whole.case, tokens)
    return whole.layers_of_experts * floor_us(whole.case, tokens, active, ceilings)


def cache_bytes(model, batch: int, length: float) -> tuple[float, float]:
    """Return the bytes of a cache that `length` tokens fill, and those of recurrent states."""
    short, long = (
        count_bytes(jax.eval_shape(lambda room=room: model.init_cache(batch, room)).layers)
        for room in (16, 32)
    )
    each = (long - short) / 16
    return each * length, short - each * 16


def step_floor(whole, built, batch, length, ceilings: Ceilings) -> dict[str, float]:
    """Return the lower bounds of the time of a decoding step, in microseconds, by their causes."""
    experts = experts_floor(whole, batch, ceilings)
    kept, states = cache_bytes(built.model, batch, length)
    bandwidth = ceilings.copy_tb_per_s * 1e6  # bytes per microsecond
    parts = {
        "experts": experts,
        "dense": built.read_bytes / bandwidth,
        "cache": kept / bandwidth,
        "states": 2 * states / bandwidth,  # read once and written once
    }
    return parts | {"sum": sum(parts.values())}


def prefill_floor(whole, built, batch, tokens, ceilings: Ceilings) -> dict[str, float]:
    """Return the lower bounds of the time of a prefill, in microseconds, by their causes.

    Linear layers and attention are bounded by their FLOPs at the rate of a large matmul. The work
    of recurrent states is not counted.
    """
    rows = batch * tokens
    rate = ceilings.matmul_tflop_per_s * 1e6  # FLOPs per microsecond
    parts = {
        "experts": experts_floor(whole, rows, ceilings),
        "linears": 2 * built.linear_weights * rows / rate,
        "attention": batch * whole.attention_flops(tokens) / rate,
    }
    return parts | {"sum": sum(parts.values())}
