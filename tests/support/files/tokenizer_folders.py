"""Folders of tokenizers in the shapes of published ones, as small edits of small tokenizers.

`BASES` are whole ``tokenizer.json`` files. `VARIANTS` says what a folder changes in one of them,
and what it holds beside it. `TEXTS` and `CHATS` are what to ask its tokenizer. All contents are
ours.

Nothing here needs transformers, whose answers are in ``tests/checkpoints/tokenizers.json``.
`tests/reference/tokenizers.py` made them.
"""

import copy
import functools
import json
import pathlib
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

EXAMPLE = pathlib.Path(__file__).parents[3] / "jax_nvfp4_moe" / "examples" / "tiny-python-moe"
_TEMPLATE_FILES = pathlib.Path(__file__).parent / "templates"

TEXTS = (
    "def softmax(x):\n    return 12  + don't",
    "<|im_start|> hello <|im_end|> wor<tool>ld <tool> a<|a|>b  <|a|>  b",
    "Ünïcode e\u0301 漢字 🙂",
    "<s>hello world</s> the <unk> <pad>",
    " leading . space , it 's n't",
    "",
)


class Variant(NamedTuple):
    """A folder of a tokenizer.

    Attributes:
      base: a key of `BASES`.
      tokenizer: top-level keys of ``tokenizer.json`` -> their values, or functions of the old ones.
      config: ``tokenizer_config.json``; None for no file.
      model: ``config.json``; None for no file.
      files: other files -> their text, or what they hold as JSON.
      texts: texts to encode beside `TEXTS`.
    """

    base: str
    tokenizer: Mapping[str, Any] = {}
    config: Mapping[str, Any] | None = {}
    model: Mapping[str, Any] | None = None
    files: Mapping[str, Any] = {}
    texts: Sequence[str] = ()


def write(variant: Variant, folder: pathlib.Path) -> None:
    """Write the files of a variant into an existing folder."""
    content = copy.deepcopy(BASES[variant.base]())
    for key, value in variant.tokenizer.items():
        content[key] = value(content[key]) if callable(value) else value
    files = {"tokenizer.json": content, **variant.files}
    files |= {} if variant.config is None else {"tokenizer_config.json": variant.config}
    files |= {} if variant.model is None else {"config.json": variant.model}
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def added_tokens(encoder: Any) -> dict[str, str]:
    """Return the added tokens of a `tokenizers.Tokenizer`: id -> text and names of flags."""
    names = ("special", "lstrip", "rstrip", "single_word", "normalized")
    return {
        str(index): " ".join([made.content, *(name for name in names if getattr(made, name))])
        for index, made in sorted(encoder.get_added_tokens_decoder().items())
    }


def token(text: str, index: int | None = None, **flags: bool) -> dict[str, Any]:
    """Return an added token as the files hold it, special unless the flags say otherwise."""
    known = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    made = {"content": text, **known, "special": True, **flags}
    return made if index is None else {"id": index, **made}


def typed(text: str, **flags: bool) -> dict[str, Any]:
    """Return an added token as older versions wrote it into ``tokenizer_config.json``."""
    return {"__type": "AddedToken", **token(text, **flags)}


def first(*texts: str, start: int = 4096, **flags: bool) -> dict[str, Any]:
    """Return ``added_tokens_decoder`` that gives ids from `start` to texts."""
    return {str(start + place): token(text, **flags) for place, text in enumerate(texts)}


def stored(*texts: str, start: int = 4096, **flags: bool) -> Callable[[list], list]:
    """Return a function that adds tokens to those of ``tokenizer.json``."""
    return lambda old: [*old, *(token(text, start + i, **flags) for i, text in enumerate(texts))]


