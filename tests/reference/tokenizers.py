"""`python -m tests.reference.tokenizers`: what transformers makes of small tokenizer folders.

Writes each folder of `tests/support/files/tokenizer_folders.py`, loads it with AutoTokenizer, and
stores in ``tests/checkpoints/tokenizers.json`` its token ids, decoded texts, special tokens and
rendered templates.
"""

import argparse
import importlib.metadata
import json
import logging
import pathlib
import tempfile
from typing import Any

from tests.support.files import tokenizer_folders as folders

STORED = pathlib.Path(__file__).resolve().parents[1] / "checkpoints" / "tokenizers.json"


def answers(variant: folders.Variant, folder: pathlib.Path) -> dict[str, Any]:
    """Return what AutoTokenizer makes of a folder."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [*folders.TEXTS, *variant.texts]
    ids = [tokenizer.encode(text) for text in texts]
    bare = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    decoded = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    found = {
        "class": type(tokenizer).__name__,
        "size": len(tokenizer),
        "special": tokenizer.special_tokens_map,
        "eos": tokenizer.eos_token_id,
        "added": folders.added_tokens(tokenizer.backend_tokenizer),
        "ids": ids,
        **({} if bare == ids else {"bare": bare}),
        **({} if decoded == texts else {"decoded": decoded}),
    }
    chats = {name: chat(tokenizer, *given) for name, given in folders.CHATS.items()}
    return found | ({} if tokenizer.chat_template is None else {"chats": chats})


def chat(tokenizer: Any, talk: str, arguments: dict[str, Any]) -> str | None:
    """Return a rendered conversation, or None if the template fails."""
    try:
        messages = folders.TALKS[talk]
        return tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    except Exception as error:  # templates may raise anything
        logging.info("%s: %s", type(error).__name__, error)
        return None


def main() -> None:
    """Ask transformers about every folder, and store the answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="folders to print; none: store all")
    parser.add_argument("--output", type=pathlib.Path, default=STORED)
    given = parser.parse_args()
    found = {}
    for name in given.names or folders.VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            variant = folders.VARIANTS[name]
            folders.write(variant, pathlib.Path(folder))
            found[name] = answers(variant, pathlib.Path(folder))
    if given.names:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    packages = {name: importlib.metadata.version(name) for name in ("transformers", "tokenizers")}
    text = f'{{"versions": {json.dumps(packages)},\n"folders": {{\n' + ",\n".join(lines) + "\n}}\n"
    given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
