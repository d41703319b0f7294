"""Write small ``tekken.json`` files, in the older form and in the newer one."""

import json
import pathlib
from typing import Any

STORED = pathlib.Path(__file__).resolve().parents[2] / "checkpoints" / "tekken.json"
# That of Mistral's files.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Name -> version, number of special tokens, and those that the file names. Files of older versions
# name none.
FORMS: dict[str, tuple[str, int, tuple[str, ...] | None]] = {
    "older": ("v3", 24, None),
    "newer": ("v13", 12, ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>", "[THINK]")),
}
KEPT = 700  # tokens beside the special ones; the file has more


def contents(form: str, vocab: list[str]) -> dict[str, Any]:
    """Return the ``tekken.json`` of a form. `vocab` has the bytes of each token in base64."""
    version, count, special = FORMS[form]
    tokens = [{"rank": i, "token_bytes": v, "token_str": None} for i, v in enumerate(vocab)]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": KEPT + count,
        "default_num_special_tokens": count,
        "version": version,
    }
    if special is None:
        return {"config": config, "vocab": tokens}
    named = [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(special)]
    return {"config": config, "vocab": tokens, "special_tokens": named}


def write(folder: pathlib.Path, values: dict[str, Any]) -> None:
    """Write ``tekken.json`` to a folder."""
    (folder / "tekken.json").write_text(json.dumps(values), encoding="utf-8")
