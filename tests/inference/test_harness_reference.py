"""Test `HarnessModel` against HFLM, the class of lm-evaluation-harness for transformers.

tests/reference/harness.py stored what HFLM gives for a dequantized copy of the example.
"""

import json
import math

import pytest
from support.files.given import EXAMPLE, EXAMPLE_REFERENCE
from support.models import harness_cases as cases

import jax_nvfp4_moe as nvfp4

# The harness and its dependencies take tens of seconds to import.
pytestmark = [pytest.mark.lm_eval, pytest.mark.slow]
EXPECTED = json.loads((EXAMPLE_REFERENCE / "harness.json").read_text(encoding="utf-8"))
VALUES = {"None": None, "True": True, "False": False, "737": 737}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Return a function that makes a model with another tokenizer. All share one set of weights."""
    from jax_nvfp4_moe.inference import harness

    root = tmp_path_factory.mktemp("variants")
    folders = {name: cases.write_variant(EXAMPLE, root / name, name) for name in cases.VARIANTS}
    weights = nvfp4.load_model(EXAMPLE, scheme="w4a16", dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "load_model", lambda *_, **__: weights)
        yield lambda name, **options: harness.HarnessModel(str(folders[name]), **options)


def leaves(value, where=""):
    """Yield the path and the value of each number and text in nested lists and dictionaries."""
    if isinstance(value, (dict, list, tuple)):
        named = value.items() if isinstance(value, dict) else enumerate(value)
        for name, one in named:
            yield from leaves(one, f"{where}/{name}")
    else:
        yield where, value


def differences(expected, found):
    """Return where a result differs from HFLM's.

    Numbers may differ by 1e-4, and by 5e-7 of their size: HFLM computes log-probabilities and their
    sums in float32. For a text of -774 nats, that alone is 7e-5 away from a sum in float64 over the
    same logits.
    """
    expected, found = dict(leaves(expected)), dict(leaves(found))
    apart = {
        where: (found.get(where, "missing"), "expected", value)
        for where, value in expected.items()
        if not same(value, found.get(where, "missing"))
    }
    return apart | {where: "not expected" for where in found.keys() - expected.keys()}


def same(expected, found):
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(expected, found, rel_tol=5e-7, abs_tol=1e-4)
    return expected == found


@pytest.mark.parametrize("case", EXPECTED["tokens"])
def test_starts_of_texts(make, case):
    name, add, prefix = case.split()
    options = {
        "add_bos_token": VALUES[add],
        "prefix_token_id": json.loads(prefix.replace("None", "null")),
    }
    found = cases.tokens(make(name, **options))
    assert differences(EXPECTED["tokens"][case], found) == {}


@pytest.mark.parametrize("case", EXPECTED["scores"])
def test_scores_and_texts(make, case):
    name, add = case.split()
    options = {"add_bos_token": VALUES[add], "max_length": cases.MAX_LENGTH}
    found = cases.scores(make(name, batch_size=4, **options))
    assert differences(EXPECTED["scores"][case], found) == {}


@pytest.mark.parametrize("name", EXPECTED["chats"])
def test_chat_templates(make, name):
    found = cases.chats(make(name))
    assert differences(EXPECTED["chats"][name], found) == {}


@pytest.mark.parametrize("run", EXPECTED["tasks"])
def test_tasks(make, run, tmp_path):
    """The requests that the harness makes of local tasks, the answers and the metrics."""
    name, options = cases.RUNS[run]
    found = cases.run_tasks(make(name), tmp_path, options)
    assert differences(EXPECTED["tasks"][run], json.loads(json.dumps(found))) == {}
