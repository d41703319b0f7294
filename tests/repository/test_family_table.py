"""Test the table of families, which the guide on loading takes from the files of `models`."""

import re

import tables

from jax_nvfp4_moe.models.loading import ARCHITECTURES


def test_the_table_of_families_has_each_architecture_once():
    rows = tables.families().splitlines()[2:]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(ARCHITECTURES)
    # A variant may share the modules of another family, and still has a row of its own.
    assert "| Qwen3-MoE | `Qwen3MoeForCausalLM` |" in rows
    assert sum("`Qwen3VLMoeForConditionalGeneration`" in row for row in rows) == 1
