"""Write random models, every value exact in bfloat16, as folders that transformers reads."""

import pathlib

import torch
import transformers

from tests.reference.architecture import Architecture

# Factors that start from one, as the weights of most norms do.
FROM_ONE = (".D", "layer_scalar", "router.scale", "per_expert_scale", "hc.scale", "hc_scale")
# Values of order one, because they are added to values of order one.
OF_ORDER_ONE = ("sinks", "dt_bias", "router.proj.weight", "position_bias", "compress_ape")


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest bfloat16, and return float32."""
    return values.to(torch.bfloat16).float()


def random_values(name: str, old: torch.Tensor) -> torch.Tensor:
    """Draw values that make every part of a layer matter: logits and states of order one."""
    noise = torch.randn(old.shape)
    if old.ndim == 0:
        return old  # constants of an activation
    if name.endswith("A_log"):
        return torch.log(1 + 7 * torch.rand(old.shape))
    if "norm" in name or name.endswith(FROM_ONE):
        return old + 0.1 * noise  # some kinds of norms start from one, others from zero
    if "conv1d.weight" in name:
        return 0.5 * noise
    if "embed" in name or name.endswith(OF_ORDER_ONE):
        return noise
    if old.ndim == 1 or "bias" in name:
        return 0.1 * noise
    return noise / old.shape[-1] ** 0.5


def random_experts(config: transformers.PretrainedConfig, tokens: int) -> torch.Tensor:
    """Return different experts [tokens, top_k] for each token id."""
    order = torch.rand(tokens, config.n_routed_experts).argsort(dim=-1)
    return order[:, : config.num_experts_per_tok]


def save_random(architecture: Architecture, seed: int, folder: pathlib.Path) -> None:
    """Write a model of `architecture` in float32, with its values rounded to bfloat16."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(architecture.model_type, **architecture.fields)
    make = getattr(transformers, architecture.model)
    model = make.from_config(config) if hasattr(make, "from_config") else make(config)
    computed = {name for name, _ in model.named_buffers() if "inv_freq" in name}
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and name not in computed:
                tensor.copy_(rounded(random_values(name, tensor.float())))
            elif name.endswith("tid2eid"):
                tensor.copy_(random_experts(config, len(tensor)))
    model.save_pretrained(folder)


def load(
    architecture: Architecture, folder: pathlib.Path, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """Load the model of a folder, with transformers' plain loops for experts and attention.

    Raises:
        ValueError: a tensor of the folder has no place in the model, or the reverse.
    """
    make = getattr(transformers, architecture.model)
    model, report = make.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    wrong = {key: sorted(value) for key, value in report.items() if value}
    if wrong:
        raise ValueError(f"{folder}: expected every tensor to have its place, got {wrong}.")
    return model.eval()


def calibration_batches(vocabulary: int, seed: int) -> list[torch.Tensor]:
    """Return 8 prompts of 64 random tokens, on which the tools calibrate."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (1, 64), generator=generator) for _ in range(8)]


def prompt(architecture: Architecture, vocabulary: int, seed: int) -> torch.Tensor:
    """Return random token ids [b, t]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, architecture.prompt, generator=generator)