def around(begin: Sequence[tuple[str, int]] = (), end: Sequence[tuple[str, int]] = ()) -> dict:
    """Return a post-processor that puts tokens around a text."""
    one = [
        *({"SpecialToken": {"id": text, "type_id": 0}} for text, _ in begin),
        {"Sequence": {"id": "A", "type_id": 0}},
        *({"SpecialToken": {"id": text, "type_id": 0}} for text, _ in end),
    ]
    ids = {text: {"id": text, "ids": [index], "tokens": [text]} for text, index in (*begin, *end)}
    two = [*one, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": one, "pair": two, "special_tokens": ids}


@functools.cache
def _python() -> dict[str, Any]:
    """Return the example's tokenizer: a byte-level BPE of 4096 tokens."""
    return json.loads((EXAMPLE / "tokenizer.json").read_text(encoding="utf-8"))


_PIECE_TEXT = (
    "▁t he ▁the ▁h el ll ▁he llo ▁hello ▁w or ld ▁wor ▁world hello def ▁def so ft soft ma max x x "
    "softmax ▁a ▁b in it ▁it ▁in di ng ing ea le lead ▁lead ▁leading ▁▁ ▁▁▁▁ re re t tu rn return "
    "▁return sp ace ▁space"
)
_PIECES = _PIECE_TEXT.split()


@functools.cache
def _pieces(byte_tokens: bool = True, first_tokens: Sequence[str] = ("<unk>", "<s>", "</s>")):
    """Return a BPE with byte fallback, in the shape of a converted SentencePiece model."""
    vocabulary = dict.fromkeys(first_tokens)
    vocabulary |= dict.fromkeys(f"<0x{byte:02X}>" for byte in range(256)) if byte_tokens else {}
    vocabulary |= dict.fromkeys("▁" + string.ascii_letters + string.digits + string.punctuation)
    merges = []
    for piece in _PIECES:
        halves = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        merges += [f"{a} {b}" for a, b in halves if a in vocabulary and b in vocabulary]
        vocabulary[piece] = None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token(text, i) for i, text in enumerate(first_tokens)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": around([("<s>", 1)]) if "<s>" in first_tokens else None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            **{"type": "BPE", "dropout": None, "unk_token": "<unk>", "fuse_unk": True},
            **{"continuing_subword_prefix": None, "end_of_word_suffix": None},
            **{"byte_fallback": byte_tokens, "ignore_merges": False},
            "vocab": {text: index for index, text in enumerate(vocabulary)},
            "merges": merges,
        },
    }


