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


def _level(pattern: str) -> dict[str, Any]:
    """Return the pre-tokenizer of a byte-level BPE that splits texts by a pattern."""
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, level]}


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

# A template that prints what it sees.
SHOW = (
    "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ image_token }}|"
    "{% for m in messages %}{{ m | tojson }};{% endfor %}|{{ tools | tojson }}|"
    "{{ documents | tojson(indent=1) }}|{{ tools is none }}{{ documents is not none }}|"
    "{{ enable_thinking is defined and enable_thinking }}|{{ add_generation_prompt }}"
)
CHATML = (
    "{%- if tools %}\n<|im_start|>system\n"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}\n"
    "{%- for tool in tools %}\n{{ tool | tojson }}\n{%- endfor %}\n<|im_end|>\n{% endif %}\n"
    "{%- set ns = namespace(last=messages | length - 1, multi=true) %}\n"
    "{%- for m in messages[::-1] %}\n{%- set index = messages | length - 1 - loop.index0 %}\n"
    "{%- if ns.multi and m.role == 'user' %}{% set ns.multi = false %}{% set ns.last = index %}"
    "{% endif %}\n{%- endfor %}\n"
    "{%- for m in messages %}\n"
    "{%- if m.content is string %}{% set content = m.content %}\n"
    "{%- elif m.content is iterable %}{% set content = m.content | selectattr('type', 'equalto', "
    "'text') | map(attribute='text') | join('') %}\n"
    "{%- else %}{% set content = '' %}{% endif %}\n"
    "{{- '<|im_start|>' + m.role + '\\n' }}\n"
    "{%- if m.reasoning_content is defined and loop.index0 > ns.last %}"
    "{{ '<think>' + m.reasoning_content.strip('\\n') + '</think>' }}{% endif %}\n"
    "{{- content }}\n"
    "{%- for call in m.tool_calls or [] %}{% if call.function %}{% set call = call.function %}"
    "{% endif %}\n<tool_call>{{ {'name': call.name, 'arguments': call.arguments} | tojson }}"
    "</tool_call>\n{%- endfor %}\n"
    "{{- '<|im_end|>\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
HARMONY = (
    "{%- macro kind(spec) -%}{{ spec.type if spec.type is string else 'any' }}{%- endmacro -%}\n"
    "{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') }}\n"
    "{%- if tools -%}\nnamespace functions {\n"
    "{%- for tool in tools %}\n{%- set f = tool.function %}\n"
    "{{- 'type ' + f.name + ' = (_: {' }}\n"
    "{%- for name, spec in f.parameters.properties.items() %}{{ name + ': ' + kind(spec) }}"
    "{%- if not loop.last %}, {% endif %}{%- endfor %}\n{{- '}) => any;' }}\n{%- endfor %}\n}\n"
    "{%- endif -%}\n{{- '<|end|>' }}\n"
    "{%- for m in messages -%}\n"
    "{%- if m.thinking is defined %}{{ '<|start|>assistant<|channel|>analysis<|message|>' "
    "+ m.thinking + '<|end|>' }}{% endif -%}\n"
    "{%- if m.role == 'user' and m.content is not string %}{% continue %}{% endif -%}\n"
    "{{- '<|start|>' + m.role + '<|message|>' + (m.content or '') + '<|end|>' }}\n"
    "{%- endfor -%}\n{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif -%}"
)
SCOPES = (
    "{% set said = 'before' %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{% set said = 'within' %}{{ m.content }}{{ said }}{% endgeneration %}"
    "{{ said }}{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    "{% set box = namespace(seen=[], self=1) %}{% set box.seen = box.seen + ['x'] %}"
    "{{ box.seen }}{{ dict(a=1) }}{{ dict.fromkeys(['k'], 0) }}"
)
GUARDED = "{% set box = namespace(_hidden=1) %}{{ box._hidden }}"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter <heute> für einen Ort",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
                "required": ["place"],
            },
        },
    }
]
_CALL = {
    "type": "function",
    "id": "a1",
    "function": {"name": "weather", "arguments": {"place": "Köln"}},
}
TALKS: Mapping[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Wie <geht>'s? 漢"}],
    "turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi "},
        {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting.\n"},
        {"role": "user", "content": "why?"},
    ],
    "parts": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look: "}, {"type": "text", "text": "x"}],
        },
    ],
    "calls": [
        {"role": "user", "content": "Wetter?"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL], "thinking": "I call."},
        {"role": "tool", "name": "weather", "tool_call_id": "a1", "content": "12"},
    ],
}
# What to pass to the template: the conversation, and the arguments.
CHATS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "one": ("one", {"add_generation_prompt": False}),
    "prompt": ("one", {"add_generation_prompt": True}),
    "turns": ("turns", {"add_generation_prompt": True}),
    "parts": ("parts", {"add_generation_prompt": True, "enable_thinking": False}),
    "calls": ("calls", {"add_generation_prompt": True, "tools": TOOLS}),
    "documents": (
        "one",
        {"add_generation_prompt": False, "documents": [{"title": "T", "text": "<d>"}], "tools": []},
    ),
    "variables": (
        "one",
        {
            "add_generation_prompt": True,
            "enable_thinking": True,
            "bos_token": "<B>",
            "reasoning_effort": "high",
        },
    ),
}

