"""Key tables that architectures share.

They map the parts of a model to the names of their tensors in a file; see `nn.building.keys`.
"""

from jax_nvfp4_moe.nn.building.keys import KeyTable, below

# The names that the parts of most models have in the file.
DECODER_KEYS: KeyTable = {
    "embedding": "model.embed_tokens.weight",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "norm": "model.norm",
    "head": "lm_head",
}


def gqa_keys(path: str, name: str | tuple[str, ...]) -> KeyTable:
    """Return the key table of a grouped-query attention.

    Args:
      path: the path of the attention in the model.
      name: its name in the file. If there are several, the first that the file has is used.
    """
    parts = {
        "kv": "",
        "qkv.q": "q_proj",
        "qkv.k": "k_proj",
        "qkv.v": "v_proj",
        "out": "o_proj",
        "q_norm": "q_norm",
        "k_norm": "k_norm",
        "sinks": "sinks",
    }
    return below(path, name, parts)


def gated_mlp_keys(path: str, name: str | tuple[str, ...]) -> KeyTable:
    """Return the key table of a `GatedMLP`; the arguments are those of `gqa_keys`."""
    parts = {"gate_up.gate": "gate_proj", "gate_up.up": "up_proj", "down": "down_proj"}
    return below(path, name, parts)


def delta_keys(path: str, name: str) -> KeyTable:
    """Return the key table of a gated delta net; the arguments are those of `gqa_keys`."""
    projections = ("qkvz", "ba", "qkv", "z", "b", "a")
    parts = {f"projections.{one}": f"in_proj_{one}" for one in projections}
    parts |= {"out_proj": "out_proj", "conv_weight": "conv1d.weight", "norm": "norm.weight"}
    return below(path, name, parts | {"A_log": "A_log", "dt_bias": "dt_bias"})


def mamba2_keys(path: str, name: str) -> KeyTable:
    """Return the key table of a Mamba-2 mixer; the arguments are those of `gqa_keys`."""
    parts = {name: name for name in ("in_proj", "out_proj", "A_log", "dt_bias", "D")}
    parts |= {"conv_weight": "conv1d.weight", "conv_bias": "conv1d.bias", "norm": "norm.weight"}
    return below(path, name, parts)


def moe_keys(*names: str, router: str = "gate", bias: str = "", shared: str = "") -> KeyTable:
    """Return the key table of an expert block at ``layers.*.mlp``.

    Args:
      names: the names of the block in the file. If there are several, the first that the file has
        is used.
      router: the name of the router's linear in the block.
      bias: the name of the router's correction bias. Empty for none.
      shared: the name of the shared experts. Empty for none.
    """
    path = "layers.*.mlp"
    parts = {"experts.params": "experts", "token_router.weight": f"{router}.weight"}
    if bias:
        parts["token_router.correction_bias"] = bias
    table = dict(below(path, names, parts))
    if shared:
        stems = tuple(f"{name}.{shared}" for name in names)
        table |= gated_mlp_keys(f"{path}.shared_experts", stems)
    return table