def _gemma() -> dict[str, Any]:
    """Return the pieces with the parts around them that Gemma has."""
    made = dict(_pieces(True, ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")))
    made["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
    made["pre_tokenizer"] = {**split, "invert": False}
    made["decoder"] = {"type": "Sequence", "decoders": made["decoder"]["decoders"][:3]}
    made["post_processor"] = around([("<bos>", 2)])
    return made


def _bare(model: dict[str, Any], before: Any, decoder: Any) -> dict[str, Any]:
    return {
        **{"version": "1.0", "truncation": None, "padding": None, "normalizer": None},
        **{"added_tokens": [token("<unk>", 0)], "pre_tokenizer": before},
        **{"post_processor": None, "decoder": decoder, "model": model},
    }


def _words() -> dict[str, Any]:
    """Return a tokenizer of whole words, whose decoded text has a space between all of them."""
    text = "<unk> hello world the space leading it s n t don def return a b . , ' + 12 ( ) :"
    vocabulary = {word: index for index, word in enumerate(text.split())}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    return _bare(model, {"type": "Whitespace"}, None)


def _unigram() -> dict[str, Any]:
    """Return a Unigram model, in the shape of a converted SentencePiece model."""
    letters = "▁" + string.ascii_letters + string.digits + string.punctuation
    pieces = dict.fromkeys(["<unk>", *_PIECES, *letters])
    scores = [
        [piece, 0.0 if piece == "<unk>" else -1.0 - place / 64]
        for place, piece in enumerate(pieces)
    ]
    model = {"type": "Unigram", "unk_id": 0, "vocab": scores, "byte_fallback": False}
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return _bare(model, space, space)


_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def _level(pattern: str) -> dict[str, Any]:
    """Return the pre-tokenizer of a byte-level BPE that splits texts by a pattern."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {"type": "Sequence", "pretokenizers": [{**split, "invert": False}, _LEVEL]}


_QWEN = _level(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA = _level(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

BASES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "python": _python,
    "pieces": _pieces,
    "gemma": _gemma,
    "words": _words,
    "unigram": _unigram,
}

_PIECES_END, _GEMMA_END = (len(base()["model"]["vocab"]) for base in (_pieces, _gemma))

# Templates of chats. `SHOW` prints what it sees.
SHOW, CHATML, STRICT, HARMONY, SCOPES, GUARDED = (
    (_TEMPLATE_FILES / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    for name in ("show", "chatml", "strict", "harmony", "scopes", "guarded")
)

# Templates print all of this in the order of the keys.
_PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["place"],
}
_FUNCTION = {"name": "weather", "description": "Wetter <heute> für einen Ort"}
TOOLS = [{"type": "function", "function": {**_FUNCTION, "parameters": _PARAMETERS}}]
_ARGUMENTS = {"name": "weather", "arguments": {"place": "Köln"}}
_CALL = {"type": "function", "id": "a1", "function": _ARGUMENTS}


def _says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TALKS: Mapping[str, list[dict[str, Any]]] = {
    "one": [_says("user", "Wie <geht>'s? 漢")],
    "turns": [
        _says("system", "Be brief."),
        _says("user", "hi "),
        _says("assistant", "Hello.", reasoning_content="A greeting.\n"),
        _says("user", "why?"),
    ],
    "parts": [_says("user", [{"type": "text", "text": text} for text in ("Look: ", "x")])],
    "calls": [
        _says("user", "Wetter?"),
        _says("assistant", None, tool_calls=[_CALL], thinking="I call."),
        {"role": "tool", "name": "weather", "tool_call_id": "a1", "content": "12"},
    ],
}


def _asked(talk: str, prompt: bool = True, **arguments: Any) -> tuple[str, dict[str, Any]]:
    return talk, {"add_generation_prompt": prompt, **arguments}


# What to pass to the template: the conversation, and the arguments.
CHATS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "one": _asked("one", False),
    "prompt": _asked("one"),
    "turns": _asked("turns"),
    "parts": _asked("parts", enable_thinking=False),
    "calls": _asked("calls", tools=TOOLS),
    "documents": _asked("one", False, documents=[{"title": "T", "text": "<d>"}], tools=[]),
    "variables": _asked("one", enable_thinking=True, bos_token="<B>", reasoning_effort="high"),
}

_IM = ("<|im_start|>", "<|im_end|>")
_GENERIC, _FAST = "TokenizersBackend", "PreTrainedTokenizerFast"
_ENDS = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
_LLAMA_ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_FIRST = {"0": token("<unk>"), "1": token("<s>"), "2": token("</s>")}
_STARTED = {"post_processor": around([("<|endoftext|>", 0)])}
_WITH_IM = {"added_tokens": stored(*_IM)}
_TRUNCATED = {
    "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
}
_PADDING = {
    **{"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0},
    **{"pad_type_id": 0, "pad_token": "<|endoftext|>"},
}


def _of(
    name: str,
    tokenizer: Mapping[str, Any] = {},
    *,
    base: str = "python",
    added: Mapping[str, int] | None = None,
    special: Mapping[str, Any] | None = None,
    template: str | None = None,
    model: Mapping[str, Any] | None = None,
    texts: Sequence[str] = (),
    **config: Any,
) -> Variant:
    """Return a folder whose configuration names a class.

    Args:
      name: the class.
      tokenizer: what changes in ``tokenizer.json``.
      base: as in `Variant`.
      added: ``added_tokens.json``; None for no file, as for the next two.
      special: ``special_tokens_map.json``.
      template: ``chat_template.jinja``.
      model: as in `Variant`.
      texts: as in `Variant`.
      config: the other fields of the configuration. ``decoder`` stands for `added_tokens_decoder`.
    """
    if "decoder" in config:
        config["added_tokens_decoder"] = config.pop("decoder")
    names = ("added_tokens.json", "special_tokens_map.json", "chat_template.jinja")
    files = {
        file: content
        for file, content in zip(names, (added, special, template), strict=True)
        if content is not None
    }
    return Variant(base, tokenizer, {"tokenizer_class": name, **config}, model, files, texts)


_generic = functools.partial(_of, _GENERIC)
_pieces_of = functools.partial(_of, base="pieces")
_qwen = functools.partial(_of, "Qwen2Tokenizer")


def _flags(**flags: bool) -> Variant:
    """Return a folder whose configuration alone gives three tokens certain flags."""
    return _generic(**_ENDS, decoder=first("<tool>", "<|a|>", *_IM, **flags))


def _shown(template: Any = None, files: Mapping[str, Any] = {}, **config: Any) -> Variant:
    """Return a folder with a chat template in the configuration, or in files."""
    config |= {} if template is None else {"chat_template": template}
    return _generic(_WITH_IM, **_ENDS, pad_token=None, **config)._replace(files=files)


# Where the added and special tokens come from, and with which flags.
_TOKENS = {
    "plain": _generic(**_ENDS),
    "no configuration": Variant("python", config=None),
    "empty configuration": Variant("python"),
    "decoder alone": _generic(decoder=first(*_IM)),
    "decoder, not special": _flags(special=False),
    "decoder, left": _flags(lstrip=True),
    "decoder, right": _flags(rstrip=True),
    "decoder, both sides": _flags(lstrip=True, rstrip=True, special=False),
    "decoder, whole words": _flags(single_word=True),
    "decoder, normalized": _flags(normalized=True),
    "decoder with a gap": _generic(decoder=first("<tool>", start=5000) | first("<|a|>")),
    "decoder in another order": _generic(
        decoder=dict(reversed(first(*_IM, "<tool>", "<|a|>").items()))
    ),
    "decoder of a word": _generic(decoder={"300": token("return", special=False)}),
    "decoder without flags": _generic(decoder={"4096": {"content": "<|im_start|>"}}),
    "decoder changes flags": _generic(
        _WITH_IM, decoder=first(*_IM, lstrip=True, special=False), eos_token=_IM[1]
    ),
    "decoder leaves tokens out": _generic(_WITH_IM, decoder=first("<|im_start|>")),
    "decoder, empty": _generic(_WITH_IM, decoder={}),
    "stored tokens": _generic(_WITH_IM, eos_token="<|im_end|>"),
    "stored, not special": _generic(
        {"added_tokens": stored(*_IM, special=False)}, eos_token="<|im_end|>"
    ),
    "additional": _generic(additional_special_tokens=["<|im_start|>", "<tool>"]),
    "additional of older versions": _generic(
        additional_special_tokens=[typed("<tool>", lstrip=True), "<|a|>"]
    ),
    "extra": _generic(extra_special_tokens=["<|a|>", typed("<tool>")]),
    "extra before additional": _generic(
        extra_special_tokens=["<|a|>"], additional_special_tokens=["<tool>"]
    ),
    "extra, empty": _generic(extra_special_tokens=[], additional_special_tokens=["<tool>"]),
    "extra with names": _generic(
        **_ENDS, extra_special_tokens={"image_token": "<tool>", "a_token": typed("<|a|>")}
    ),
    "named tokens of this model": _generic(
        image_token="<tool>", video_token=typed("<|a|>", rstrip=True), add_bos_token=False
    ),
    "older named tokens": _generic(
        bos_token=typed("<s>", lstrip=True), eos_token=typed("</s>"), pad_token=None
    ),
    "new named tokens": _generic(bos_token="<s>", eos_token="</s>", pad_token="<pad>"),
    "one token, two flags": _generic(bos_token=typed("<s>", lstrip=True), unk_token="<s>"),
    "named token in the decoder": _generic(
        eos_token="<|im_end|>", decoder=first(*_IM, special=False, rstrip=True, normalized=True)
    ),
    "map": _generic(special={"eos_token": "</s>", "bos_token": token("<s>")}),
    "map replaces": _generic(
        _WITH_IM,
        eos_token="<|im_start|>",
        special={
            "eos_token": token("<|im_end|>", lstrip=True),
            "additional_special_tokens": ["<tool>"],
        },
    ),
    "map is not read": _generic(
        _WITH_IM,
        eos_token="<|im_start|>",
        decoder=first(*_IM),
        special={"eos_token": "<|im_end|>", "bos_token": "<s>"},
    ),
    "map after additional": _generic(
        additional_special_tokens=["<|a|>"], special={"additional_special_tokens": ["<tool>"]}
    ),
    "map, extra": _generic(
        extra_special_tokens=["<|a|>"], special={"extra_special_tokens": ["<tool>", "<|a|>"]}
    ),
    "map, names": _generic(
        image_token="<|a|>",
        other_token="<pad>",
        special={"image_token": "<tool>", "extra_special_tokens": {"other_token": "<s>"}},
    ),
    "added file": _generic(
        eos_token="<|im_end|>",
        added={"<|im_start|>": 4096, "<|im_end|>": 4097, "<tool>": 4098},
    ),
    "added file and map": _generic(
        bos_token=typed("<|im_start|>"),
        added={"<tool>": 4098, "<|im_end|>": 4097, "<|im_start|>": 4096},
        special={"eos_token": "<|im_end|>"},
    ),
    "added file and stored": _generic(
        {"added_tokens": stored("<|im_end|>")},
        additional_special_tokens=["<tool>"],
        added={"<tool>": 4098, "<|a|>": 4097},
    ),
    "added file, ids that are taken": _generic(
        _WITH_IM,
        bos_token=typed("<tool>", lstrip=True),
        extra_special_tokens=[typed("<|a|>")],
        added={"<tool>": 4096, "<|a|>": 4098, "<pad>": 9000},
    ),
    "added file is not read": _generic(decoder=first(*_IM), added={"<tool>": 4098}),
    "split special tokens": _generic(_WITH_IM, split_special_tokens=True),
    "truncated": _generic(_TRUNCATED, **_ENDS),
    "padded": _generic({"padding": _PADDING}, **_ENDS),
    "truncated and padded": _qwen({**_TRUNCATED, "padding": _PADDING}),
}

# What stands around a text, the class that reads the folder, and its decoding.
_CLEANED: dict[str, bool] = {"clean_up_tokenization_spaces": True}
_CLASSES = {
    "begins": _generic(_STARTED, **_ENDS),
    "begins and ends": _generic(
        {"post_processor": around([("<|endoftext|>", 0)], [("<|im_end|>", 4096)])}
        | {"added_tokens": stored("<|im_end|>")},
        **_ENDS,
    ),
    "asks for a beginning": _generic(**_ENDS, add_bos_token=True),
    "asks for an end": _generic(**_ENDS, add_eos_token=True),
    "asks for no beginning": _generic(_STARTED, **_ENDS, add_bos_token=False),
    "asks without a post-processor": _generic(
        {"post_processor": None}, **_ENDS, add_bos_token=True
    ),
    "PreTrainedTokenizer": _of("PreTrainedTokenizer", **_ENDS),
    "unknown class": _of("OurTokenizer", **_ENDS),
    "LlamaTokenizerFast, bytes": _of("LlamaTokenizerFast", **_ENDS, add_bos_token=True),
    "Qwen2Tokenizer": _qwen(eos_token="<|im_end|>"),
    "Qwen2TokenizerFast, prefix": _of("Qwen2TokenizerFast", add_prefix_space=True),
    "Qwen2Tokenizer, additional": _qwen(
        _WITH_IM,
        additional_special_tokens=["<tool>", "<|im_start|>"],
        decoder=first(*_IM, "<tool>", special=False, lstrip=True),
    ),
    "Qwen2Tokenizer, no end": _qwen(eos_token=None, pad_token="<pad>"),
    "GPT2Tokenizer": _of("GPT2Tokenizer"),
    "GPT2TokenizerFast, prefix": _of("GPT2TokenizerFast", add_prefix_space=True),
    "GPTNeoXTokenizer": _of("GPTNeoXTokenizerFast", _STARTED),
    "qwen3_moe alone": Variant("python", config=None, model={"model_type": "qwen3_moe"}),
    "qwen3_moe, generic": _generic(model={"model_type": "qwen3_moe"}),
    "qwen3_5_moe, generic": _generic(model={"model_type": "qwen3_5_moe"}),
    "olmoe alone": Variant("python", config={}, model={"model_type": "olmoe"}),
    "mixtral, Llama": _pieces_of("LlamaTokenizer", **_LLAMA_ENDS, model={"model_type": "mixtral"}),
    "class of the model": Variant(
        "python", config={}, model={"model_type": "kimi_k2", "tokenizer_class": "GPT2Tokenizer"}
    ),
    "code of the checkpoint": _of(
        "Y", auto_map={"AutoTokenizer": ["x.Y", None]}, model={"model_type": "qwen3_moe"}
    ),
    "LlamaTokenizer": _pieces_of("LlamaTokenizer", **_LLAMA_ENDS, legacy=False),
    "LlamaTokenizer, legacy": _pieces_of(
        "LlamaTokenizer",
        **{name: typed(text) for name, text in _LLAMA_ENDS.items()},
        **{"legacy": True, "add_bos_token": True, "add_eos_token": False, "sp_model_kwargs": {}},
        clean_up_tokenization_spaces=False,
    ),
    "LlamaTokenizer, no prefix": _pieces_of("LlamaTokenizer", add_prefix_space=False),
    "LlamaTokenizer, decoder": _pieces_of(
        "LlamaTokenizerFast",
        decoder=_FIRST | first("<tool>", "<|a|>", start=_PIECES_END, special=False),
    ),
    "pieces, generic": _pieces_of(_FAST, **_LLAMA_ENDS),
    "pieces, decoder": _pieces_of(
        _FAST, decoder=first("<tool>", "<|a|>", start=_PIECES_END, lstrip=True)
    ),
    "pieces, normalized": _pieces_of(
        _FAST, decoder=first("<tool>", "<|a|>", start=_PIECES_END, normalized=True)
    ),
    "GemmaTokenizer": _of("GemmaTokenizer", base="gemma"),
    "GemmaTokenizer of pieces": _pieces_of("GemmaTokenizer"),
    "words": _of(_FAST, base="words", unk_token="<unk>"),
    "words, cleaned": _of(_FAST, base="words", **_CLEANED, eos_token="</s>"),
    "bytes, cleaned": _generic(**_CLEANED),
    "bytes, cleaned all the same": _generic(
        **_CLEANED,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    ),
    "unigram": _of(_FAST, base="unigram", unk_token="<unk>", eos_token="</s>"),
    "unigram, cleaned": _of(
        _FAST, base="unigram", **_CLEANED, additional_special_tokens=["<tool>"]
    ),
}

# Chat templates, and where they are.
_TEMPLATES = {
    "shows": _shown(SHOW, image_token="<tool>"),
    "no special tokens": _generic(chat_template=SHOW),
    "template of a class": _qwen(chat_template=SHOW),
    "chatml": _shown(CHATML),
    "strict": _shown(STRICT),
    "harmony": _shown(HARMONY),
    "scopes": _shown(SCOPES),
    "guarded": _shown(GUARDED),
    "template file": _shown("config", {"chat_template.jinja": SHOW}),
    "named templates": _shown(
        [
            {"name": "default", "template": "D{{ messages | length }}"},
            {"name": "tool_use", "template": "T{{ tools | tojson }}"},
        ]
    ),
    "templates as an object": _shown({"default": "D", "rag": "R"}),
    "no default": _shown([{"name": "rag", "template": "R"}, {"name": "tool_use", "template": "T"}]),
    "template folder": _shown(
        "config",
        {
            "chat_template.jinja": "F{{ tools is none }}",
            "additional_chat_templates/tool_use.jinja": "U{{ tools | length }}",
        },
    ),
    "template folder alone": _shown(
        "config", {"additional_chat_templates/default.jinja": "A{{ bos_token }}"}
    ),
    "template folder, no default": _shown("config", {"additional_chat_templates/rag.jinja": "R"}),
    "file beside the processor's": _shown(
        files={"chat_template.jinja": "file", "chat_template.json": {"chat_template": "processor"}}
    ),
}

# Shapes of published folders.
_HARMONY_TOKENS = tuple(
    f"<|{name}|>"
    for name in ("startoftext", "return", "constrain", "channel", "start", "end", "message", "call")
)
_GLM_TOKENS = ("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|user|>")
_BAR, _SPACE = "\uff5c", "\u2581"  # DeepSeek writes its tokens with wide bars
_DEEPSEEK = tuple(
    f"<{_BAR}{name.replace(' ', _SPACE)}{_BAR}>"
    for name in ("begin of sentence", "end of sentence", " pad ", "User")
)
_LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>")
_NEMOTRON = ("<unk>", "<s>", "</s>", "[INST]", "<SPECIAL_10>")
_QWEN_PARTS = {"normalizer": {"type": "NFC"}, "pre_tokenizer": _QWEN}
_PUBLISHED = {
    "Llama 3": _of(
        _FAST,
        {
            "pre_tokenizer": _LLAMA,
            "post_processor": {
                "type": "Sequence",
                "processors": [
                    {**_LEVEL, "add_prefix_space": True, "use_regex": True},
                    around([(_LLAMA3[0], 4096)]),
                ],
            },
            "added_tokens": stored(*_LLAMA3),
            "model": lambda old: {**old, "ignore_merges": True},
        },
        decoder=first(*_LLAMA3),
        **{"bos_token": _LLAMA3[0], "eos_token": _LLAMA3[2], **_CLEANED},
        **{"model_input_names": ["input_ids", "attention_mask"], "model_max_length": 131072},
        chat_template=SHOW,
        model={"model_type": "llama4"},
        special={"bos_token": _LLAMA3[0], "eos_token": _LLAMA3[2]},
        texts=("<|start_header_id|>user<|end_header_id|>\n\n1234567<|eot_id|>",),
    ),
    "Mixtral": _pieces_of(
        "LlamaTokenizer",
        {"added_tokens": stored("[INST]", "[/INST]", start=_PIECES_END)},
        **{**_LLAMA_ENDS, "legacy": False},
        **{"add_bos_token": True, "add_eos_token": False, "use_default_system_prompt": False},
        decoder=_FIRST | first("[INST]", "[/INST]", start=_PIECES_END),
        **{"additional_special_tokens": [], "spaces_between_special_tokens": False},
        chat_template=STRICT,
        model={"model_type": "mixtral"},
        special={name: token(text) for name, text in _LLAMA_ENDS.items()},
        texts=("<s>[INST] hello world [/INST] the</s>", "</s> hello"),
    ),
    "Qwen 3": _qwen(
        {
            **_QWEN_PARTS,
            "post_processor": _LEVEL,
            "added_tokens": lambda old: stored("<think>", "</think>", start=4098, special=False)(
                stored(*_IM)(old)
            ),
        },
        **{"add_bos_token": False, "add_prefix_space": False, "bos_token": None},
        decoder={"0": token("<|endoftext|>")}
        | first(*_IM)
        | first("<think>", "</think>", start=4098, special=False),
        additional_special_tokens=[*_IM],
        **{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None},
        **{"errors": "replace", "split_special_tokens": False},
        clean_up_tokenization_spaces=False,
        chat_template=CHATML,
        model={"model_type": "qwen3_moe"},
        added={"<|im_start|>": 4096, "<|im_end|>": 4097, "<think>": 4098, "</think>": 4099},
        special={"additional_special_tokens": [*_IM], "eos_token": token("<|im_end|>")},
        texts=("<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>\n\n1234",),
    ),
    "Qwen 3 VL": _of(
        "Qwen2TokenizerFast",
        {**_QWEN_PARTS, **_WITH_IM},
        decoder=first(*_IM),
        **{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        extra_special_tokens={"image_token": "<tool>", "video_token": "<|a|>"},
        model={"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text"}},
        template=SHOW,
    ),
    "Gemma": _of(
        "GemmaTokenizer",
        {"added_tokens": stored("<start_of_turn>", "<end_of_turn>", start=_GEMMA_END)},
        base="gemma",
        **{"add_bos_token": True, "add_eos_token": False, "boi_token": "<tool>"},
        decoder=first("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", start=0)
        | first("<start_of_turn>", "<end_of_turn>", start=_GEMMA_END),
        extra_special_tokens={"image_token": "<|a|>", "boi_token": "<tool>"},
        **{"sp_model_kwargs": None, "spaces_between_special_tokens": False},
        use_default_system_prompt=False,
        model={"model_type": "gemma4"},
        template=STRICT,
        texts=("<bos><start_of_turn>user\nhello  world<end_of_turn>\n",),
    ),
    "DeepSeek": _of(
        "LlamaTokenizerFast",
        {
            "pre_tokenizer": _LLAMA,
            "added_tokens": lambda old: [
                *stored(*_DEEPSEEK[:3])(old),
                token(_DEEPSEEK[3], 4099, special=False),
            ],
            "post_processor": around([(_DEEPSEEK[0], 4096)]),
        },
        **{"add_bos_token": True, "add_eos_token": False, "legacy": True, "unk_token": None},
        bos_token=typed(_DEEPSEEK[0], normalized=True),
        **{"eos_token": typed(_DEEPSEEK[1]), "pad_token": typed(_DEEPSEEK[1])},
        **{"sp_model_kwargs": {}, "chat_template": SHOW},
        model={"model_type": "deepseek_v3"},
        texts=(f"{_DEEPSEEK[0]}{_DEEPSEEK[3]}hi {_DEEPSEEK[1]}",),
    ),
    "GPT-OSS": _of(
        _FAST,
        {"added_tokens": stored(*_HARMONY_TOKENS), "pre_tokenizer": _LLAMA},
        decoder={"0": token("<|endoftext|>")} | first(*_HARMONY_TOKENS),
        **{"bos_token": "<|startoftext|>", "eos_token": "<|return|>"},
        **{"pad_token": "<|endoftext|>", "extra_special_tokens": {}},
        model={"model_type": "gpt_oss"},
        template=HARMONY,
        texts=("<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>final",),
    ),
    "GLM": _of(
        "PreTrainedTokenizer",
        {"added_tokens": stored(*_GLM_TOKENS[1:])},
        decoder={"0": token("<|endoftext|>")} | first(*_GLM_TOKENS[1:]),
        additional_special_tokens=list(_GLM_TOKENS),
        **{"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        **{"do_lower_case": False, "remove_space": False, "padding_side": "left"},
        model={"model_type": "glm4_moe"},
        template="[gMASK]<sop>" + CHATML,
        texts=("[gMASK]<sop><|user|>\nhi",),
    ),
    "Nemotron": _of(
        _FAST,
        {"added_tokens": stored(*_NEMOTRON), "post_processor": around([("<s>", 4097)])},
        decoder=first(*_NEMOTRON),
        **{**_LLAMA_ENDS, "add_bos_token": False, "clean_up_tokenization_spaces": False},
        model={"model_type": "nemotron_h"},
        template=SHOW,
        special={name: token(text) for name, text in _LLAMA_ENDS.items()},
        texts=("<SPECIAL_10>System\n<s>hi</s>",),
    ),
    "MiniMax": _of(
        "GPT2Tokenizer",
        {"added_tokens": stored("]~!b[", "[e~[", special=False)},
        decoder=first("]~!b[", "[e~["),
        **{"bos_token": "]~!b[", "eos_token": "[e~[", "unk_token": "]!d~["},
        add_prefix_space=False,
        model={"model_type": "minimax_m2"},
        template=SHOW,
        texts=("]~!b[ hi [e~[",),
    ),
    "Qwen 3.5": _qwen(
        {**_QWEN_PARTS, **_WITH_IM},
        eos_token="<|im_end|>",
        decoder=first(*_IM),
        model={"model_type": "qwen3_5_moe"},
        texts=("हिन्दी e\u0301a",),
    ),
}

VARIANTS: Mapping[str, Variant] = {**_TOKENS, **_CLASSES, **_TEMPLATES, **_PUBLISHED}
