"""A tokenizer of single letters, for small checkpoints that have none."""

import json

TEXT = "TheQuickBrownFoxJumpsOverTheLazyDog"


def write_tokenizer(folder):
    """Write a tokenizer with a letter for each id, from A on, into the folder of a checkpoint."""
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    letters = {chr(ord("A") + i): i for i in range(size)}
    model = {"type": "WordLevel", "vocab": letters, "unk_token": "A"}
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    tokenizer = {"version": "1.0", "model": model, "pre_tokenizer": split, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
