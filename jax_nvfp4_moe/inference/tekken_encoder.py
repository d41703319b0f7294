"""Make a tokenizer of the library `tokenizers` from ``tekken.json``.

Both are byte-level BPEs. The file gives tokens an order, and `tokenizers` gives merges one: a merge
has the rank of the token that it makes. Words that are tokens are not merged at all.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.checkpoint.tekken import BEGIN, END, PAD, TEKKEN, UNKNOWN, read_tekken
from jax_nvfp4_moe.inference.special_tokens import SpecialTokens
from jax_nvfp4_moe.inference.tokenizer_faults import one_line

if TYPE_CHECKING:
    import tokenizers

_NAMED = {"bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN, "pad_token": PAD}


def read_encoder(folder: pathlib.Path) -> tuple["tokenizers.Tokenizer", SpecialTokens]:
    """Return the tokenizer of ``tekken.json`` and its special tokens.

    A text begins with ``<s>``, as in the ``tokenizer.json`` that Mistral publishes for the same
    models. Special tokens in a text become their ids.

    Args:
      folder: the checkpoint's folder.

    Raises:
      CheckpointError: the file cannot be read.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    tekken = read_tekken(folder)
    vocabulary = {text: i for i, text in enumerate(tekken.special)}
    texts = [_text_of(token) for token in tekken.tokens]
    # A token with the text of a special one cannot occur: that text becomes the special token.
    hidden = {i for i, text in enumerate(texts) if text in vocabulary}
    count = len(tekken.special)
    vocabulary |= {text: count + i for i, text in enumerate(texts) if i not in hidden}
    merged = _merges(tekken.tokens, texts)
    merges = [(left, right) for whole, left, right in merged if whole not in hidden]
    encoder = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    try:
        pattern = tokenizers.Regex(tekken.pattern)
    except Exception as error:  # the binding raises plain `Exception`
        raise CheckpointError([f"{TEKKEN}: config.pattern: {one_line(error)}"]) from None
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    encoder.decoder = decoders.ByteLevel()
    added = [tokenizers.AddedToken(text, special=True, normalized=False) for text in tekken.special]
    encoder.add_special_tokens(added)
    named = {name: text for name, text in _NAMED.items() if text in tekken.special}
    if BEGIN in tekken.special:
        encoder.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A",
            pair=f"{BEGIN} $A {BEGIN}:1 $B:1",
            special_tokens=[(BEGIN, tekken.special.index(BEGIN))],
        )
    return encoder, SpecialTokens(named, (), {})


def _merges(tokens: Sequence[bytes], texts: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yield (rank of the merged token, left text, right text), in the order of merges.

    A token may come from several pairs. Those whose parts come first are tried first.
    """
    ranks = {token: i for i, token in enumerate(tokens)}
    for i, token in enumerate(tokens):
        pairs: list[tuple[int, int]] = []
        for cut in range(1, len(token)):
            left = ranks.get(token[:cut])
            if left is not None and (right := ranks.get(token[cut:])) is not None:
                pairs.append((left, right))
        for left, right in sorted(pairs):
            yield i, texts[left], texts[right]


def _characters() -> list[str]:
    """Return the character that stands for each byte in a byte-level BPE.

    Printable characters of Latin-1 stand for themselves, the other bytes for those from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_CHARACTERS = _characters()


def _text_of(token: bytes) -> str:
    """Return the characters that stand for the bytes of a token."""
    return "".join([_CHARACTERS[byte] for byte in token])
