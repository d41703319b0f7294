"""Find the class with which transformers reads a tokenizer, and do what that class does.

Most classes take ``tokenizer.json`` as it is. The classes in `REBUILT` keep its vocabulary, its
merges and its post-processor, and replace the rest by parts of their own.

Source: transformers 5.24.0, ``models/auto/tokenization_auto.py`` and the classes' own files.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import CONFIG

log = logging.getLogger("jax_nvfp4_moe")

GENERIC = "TokenizersBackend"  # the class that takes tokenizer.json as it is
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

# The class of a model's tokenizer, where transformers has one, for the models of this package.
_OF_MODEL = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_omni_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"),
    "olmoe": "GPTNeoXTokenizer",
    **dict.fromkeys(("ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "glm4v_moe"), GENERIC),
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "granitemoeshared"), GENERIC),
    **dict.fromkeys(("kimi_k25", "kimi_linear", "minimax_m2", "mistral3", "mixtral"), GENERIC),
    "step3p7": GENERIC,  # by model type in vLLM, and by the repository's name in transformers
}
# Models whose published files name a wrong class. The class of `_OF_MODEL` is taken.
_MISNAMED = frozenset(("ernie4_5_moe", "minimax_m2", "qwen3_5_moe", "qwen3_5_moe_text"))
# Classes of transformers with code of their own that this package does not have.
_OTHER_NAMES = """
Albert Bart Barthez Bartpho Bert BertJapanese Bertweet BigBird BioGpt Blenderbot
BlenderbotSmall ByT5 CLIP CTRL Camembert Canine Clvp CodeLlama Cohere Cpm CpmAnt
DPRQuestionEncoder Deberta DebertaV2 Dia Esm Esmc FNet FSMT Flaubert Funnel GPTNeoXJapanese
Herbert LED Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke Lxmert MBart MBart50 MPNet MarkupLM
Mgpstr MobileBert Mvp MyT5 Nllb Nougat OpenAIGPT PLBart Parakeet Pegasus Perceiver Phobert
ProphetNet Rag Reformer RemBert RoCBert RoFormer Roberta SeamlessM4T Siglip2 Splinter T5 Tapas
Udop VideoPrism Vits Wav2Vec2CTC Wav2Vec2PhonemeCTC Whisper XGLM XLM XLMRoberta XLNet
"""
_OTHER = frozenset(f"{name}Tokenizer" for name in _OTHER_NAMES.split())

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
_DECODER = {**_BYTE_LEVEL, "use_regex": True}
_SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_PIECES = [_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]


@dataclasses.dataclass(frozen=True)
class Rebuilt:
    """A class that replaces parts of ``tokenizer.json`` by its own.

    Attributes:
      special: the special tokens that the class has by default, or None for no token.
      parts: function of ``tokenizer_config.json`` -> its ``normalizer``, ``pre_tokenizer`` and
        ``decoder``, in the form of ``tokenizer.json``.
      model: the options of its BPE, other than the default ones.
      plain: whether the class drops the post-processor, so that nothing is put around a text.
      marked: whether the class adds all its special tokens once more, as special ones.
    """

    special: Mapping[str, str | None]
    parts: Callable[[Mapping[str, Any]], dict[str, Any]]
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    plain: bool = False
    marked: bool = False


def _sequence(kind: str, *parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(parts)}


def _llama(config):
    prefix = config.get("add_prefix_space")
    prefix = True if prefix is None else bool(prefix)
    scheme = "never" if not prefix else "always" if config.get("legacy") else "first"
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    decoder = _sequence("decoders", *_PIECES, *strip)
    return {"normalizer": None, "pre_tokenizer": space, "decoder": decoder}


def _gemma(config):
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
    normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoder = _sequence("decoders", *_PIECES)
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {**split, "invert": False},
        "decoder": decoder,
    }


def _qwen(pattern):
    def parts(config):
        prefix = bool(config.get("add_prefix_space"))
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        level = {**_BYTE_LEVEL, "add_prefix_space": prefix, "use_regex": False}
        before = _sequence("pretokenizers", {**split, "invert": False}, level)
        return {"normalizer": {"type": "NFC"}, "pre_tokenizer": before, "decoder": _DECODER}

    return parts


def _byte_level(normalizer):
    def parts(config):
        level = {**_DECODER, "add_prefix_space": bool(config.get("add_prefix_space"))}
        return {"normalizer": normalizer, "pre_tokenizer": level, "decoder": _DECODER}

    return parts


_END = "<|endoftext|>"
_GEMMA = {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")}
_QWEN = {"unk_token": _END, "eos_token": _END, "pad_token": _END}
_GPT = {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None}

REBUILT: Mapping[str, Rebuilt] = {
    "LlamaTokenizer": Rebuilt(
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
        _llama,
        {"fuse_unk": True, "byte_fallback": True},
    ),
    "GemmaTokenizer": Rebuilt(_GEMMA, _gemma, {"fuse_unk": True, "byte_fallback": True}),
    "Qwen2Tokenizer": Rebuilt(_QWEN, _qwen(_QWEN2), marked=True),
    "Qwen3_5Tokenizer": Rebuilt(_QWEN, _qwen(_QWEN3_5)),
    "GPT2Tokenizer": Rebuilt(_GPT, _byte_level(None)),
    "GPTNeoXTokenizer": Rebuilt(
        {**_GPT, "pad_token": "<|padding|>"}, _byte_level({"type": "NFC"}), plain=True
    ),
}


def choose_class(config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], text: str) -> str:
    """Return the name of the class with which transformers reads a tokenizer.

    Args:
      config: the model's ``config.json``, or an empty mapping.
      tokenizer_config: ``tokenizer_config.json``, or an empty mapping.
      text: the text of ``tokenizer.json``.

    Returns:
      a key of `REBUILT`, or `GENERIC`.

    Raises:
      CheckpointError: ``tokenizer_class`` is not text.
    """
    declared = _declared(tokenizer_config, TOKENIZER_CONFIG) or _declared(config, CONFIG)
    kind = config.get("model_type")
    of_model = _OF_MODEL.get(kind) if isinstance(kind, str) else None
    code = _has_code(tokenizer_config)
    if code and of_model is None and declared not in (*REBUILT, *_OTHER):
        log.warning(
            "%s: auto_map names code of the checkpoint, which is never run; %s is read as it is",
            TOKENIZER_CONFIG,
            TOKENIZER,
        )
    if declared is None:
        return of_model or GENERIC
    if not code:
        if of_model is not None and (of_model == GENERIC or kind in _MISNAMED):
            return of_model
        if declared == "LlamaTokenizer" and '"ByteLevel"' in text:
            return GENERIC  # published for byte-level tokenizers that are not Llama's
    return _known(declared)


def rebuild(name: str, text: str, config: Mapping[str, Any], unknown: str | None) -> Any:
    """Return the tokenizer that a class of `REBUILT` makes of ``tokenizer.json``.

    Args:
      name: the class.
      text: the text of ``tokenizer.json``.
      config: ``tokenizer_config.json``.
      unknown: text of the token that stands for unknown text.

    Returns:
      a `tokenizers.Tokenizer` without added tokens, or None if `name` makes a BPE and the file
      holds another kind of model.
    """
    import tokenizers

    content = json.loads(text)
    stored = content["model"]
    if stored.get("type", "BPE") != "BPE" or not isinstance(stored.get("vocab"), dict):
        log.warning(
            "%s: tokenizer_class %s reads a BPE, and %s holds a %s; the file is taken as it is",
            TOKENIZER_CONFIG,
            quoted(name),
            TOKENIZER,
            quoted(stored.get("type")),
        )
        return None
    rules = REBUILT[name]
    own = {
        **{"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False},
        **{"continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False},
        **rules.model,
        **({"unk_token": unknown} if name == "GemmaTokenizer" else {}),
    }
    parts = rules.parts(config)
    _say_differences(name, content, {**parts, "model": own})
    model = {"type": "BPE", **own, "vocab": stored["vocab"], "merges": stored["merges"]}
    after = None if rules.plain else content.get("post_processor")
    content = {"version": "1.0", **parts, "post_processor": after, "model": model}
    empty = {"truncation": None, "padding": None, "added_tokens": []}
    return tokenizers.Tokenizer.from_str(json.dumps({**content, **empty}))


def _say_differences(name, content, parts):
    """Warn of parts of ``tokenizer.json`` that the class replaces by others."""
    different = [
        key
        for key, own in parts.items()
        if _meaning(own, key) != _meaning(_without_words(content.get(key), own, key), key)
    ]
    if different:
        log.warning(
            "%s: %s is not as the tokenizer's class %s has it; the class is followed, as in "
            'transformers. To follow the file, set tokenizer_class to "%s" in %s',
            TOKENIZER,
            " and ".join(different),
            name,
            GENERIC,
            TOKENIZER_CONFIG,
        )


def _without_words(stored, own, key):
    """Return the options of a stored model, and any other part as it is."""
    if key != "model" or stored is None:
        return stored
    return {name: stored.get(name) for name in own}


def _meaning(part, key):
    """Return a part of a tokenizer without the options that have no effect on ids and text."""
    if isinstance(part, list):
        return [_meaning(one, key) for one in part]
    if not isinstance(part, dict):
        return part or None  # no prefix and an empty one are the same
    if key == "decoder" and part.get("type") == "ByteLevel":
        return "ByteLevel"
    part = {"use_regex": True, **part} if part.get("type") == "ByteLevel" else part
    return {
        name: _meaning(value, key) for name, value in part.items() if name not in ("trim_offsets",)
    }


def _declared(config, file):
    """Return ``tokenizer_class`` of a file without "Fast", or None."""
    name = config.get("tokenizer_class")
    if name is not None and not isinstance(name, str):
        raise CheckpointError([f"{file}: tokenizer_class: expected text, got {quoted(name)}"])
    return name.removesuffix("Fast") if name else None


def _has_code(config):
    """Return whether the tokenizer names code of the checkpoint."""
    given = config.get("auto_map")
    return bool(given.get("AutoTokenizer") if isinstance(given, dict) else given)


def _known(name):
    """Return the class `name` if its rules are in `REBUILT`, else `GENERIC`."""
    if name in _OTHER:
        log.warning(
            "%s: tokenizer_class %s has rules of its own in transformers, which are not "
            "implemented here; %s is read as it is",
            TOKENIZER_CONFIG,
            name,
            TOKENIZER,
        )
    return name if name in REBUILT else GENERIC
