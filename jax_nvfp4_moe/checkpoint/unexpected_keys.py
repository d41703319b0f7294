"""Tensors that a checkpoint has and its model does not ask for: known extras, or a problem."""

import re
from collections.abc import Iterator

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.checkpoint.key_mapping import KeyMapping
from jax_nvfp4_moe.checkpoint.plan import Planner

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Tensors that real checkpoints carry and inference of the language model does not need.
_KNOWN_EXTRAS = tuple(
    (re.compile(pattern), what)
    for pattern, what in (
        (r"(^|\.)mtp\.", "multi-token prediction"),
        (
            r"(^|\.)(visual|vision_tower|vision_model|vision_embed_tokens|vision_embedder)\.",
            "vision tower",
        ),
        (
            r"(^|\.)(multi_modal_projector|embed_vision|audio_tower|embed_audio)\.",
            "vision or audio",
        ),
        (r"(^|\.)rotary_emb\.inv_freq$", "rotary frequencies, which are computed"),
        (r"[._](k|v|q|kv|attn|prob)_scale$|\.(k|v|kv)_proj\.output_scale$", "KV-cache scales"),
    )
)


def find_unexpected_keys(
    planner: Planner, key_mapping: KeyMapping, only: str | None, num_layers: int | None
) -> Iterator[str]:
    """Say which tensors nobody asked for, though they lie in a module that is loaded.

    Args:
      planner: has taken those that were; takes notes of what is knowingly left out.
      key_mapping: of the file.
      only: the module to look into, None for all.
      num_layers: of the config; tensors of later layers are left out.
    """
    scope = f"{only}." if only else ""
    loaded = {name.split(".")[0] for name in planner.taken}
    for name in planner.tensors.under(scope):
        if name in planner.taken:
            continue
        info = planner.tensors.info(name)
        extra = _known_extra(name, num_layers)
        beside = name.split(".")[0] not in loaded or not key_mapping.owns(info.name)
        if extra is None and beside:
            extra = "modules beside the language model"
        if extra is not None:
            planner.note(f"tensors left out: {extra}")
            continue
        yield f"{quoted(info.name)} ({quoted(info.file)}): {info} is not part of the model"


def _known_extra(name, num_layers) -> str | None:
    layer = _LAYER.search(name)
    if layer and num_layers is not None and int(layer[1]) >= num_layers:
        return f"layers after the {num_layers} of the config"
    return next((what for pattern, what in _KNOWN_EXTRAS if pattern.search(name)), None)