_IM = ("<|im_start|>", "<|im_end|>")
_BACKEND = {"tokenizer_class": "TokenizersBackend"}
_FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
_ENDS = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
_LLAMA_ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_FIRST = {"0": token("<unk>"), "1": token("<s>"), "2": token("</s>")}
_STARTED = around([("<|endoftext|>", 0)])
_WITH_IM = {"added_tokens": stored(*_IM)}
_TRUNCATION = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
_PADDING = {
    **{"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0},
    **{"pad_type_id": 0, "pad_token": "<|endoftext|>"},
}


def _backend(**config: Any) -> dict[str, Any]:
    return {**_BACKEND, **config}


def _flags(**flags: bool) -> Variant:
    """Return a folder whose configuration alone gives three tokens certain flags."""
    decoder = first("<tool>", "<|a|>", *_IM, **flags)
    return Variant("python", config=_backend(**_ENDS, added_tokens_decoder=decoder))


def _named(name: str, **more: Any) -> Variant:
    return Variant("python", config={"tokenizer_class": name, **more})


def _shown(template: Any = None, **parts: Any) -> Variant:
    """Return a folder with a chat template in the configuration, or elsewhere."""
    config = {} if template is None else {"chat_template": template}
    config |= {**_ENDS, "pad_token": None, **parts.pop("config", {})}
    return Variant("python", _WITH_IM, _backend(**config), **parts)


# Where the added and special tokens come from, and with which flags.
_TOKENS = {
    "plain": Variant("python", config=_backend(**_ENDS)),
    "no configuration": Variant("python", config=None),
    "empty configuration": Variant("python"),
    "decoder alone": Variant("python", config=_backend(added_tokens_decoder=first(*_IM))),
    "decoder, not special": _flags(special=False),
    "decoder, left": _flags(lstrip=True),
    "decoder, right": _flags(rstrip=True),
    "decoder, both sides": _flags(lstrip=True, rstrip=True, special=False),
    "decoder, whole words": _flags(single_word=True),
    "decoder, normalized": _flags(normalized=True),
    "decoder with a gap": Variant(
        "python",
        config=_backend(added_tokens_decoder=first("<tool>", start=5000) | first("<|a|>")),
    ),
    "decoder in another order": Variant(
        "python",
        config=_backend(
            added_tokens_decoder=dict(reversed(first(*_IM, "<tool>", "<|a|>").items()))
        ),
    ),
    "decoder of a word": Variant(
        "python", config=_backend(added_tokens_decoder={"300": token("return", special=False)})
    ),
    "decoder without flags": Variant(
        "python", config=_backend(added_tokens_decoder={"4096": {"content": "<|im_start|>"}})
    ),
    "decoder changes flags": Variant(
        "python",
        _WITH_IM,
        _backend(added_tokens_decoder=first(*_IM, lstrip=True, special=False), eos_token=_IM[1]),
    ),
    "decoder leaves tokens out": Variant(
        "python", _WITH_IM, _backend(added_tokens_decoder=first("<|im_start|>"))
    ),
    "decoder, empty": Variant("python", _WITH_IM, _backend(added_tokens_decoder={})),
    "stored tokens": Variant("python", _WITH_IM, _backend(eos_token="<|im_end|>")),
    "stored, not special": Variant(
        "python", {"added_tokens": stored(*_IM, special=False)}, _backend(eos_token="<|im_end|>")
    ),
    "additional": Variant(
        "python", config=_backend(additional_special_tokens=["<|im_start|>", "<tool>"])
    ),
    "additional of older versions": Variant(
        "python",
        config=_backend(additional_special_tokens=[typed("<tool>", lstrip=True), "<|a|>"]),
    ),
    "extra": Variant("python", config=_backend(extra_special_tokens=["<|a|>", typed("<tool>")])),
    "extra before additional": Variant(
        "python",
        config=_backend(extra_special_tokens=["<|a|>"], additional_special_tokens=["<tool>"]),
    ),
    "extra, empty": Variant(
        "python", config=_backend(extra_special_tokens=[], additional_special_tokens=["<tool>"])
    ),
    "extra with names": Variant(
        "python",
        config=_backend(
            **_ENDS, extra_special_tokens={"image_token": "<tool>", "a_token": typed("<|a|>")}
        ),
    ),
    "named tokens of this model": Variant(
        "python",
        config=_backend(
            image_token="<tool>", video_token=typed("<|a|>", rstrip=True), add_bos_token=False
        ),
    ),
    "older named tokens": Variant(
        "python",
        config=_backend(
            bos_token=typed("<s>", lstrip=True), eos_token=typed("</s>"), pad_token=None
        ),
    ),
    "new named tokens": Variant(
        "python", config=_backend(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    ),
    "one token, two flags": Variant(
        "python", config=_backend(bos_token=typed("<s>", lstrip=True), unk_token="<s>")
    ),
    "named token in the decoder": Variant(
        "python",
        config=_backend(
            eos_token="<|im_end|>",
            added_tokens_decoder=first(*_IM, special=False, rstrip=True, normalized=True),
        ),
    ),
    "map": Variant(
        "python",
        config=_backend(),
        files={"special_tokens_map.json": {"eos_token": "</s>", "bos_token": token("<s>")}},
    ),
    "map replaces": Variant(
        "python",
        _WITH_IM,
        _backend(eos_token="<|im_start|>"),
        files={
            "special_tokens_map.json": {
                "eos_token": {**token("<|im_end|>", lstrip=True)},
                "additional_special_tokens": ["<tool>"],
            }
        },
    ),
    "map is not read": Variant(
        "python",
        _WITH_IM,
        _backend(eos_token="<|im_start|>", added_tokens_decoder=first(*_IM)),
        files={"special_tokens_map.json": {"eos_token": "<|im_end|>", "bos_token": "<s>"}},
    ),
    "map after additional": Variant(
        "python",
        config=_backend(additional_special_tokens=["<|a|>"]),
        files={"special_tokens_map.json": {"additional_special_tokens": ["<tool>"]}},
    ),
    "map, extra": Variant(
        "python",
        config=_backend(extra_special_tokens=["<|a|>"]),
        files={"special_tokens_map.json": {"extra_special_tokens": ["<tool>", "<|a|>"]}},
    ),
    "map, names": Variant(
        "python",
        config=_backend(image_token="<|a|>", other_token="<pad>"),
        files={
            "special_tokens_map.json": {
                "image_token": "<tool>",
                "extra_special_tokens": {"other_token": "<s>"},
            }
        },
    ),
    "added file": Variant(
        "python",
        config=_backend(eos_token="<|im_end|>"),
        files={"added_tokens.json": {"<|im_start|>": 4096, "<|im_end|>": 4097, "<tool>": 4098}},
    ),
    "added file and map": Variant(
        "python",
        config=_backend(bos_token=typed("<|im_start|>")),
        files={
            "added_tokens.json": {"<tool>": 4098, "<|im_end|>": 4097, "<|im_start|>": 4096},
            "special_tokens_map.json": {"eos_token": "<|im_end|>"},
        },
    ),
    "added file and stored": Variant(
        "python",
        {"added_tokens": stored("<|im_end|>")},
        _backend(additional_special_tokens=["<tool>"]),
        files={"added_tokens.json": {"<tool>": 4098, "<|a|>": 4097}},
    ),
    "added file, ids that are taken": Variant(
        "python",
        _WITH_IM,
        _backend(bos_token=typed("<tool>", lstrip=True), extra_special_tokens=[typed("<|a|>")]),
        files={"added_tokens.json": {"<tool>": 4096, "<|a|>": 4098, "<pad>": 9000}},
    ),
    "added file is not read": Variant(
        "python",
        config=_backend(added_tokens_decoder=first(*_IM)),
        files={"added_tokens.json": {"<tool>": 4098}},
    ),
    "split special tokens": Variant("python", _WITH_IM, _backend(split_special_tokens=True)),
    "truncated": Variant("python", {"truncation": _TRUNCATION}, _backend(**_ENDS)),
    "padded": Variant("python", {"padding": _PADDING}, _backend(**_ENDS)),
    "truncated and padded": Variant(
        "python", {"truncation": _TRUNCATION, "padding": _PADDING}, _named("Qwen2Tokenizer").config
    ),
}

# What stands around a text, the class that reads the folder, and its decoding.
_CLASSES = {
    "begins": Variant("python", {"post_processor": _STARTED}, _backend(**_ENDS)),
    "begins and ends": Variant(
        "python",
        {"post_processor": around([("<|endoftext|>", 0)], [("<|im_end|>", 4096)])}
        | {"added_tokens": stored("<|im_end|>")},
        _backend(**_ENDS),
    ),
    "asks for a beginning": Variant("python", config=_backend(**_ENDS, add_bos_token=True)),
    "asks for an end": Variant("python", config=_backend(**_ENDS, add_eos_token=True)),
    "asks for no beginning": Variant(
        "python", {"post_processor": _STARTED}, _backend(**_ENDS, add_bos_token=False)
    ),
    "asks without a post-processor": Variant(
        "python", {"post_processor": None}, _backend(**_ENDS, add_bos_token=True)
    ),
    "PreTrainedTokenizer": _named("PreTrainedTokenizer", **_ENDS),
    "unknown class": _named("OurTokenizer", **_ENDS),
    "LlamaTokenizerFast, bytes": _named("LlamaTokenizerFast", **_ENDS, add_bos_token=True),
    "Qwen2Tokenizer": _named("Qwen2Tokenizer", eos_token="<|im_end|>"),
    "Qwen2TokenizerFast, prefix": _named("Qwen2TokenizerFast", add_prefix_space=True),
    "Qwen2Tokenizer, additional": Variant(
        "python",
        _WITH_IM,
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "additional_special_tokens": ["<tool>", "<|im_start|>"],
            "added_tokens_decoder": first(*_IM, "<tool>", special=False, lstrip=True),
        },
    ),
    "Qwen2Tokenizer, no end": _named("Qwen2Tokenizer", eos_token=None, pad_token="<pad>"),
    "GPT2Tokenizer": _named("GPT2Tokenizer"),
    "GPT2TokenizerFast, prefix": _named("GPT2TokenizerFast", add_prefix_space=True),
    "GPTNeoXTokenizer": Variant(
        "python", {"post_processor": _STARTED}, _named("GPTNeoXTokenizerFast").config
    ),
    "qwen3_moe alone": Variant("python", config=None, model={"model_type": "qwen3_moe"}),
    "qwen3_moe, generic": Variant("python", config=_BACKEND, model={"model_type": "qwen3_moe"}),
    "qwen3_5_moe, generic": Variant("python", config=_BACKEND, model={"model_type": "qwen3_5_moe"}),
    "olmoe alone": Variant("python", config={}, model={"model_type": "olmoe"}),
    "mixtral, Llama": Variant(
        "pieces",
        config={**_LLAMA_ENDS, "tokenizer_class": "LlamaTokenizer"},
        model={"model_type": "mixtral"},
    ),
    "class of the model": Variant(
        "python", config={}, model={"model_type": "kimi_k2", "tokenizer_class": "GPT2Tokenizer"}
    ),
    "code of the checkpoint": Variant(
        "python",
        config={"auto_map": {"AutoTokenizer": ["x.Y", None]}, "tokenizer_class": "Y"},
        model={"model_type": "qwen3_moe"},
    ),
    "LlamaTokenizer": Variant(
        "pieces", config={**_LLAMA_ENDS, "tokenizer_class": "LlamaTokenizer", "legacy": False}
    ),
    "LlamaTokenizer, legacy": Variant(
        "pieces",
        config={
            **{name: typed(text) for name, text in _LLAMA_ENDS.items()},
            **{"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True},
            **{
                "add_eos_token": False,
                "sp_model_kwargs": {},
                "clean_up_tokenization_spaces": False,
            },
        },
    ),
    "LlamaTokenizer, no prefix": Variant(
        "pieces", config={"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}
    ),
    "LlamaTokenizer, decoder": Variant(
        "pieces",
        config={
            "tokenizer_class": "LlamaTokenizerFast",
            "added_tokens_decoder": _FIRST
            | first("<tool>", "<|a|>", start=_PIECES_END, special=False),
        },
    ),
    "pieces, generic": Variant("pieces", config={**_LLAMA_ENDS, **_FAST}),
    "pieces, decoder": Variant(
        "pieces",
        config={
            **_FAST,
            "added_tokens_decoder": first("<tool>", "<|a|>", start=_PIECES_END, lstrip=True),
        },
    ),
    "pieces, normalized": Variant(
        "pieces",
        config={
            **_FAST,
            "added_tokens_decoder": first("<tool>", "<|a|>", start=_PIECES_END, normalized=True),
        },
    ),
    "GemmaTokenizer": Variant("gemma", config={"tokenizer_class": "GemmaTokenizer"}),
    "GemmaTokenizer of pieces": Variant("pieces", config={"tokenizer_class": "GemmaTokenizer"}),
    "words": Variant("words", config={**_FAST, "unk_token": "<unk>"}),
    "words, cleaned": Variant(
        "words", config={**_FAST, "clean_up_tokenization_spaces": True, "eos_token": "</s>"}
    ),
    "bytes, cleaned": Variant("python", config=_backend(clean_up_tokenization_spaces=True)),
    "bytes, cleaned all the same": Variant(
        "python",
        config=_backend(
            clean_up_tokenization_spaces=True,
            clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
        ),
    ),
    "unigram": Variant("unigram", config={**_FAST, "unk_token": "<unk>", "eos_token": "</s>"}),
    "unigram, cleaned": Variant(
        "unigram",
        config={
            **_FAST,
            "clean_up_tokenization_spaces": True,
            "additional_special_tokens": ["<tool>"],
        },
    ),
}

# Chat templates, and where they are.
_TEMPLATES = {
    "shows": _shown(SHOW, config={"image_token": "<tool>"}),
    "no special tokens": Variant("python", config=_backend(chat_template=SHOW)),
    "template of a class": _named("Qwen2Tokenizer", chat_template=SHOW),
    "chatml": _shown(CHATML),
    "strict": _shown(STRICT),
    "harmony": _shown(HARMONY),
    "scopes": _shown(SCOPES),
    "guarded": _shown(GUARDED),
    "template file": _shown("config", files={"chat_template.jinja": SHOW}),
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
        files={
            "chat_template.jinja": "F{{ tools is none }}",
            "additional_chat_templates/tool_use.jinja": "U{{ tools | length }}",
        },
    ),
    "template folder alone": _shown(
        "config", files={"additional_chat_templates/default.jinja": "A{{ bos_token }}"}
    ),
    "template folder, no default": _shown(
        "config", files={"additional_chat_templates/rag.jinja": "R"}
    ),
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
_PUBLISHED = {
    "Llama 3": Variant(
        "python",
        {
            "pre_tokenizer": _LLAMA,
            "post_processor": {
                "type": "Sequence",
                "processors": [
                    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
                    | {"use_regex": True},
                    around([(_LLAMA3[0], 4096)]),
                ],
            },
            "added_tokens": stored(*_LLAMA3),
            "model": lambda old: {**old, "ignore_merges": True},
        },
        {
            **_FAST,
            "added_tokens_decoder": first(*_LLAMA3),
            "bos_token": _LLAMA3[0],
            "eos_token": _LLAMA3[2],
            "clean_up_tokenization_spaces": True,
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": 131072,
            "chat_template": SHOW,
        },
        {"model_type": "llama4"},
        {"special_tokens_map.json": {"bos_token": _LLAMA3[0], "eos_token": _LLAMA3[2]}},
        ("<|start_header_id|>user<|end_header_id|>\n\n1234567<|eot_id|>",),
    ),
    "Mixtral": Variant(
        "pieces",
        {"added_tokens": stored("[INST]", "[/INST]", start=_PIECES_END)},
        {
            **{**_LLAMA_ENDS, "tokenizer_class": "LlamaTokenizer", "legacy": False},
            **{"add_bos_token": True, "add_eos_token": False, "use_default_system_prompt": False},
            "added_tokens_decoder": _FIRST | first("[INST]", "[/INST]", start=_PIECES_END),
            "additional_special_tokens": [],
            "spaces_between_special_tokens": False,
            "chat_template": STRICT,
        },
        {"model_type": "mixtral"},
        {"special_tokens_map.json": {name: token(text) for name, text in _LLAMA_ENDS.items()}},
        ("<s>[INST] hello world [/INST] the</s>", "</s> hello"),
    ),
    "Qwen 3": Variant(
        "python",
        {
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": _QWEN,
            "post_processor": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": False,
            }
            | {"use_regex": False},
            "added_tokens": lambda old: stored("<think>", "</think>", start=4098, special=False)(
                stored(*_IM)(old)
            ),
        },
        {
            "tokenizer_class": "Qwen2Tokenizer",
            **{"add_bos_token": False, "add_prefix_space": False, "bos_token": None},
            "added_tokens_decoder": {"0": token("<|endoftext|>")}
            | first(*_IM)
            | first("<think>", "</think>", start=4098, special=False),
            "additional_special_tokens": [*_IM],
            **{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None},
            **{"errors": "replace", "split_special_tokens": False},
            "clean_up_tokenization_spaces": False,
            "chat_template": CHATML,
        },
        {"model_type": "qwen3_moe"},
        {
            "added_tokens.json": {"<|im_start|>": 4096, "<|im_end|>": 4097, "<think>": 4098}
            | {"</think>": 4099},
            "special_tokens_map.json": {
                "additional_special_tokens": [*_IM],
                "eos_token": token("<|im_end|>"),
            },
        },
        ("<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>\n\n1234",),
    ),
    "Qwen 3 VL": Variant(
        "python",
        {"normalizer": {"type": "NFC"}, "pre_tokenizer": _QWEN, "added_tokens": stored(*_IM)},
        {
            "tokenizer_class": "Qwen2TokenizerFast",
            "added_tokens_decoder": first(*_IM),
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "extra_special_tokens": {"image_token": "<tool>", "video_token": "<|a|>"},
        },
        {"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text"}},
        {"chat_template.jinja": SHOW},
    ),
    "Gemma": Variant(
        "gemma",
        {"added_tokens": stored("<start_of_turn>", "<end_of_turn>", start=_GEMMA_END)},
        {
            "tokenizer_class": "GemmaTokenizer",
            **{"add_bos_token": True, "add_eos_token": False, "boi_token": "<tool>"},
            "added_tokens_decoder": {
                str(i): token(text)
                for i, text in enumerate(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"))
            }
            | first("<start_of_turn>", "<end_of_turn>", start=_GEMMA_END),
            "extra_special_tokens": {"image_token": "<|a|>", "boi_token": "<tool>"},
            "sp_model_kwargs": None,
            "spaces_between_special_tokens": False,
            "use_default_system_prompt": False,
        },
        {"model_type": "gemma4"},
        {"chat_template.jinja": STRICT},
        ("<bos><start_of_turn>user\nhello  world<end_of_turn>\n",),
    ),
    "DeepSeek": Variant(
        "python",
        {
            "pre_tokenizer": _LLAMA,
            "added_tokens": lambda old: [
                *stored(*_DEEPSEEK[:3])(old),
                token(_DEEPSEEK[3], 4099, special=False),
            ],
            "post_processor": around([(_DEEPSEEK[0], 4096)]),
        },
        {
            "tokenizer_class": "LlamaTokenizerFast",
            **{"add_bos_token": True, "add_eos_token": False, "legacy": True, "unk_token": None},
            **{"bos_token": typed(_DEEPSEEK[0], normalized=True)},
            **{"eos_token": typed(_DEEPSEEK[1]), "pad_token": typed(_DEEPSEEK[1])},
            "sp_model_kwargs": {},
            "chat_template": SHOW,
        },
        {"model_type": "deepseek_v3"},
        {},
        (f"{_DEEPSEEK[0]}{_DEEPSEEK[3]}hi {_DEEPSEEK[1]}",),
    ),
    "GPT-OSS": Variant(
        "python",
        {"added_tokens": stored(*_HARMONY_TOKENS), "pre_tokenizer": _LLAMA},
        {
            **_FAST,
            "added_tokens_decoder": {"0": token("<|endoftext|>")} | first(*_HARMONY_TOKENS),
            **{"bos_token": "<|startoftext|>", "eos_token": "<|return|>"},
            **{"pad_token": "<|endoftext|>", "extra_special_tokens": {}},
        },
        {"model_type": "gpt_oss"},
        {"chat_template.jinja": HARMONY},
        ("<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>final",),
    ),
    "GLM": Variant(
        "python",
        {"added_tokens": stored(*_GLM_TOKENS[1:])},
        {
            "tokenizer_class": "PreTrainedTokenizer",
            "added_tokens_decoder": {"0": token("<|endoftext|>")} | first(*_GLM_TOKENS[1:]),
            "additional_special_tokens": list(_GLM_TOKENS),
            **{"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
            **{"do_lower_case": False, "remove_space": False, "padding_side": "left"},
        },
        {"model_type": "glm4_moe"},
        {"chat_template.jinja": "[gMASK]<sop>" + CHATML},
        ("[gMASK]<sop><|user|>\nhi",),
    ),
    "Nemotron": Variant(
        "python",
        {
            "added_tokens": stored("<unk>", "<s>", "</s>", "[INST]", "<SPECIAL_10>"),
            "post_processor": around([("<s>", 4097)]),
        },
        {
            **_FAST,
            "added_tokens_decoder": first("<unk>", "<s>", "</s>", "[INST]", "<SPECIAL_10>"),
            **{**_LLAMA_ENDS, "add_bos_token": False, "clean_up_tokenization_spaces": False},
        },
        {"model_type": "nemotron_h"},
        {
            "chat_template.jinja": SHOW,
            "special_tokens_map.json": {name: token(text) for name, text in _LLAMA_ENDS.items()},
        },
        ("<SPECIAL_10>System\n<s>hi</s>",),
    ),
    "MiniMax": Variant(
        "python",
        {"added_tokens": stored("]~!b[", "[e~[", special=False)},
        {
            "tokenizer_class": "GPT2Tokenizer",
            "added_tokens_decoder": first("]~!b[", "[e~["),
            **{"bos_token": "]~!b[", "eos_token": "[e~[", "unk_token": "]!d~["},
            "add_prefix_space": False,
        },
        {"model_type": "minimax_m2"},
        {"chat_template.jinja": SHOW},
        ("]~!b[ hi [e~[",),
    ),
    "Qwen 3.5": Variant(
        "python",
        {"normalizer": {"type": "NFC"}, "pre_tokenizer": _QWEN, "added_tokens": stored(*_IM)},
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
        | {"added_tokens_decoder": first(*_IM)},
        {"model_type": "qwen3_5_moe"},
        {},
        ("हिन्दी e\u0301a",),
    ),
}

VARIANTS: Mapping[str, Variant] = {**_TOKENS, **_CLASSES, **_TEMPLATES, **_PUBLISHED}
