"""`python -m tests.reference.tekken`: what mistral-common makes of small ``tekken.json`` files.

Trains a vocabulary on the texts below and on this repository's README, writes it in each form of
`tests/support/files/tekken_files.py`, and stores vocabulary, texts and token ids in
``tests/checkpoints/tekken.json``. Needs mistral-common.
"""

import base64
import importlib.metadata
import json
import pathlib
import tempfile

from tests.support.files import tekken_files

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZE = 900
TEXTS = (
    "",
    "import jax\n\n\ndef layer(x):\n    return nvfp4.NVFP4Linear(2048, 768)(x)  # [b, n]\n",
    "NVFP4 makes a 35B model fit where a 9B one did.",
    "naïve café, Łódź, Straße, ŒUVRE\tÅngström  \r\n  x\u00a0y\u2003z   ",
    "漢字かな交じり文。한국어 텍스트 ไทย العربية עברית हिन्दी",
    "🙂👩‍👩‍👧 ½ ² ①  3.14159e-7 0xFF",
    "HTTPServer XMLHttpRequest iOS McDonald's don't I'LL",
    "a/b//c\n/d\n\n\n  \n",
    "\u0000\u0001\u007f\u0080",
)


def train() -> list[str]:
    """Return the bytes of each token in base64, in the order in which merges make them."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(tekken_files.PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=SIZE, initial_alphabet=alphabet, show_progress=False)
    encoder.train_from_iterator([*TEXTS, (ROOT / "README.md").read_text(encoding="utf-8")], trainer)
    merges = json.loads(encoder.to_str())["model"]["merges"]
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes(byte_of[c] for c in "".join(pair)) for pair in merges]
    return [base64.b64encode(token).decode() for token in dict.fromkeys(tokens)]


def ask(form: str, vocab: list[str]) -> list[list[int]]:
    """Return the ids that mistral-common gives each text."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    with tempfile.TemporaryDirectory() as name:
        tekken_files.write(pathlib.Path(name), tekken_files.contents(form, vocab))
        tokenizer = Tekkenizer.from_file(pathlib.Path(name) / "tekken.json")
    return [tokenizer.encode(text, bos=True, eos=False) for text in TEXTS]


def main() -> None:
    """Make the vocabulary, ask mistral-common, and store both."""
    vocab = train()
    stored = {
        "mistral_common": importlib.metadata.version("mistral_common"),
        "vocab": vocab,
        "texts": TEXTS,
        "ids": {form: ask(form, vocab) for form in tekken_files.FORMS},
    }
    text = json.dumps(stored, ensure_ascii=True, separators=(",", ":"))
    tekken_files.STORED.write_text(text + "\n", encoding="utf-8")
    print(f"{len(vocab)} tokens, {sum(map(len, stored['ids']['newer']))} ids")


if __name__ == "__main__":
    main()
