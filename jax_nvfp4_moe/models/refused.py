"""The model families that are known and refused, each with one sentence that says why."""

from collections.abc import Mapping

_IDENTITY = "some of its experts return their input, and no kernel here has such experts"
_LIGHTNING = "its linear attention has one fixed decay for each head, which no module here has"
_RELATIVE = "its attention adds a learned bias for each distance, which no module here does"
_FACTORS = (
    "its layers share latents, and its rotation and queries have learned factors, which no module "
    "here has"
)
_MISTRAL = (
    "its sizes are read from params.json, which must be in the folder, beside the files named "
    "consolidated alone"
)
_VISION_EXPERTS = "its layers have further experts for images, which no module here has"

# A name in ``architectures`` of ``config.json`` -> the reason.
REFUSED_FAMILIES: Mapping[str, str] = {
    "LongcatFlashForCausalLM": _IDENTITY,
    "MiniMaxForCausalLM": _LIGHTNING,
    "InklingForCausalLM": _RELATIVE,
    "InklingForConditionalGeneration": _RELATIVE,
    "MistralLarge3ForCausalLM": _MISTRAL,
    "MistralLarge4ForConditionalGeneration": _FACTORS,
    "Ernie4_5_VLMoeForConditionalGeneration": _VISION_EXPERTS,
    "Ernie4_5_VL_MoeForConditionalGeneration": _VISION_EXPERTS,
}


def why_refused_family(names: object) -> str:
    """Return ``": "`` and the reason why a family is refused; "" if it is not known.

    Args:
      names: the value of ``architectures`` in a ``config.json``.
    """
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in REFUSED_FAMILIES:
            return f": {REFUSED_FAMILIES[name]}"
    return ""
