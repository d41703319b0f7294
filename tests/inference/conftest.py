"""Folders with the files of a tokenizer, which tests change."""

import json

import pytest
from support.files.given import EXAMPLE

from jax_nvfp4_moe.inference.tokenizer import load_tokenizer


@pytest.fixture
def folder(tmp_path):
    """Return a folder with the tokenizer of the example, and nothing else."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((EXAMPLE / name).read_bytes())
    return tmp_path


@pytest.fixture
def load_with(folder):
    """Return a function that writes JSON files into `folder`, and loads its tokenizer."""

    def load(**files):
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        return load_tokenizer(folder)

    return load
