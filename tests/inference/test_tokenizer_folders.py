"""Compare tokenizers and templates with what transformers' AutoTokenizer makes of the same folders.

The answers of transformers are stored. `tests/reference/tokenizers.py` made them.
"""

import json

import numpy as np
import pytest
from support.files import tokenizer_folders as folders
from support.files.given import CHECKPOINTS

import jax_nvfp4_moe as nvfp4

STORED = json.loads((CHECKPOINTS / "tokenizers.json").read_text(encoding="utf-8"))["folders"]


def chat(tokenizer, talk, arguments):
    """Return a rendered conversation, or None if the template fails."""
    try:
        return tokenizer.chat(folders.TALKS[talk], **arguments)
    except nvfp4.CheckpointError:
        return None


def random_ids(tokenizer):
    """Return ids in an order that no text has.

    If tokens stand for single bytes, a byte that is no character changes the text before it, which
    a stream has shown already. Such tokens are left out.
    """
    known = [i for text, i in tokenizer.encoder.get_vocab().items() if not text.startswith("<0x")]
    return np.random.default_rng(0).choice(sorted(known), 150).tolist()


def test_every_folder_has_an_answer():
    assert list(STORED) == list(folders.VARIANTS)
    assert len(STORED) >= 60


@pytest.mark.parametrize("name", folders.VARIANTS)
def test_a_folder_is_read_as_by_transformers(name, tmp_path):
    variant, expected = folders.VARIANTS[name], STORED[name]
    folders.write(variant, tmp_path)
    tokenizer = nvfp4.load_tokenizer(tmp_path)
    texts = [*folders.TEXTS, *variant.texts]
    ids = [tokenizer.encode(text) for text in texts]
    assert all(row.dtype == np.int32 for row in ids)
    ids = [row.tolist() for row in ids]
    assert ids == expected["ids"]
    bare = [tokenizer.encode(text, special=False).tolist() for text in texts]
    assert bare == expected.get("bare", ids)
    assert [tokenizer.decode(row) for row in ids] == expected.get("decoded", texts)
    assert folders.added_tokens(tokenizer.encoder) == expected["added"]
    assert tokenizer.encoder.get_vocab_size() == expected["size"]
    assert tokenizer.special == expected["special"]
    assert tokenizer.stop_ids == (() if expected["eos"] is None else (expected["eos"],))
    long = [token for row in ids * 3 for token in row]
    for some in (long, random_ids(tokenizer)):
        assert "".join(tokenizer.decode_stream(iter(some))) == tokenizer.decode(some)
    chats = {key: chat(tokenizer, *given) for key, given in folders.CHATS.items()}
    assert chats == expected.get("chats", dict.fromkeys(folders.CHATS))
