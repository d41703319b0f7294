"""Test the tables of families and of activations, which the guides take from the code."""

import re

import tables

from jax_nvfp4_moe.models.loading import ARCHITECTURES
from jax_nvfp4_moe.numerics.activations import ACTIVATIONS, ALIASES


def names(row):
    return re.findall(r"`(\w+)`", row)


def test_the_table_of_families_has_each_architecture_once():
    rows = tables.families().splitlines()[2:]
    assert sorted(name for row in rows for name in names(row)) == sorted(ARCHITECTURES)
    # A variant shares the modules of another family, and still has a row of its own.
    assert "| Qwen3-MoE | `Qwen3MoeForCausalLM` |" in rows


def test_the_table_of_activations_has_each_name_once():
    rows = tables.activations().splitlines()[2:]
    assert [names(row)[0] for row in rows] == list(ACTIVATIONS)
    assert sorted(name for row in rows for name in names(row)[1:]) == sorted(ALIASES)
    assert "| `silu` | `swish` | gate, then up |  |" in rows
    assert "| `swigluoai` |  | alternate | alpha 1.702, beta 1, limit 7 |" in rows
    assert "| `relu2` | `relu2_no_mul` | no gate |  |" in rows
