"""Key tables that architectures share: where the parts of a model stand in its file."""

from jax_nvfp4_moe.nn.keys import KeyTable, below

# Where the parts of the usual model stand in its file.
DECODER_KEYS: KeyTable = {
    "embedding": "model.embed_tokens.weight",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "norm": "model.norm",
    "head": "lm_head",
}


def gqa_keys(path: str, name: str | tuple[str, ...]) -> KeyTable:
    """Return where the parts of a grouped-query attention at `path` stand below `name`."""
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
    """Return where the linears of a `GatedMLP` at `path` stand below `name` of the file."""
    parts = {"gate_up.gate": "gate_proj", "gate_up.up": "up_proj", "down": "down_proj"}
    return below(path, name, parts)


def delta_keys(path: str, name: str) -> KeyTable:
    """Return where the parts of a gated delta net at `path` stand below `name` of the file."""
    projections = ("qkvz", "ba", "qkv", "z", "b", "a")
    parts = {f"projections.{one}": f"in_proj_{one}" for one in projections}
    parts |= {"out_proj": "out_proj", "conv_weight": "conv1d.weight", "norm": "norm.weight"}
    return below(path, name, parts | {"A_log": "A_log", "dt_bias": "dt_bias"})


def mamba2_keys(path: str, name: str) -> KeyTable:
    """Return where the parts of a Mamba-2 mixer at `path` stand below `name` of the file."""
    parts = {name: name for name in ("in_proj", "out_proj", "A_log", "dt_bias", "D")}
    parts |= {"conv_weight": "conv1d.weight", "conv_bias": "conv1d.bias", "norm": "norm.weight"}
    return below(path, name, parts)


def moe_keys(*names: str, router: str = "gate", bias: str = "", shared: str = "") -> KeyTable:
    """Return where the parts of an expert block at ``layers.*.mlp`` stand in the file.

    Args:
      names: of the block; of several, the first that the file has counts.
      router: name of the router's linear in the block.
      bias: name of its correction bias; empty for none.
      shared: name of the shared experts; empty for none.
    """
    path = "layers.*.mlp"
    parts = {"experts.params": "experts", "router_weight": f"{router}.weight"}
    if bias:
        parts["router_bias"] = bias
    table = dict(below(path, names, parts))
    if shared:
        stems = tuple(f"{name}.{shared}" for name in names)
        table |= gated_mlp_keys(f"{path}.shared_experts", stems)
    return table
