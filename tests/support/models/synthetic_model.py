"""The sizes of a small random model that meshes of up to eight devices divide."""

from jax_nvfp4_moe.checkpoint.writing.synthetic import SyntheticSizes, write_synthetic

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


def write_model(folder):
    """Write the model with NVFP4 experts, and return the folder."""
    write_synthetic(folder, SIZES, algorithm="W4A16_NVFP4")
    return folder
