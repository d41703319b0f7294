"""Test lm-evaluation-harness on the example: its evaluator and its command, with local tasks."""

import json
import math
import shutil

import numpy as np
import pytest
from support.files.checkpoint_edits import read_all
from support.files.given import EXAMPLE, EXAMPLE_REFERENCE
from support.models import harness_cases as cases

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.checkpoint.export import write_safetensors
from jax_nvfp4_moe.cli import app as cli

# The harness and its dependencies take tens of seconds to import.
pytestmark = [pytest.mark.lm_eval, pytest.mark.slow]

TEXT = (EXAMPLE_REFERENCE / "heldout.txt").read_text(encoding="utf-8")
CHOICES = """
task: python_ends
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{start}}"
target_delimiter: ""
doc_to_choice: "{{ends}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""
TEXTS = """
task: python_texts
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}]
"""
WRITES = """
task: python_writes
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{start}}"
doc_to_target: "{{end}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 24}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def harness():
    """Return the model. The import is local because the harness takes tens of seconds to import."""
    from jax_nvfp4_moe.inference.harness import HarnessModel

    return HarnessModel(str(EXAMPLE), scheme="w4a16", max_length=64, batch_size=3)


def instances(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


def log_likelihood(harness, context, continuation):
    """Compute one log-likelihood in float64, without a batch or padding; say if it is greedy."""
    logits = np.asarray(harness.model(np.asarray([[*context, *continuation]]))[0], np.float64)
    largest = logits.max(-1, keepdims=True)
    logits -= largest + np.log(np.exp(logits - largest).sum(-1, keepdims=True))
    rows = logits[len(context) - 1 : -1]
    value = sum(row[token] for row, token in zip(rows, continuation, strict=True))
    return value, rows.argmax(-1).tolist() == continuation


def test_log_likelihoods(harness):
    """Pairs of unequal length run in batches. One continuation is what the model would write."""
    encode = harness.tok_encode
    pairs = [
        ("import ", "numpy as np"),
        ("def f(x):\n    return", " x"),
        ("", "class"),
        ("x", " = 1"),
    ]
    prompt = encode("import jax\nimport jax.")
    fixed = {"max_new_tokens": 3, "stop_ids": ()}
    new = nvfp4.generate(harness.model, np.asarray([prompt]), **fixed)[0].tolist()
    pairs.append(("import jax\nimport jax.", harness.text_tokenizer.decode(new)))
    found = harness.loglikelihood(instances("loglikelihood", *pairs))
    for (context, continuation), (value, likeliest) in zip(pairs, found, strict=True):
        if context:
            left, right = harness._encode_pair(context, continuation)
        else:
            left, right = [harness.prefix_token_id], encode(continuation)
        expected, greedy = log_likelihood(harness, left, right)
        assert value == pytest.approx(expected, abs=1e-4)
        assert likeliest == greedy
    assert [greedy for _, greedy in found].count(True) >= 1


def test_a_long_text_in_windows(harness):
    """Each token is predicted once, from at most `max_length` tokens before it."""
    ids = harness.tok_encode(TEXT)[:150]
    text = harness.text_tokenizer.decode(ids)
    ids = harness.tok_encode(text)
    (found,) = harness.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
    whole, expected = [harness.prefix_token_id, *ids], 0.0
    done = 1
    while done < len(whole):
        end = min(done + 64, len(whole))
        start = max(0, end - 65)
        expected += log_likelihood(harness, whole[start:done], whole[done:end])[0]
        done = end
    assert found == pytest.approx(expected, abs=1e-3)


def test_the_mean_is_that_of_evaluate(harness):
    """Both predict all tokens but the first of one window of 64 tokens."""
    ids = harness.tok_encode(TEXT)[:64]
    ours = nvfp4.evaluate(harness.model, np.asarray(ids), window=64)["mean_cross_entropy"]
    ((value, _),) = harness._loglikelihood_tokens([(("", ""), ids[:1], ids[1:])])
    assert -value / 63 == pytest.approx(ours, rel=1e-6)


def test_generation_ends_at_a_stop_string(harness):
    options = {"until": ["\n"], "max_gen_toks": 24}
    contexts = ("import numpy as", "def add(a, b):\n    return", "for i in range(")
    found = harness.generate_until(
        instances("generate_until", *((context, options) for context in contexts))
    )
    for context, text in zip(contexts, found, strict=True):
        prompt = np.asarray([harness.tok_encode(context)])
        tokens = nvfp4.generate(
            harness.model, prompt, max_new_tokens=24, stop_ids=harness.text_tokenizer.stop_ids
        )[0]
        assert text == harness.text_tokenizer.decode(tokens.tolist()).split("\n")[0]
    assert found[0] == " np"


def test_the_command(harness, tmp_path, capsys):
    """The command runs three kinds of tasks from local files."""
    rows = [
        {"start": "import numpy as", "end": " np", "ends": [" np", " sq", "(((("]},
        {"start": "for i in", "end": " range", "ends": [" range", "))", " return"]},
        {"start": "def __init__", "end": "(self", "ends": ["(self", " = = =", "::"]},
    ]
    for row in rows:
        row["text"] = TEXT[:200]
    data = tmp_path / "data.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, task in (("choices", CHOICES), ("texts", TEXTS), ("writes", WRITES)):
        (tmp_path / f"{name}.yaml").write_text(task.replace("DATA", str(data)))
    with pytest.raises(SystemExit) as ended:
        cli.main(
            ["lm-eval", str(EXAMPLE), "--scheme", "w4a16", "--max-length", "256",
             "--tasks", "python_ends,python_texts,python_writes",
             "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
        )  # fmt: skip
    assert not ended.value.code
    assert "|python_ends" in capsys.readouterr().out
    (written,) = tmp_path.glob("out/**/results_*.json")
    results = json.loads(written.read_text())["results"]
    right = []
    for row in rows:
        parts = [harness._encode_pair(row["start"], end) for end in row["ends"]]
        right.append(np.argmax([log_likelihood(harness, *part)[0] for part in parts]) == 0)
    assert sum(right) >= 2
    assert results["python_ends"]["acc,none"] == np.mean(right)
    assert results["python_writes"]["exact_match,none"] >= 1 / 3
    model = nvfp4.load_model(EXAMPLE, scheme="w4a16", dtype="float32")
    tokenizer = nvfp4.load_tokenizer(EXAMPLE)
    ids = np.asarray([tokenizer.stop_ids[0], *tokenizer.encode(TEXT[:200], special=False)])
    nats = nvfp4.evaluate(model, ids, window=len(ids))["mean_cross_entropy"] * (len(ids) - 1)
    expected = math.exp(nats / len(TEXT[:200].encode()))
    assert results["python_texts"]["byte_perplexity,none"] == pytest.approx(expected, rel=1e-4)


def test_unknown_arguments_are_named():
    from jax_nvfp4_moe.inference.harness import HarnessModel

    with pytest.raises(
        TypeError, match=r"path, scheme, .*add_bos_token, .*; got add_bos=True, x='y'"
    ):
        HarnessModel(str(EXAMPLE), add_bos=True, x="y")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"add_bos_token": "yes"}, "add_bos_token: expected True, False or None; got 'yes'"),
        ({"batch_size": 0}, 'batch_size: expected a positive number or "auto", got 0'),
        ({"max_batch_size": "auto"}, "max_batch_size: expected a positive number"),
        ({"max_length": 2049}, "max_length: expected 1 to 2048, the positions of the model"),
        ({"prefix_token_id": 4096}, "prefix_token_id: expected an id from 0 to 4095, got 4096"),
    ],
)
def test_wrong_arguments(wrong, said):
    from jax_nvfp4_moe.inference.harness import HarnessModel

    with pytest.raises(ValueError, match=said):
        HarnessModel(str(EXAMPLE), **wrong)


@pytest.mark.parametrize(
    ("how", "rows"),
    [
        ({}, {1: 8, 4096: 8, 8192: 4, 100000: 1}),
        ({"batch_size": "auto:4", "max_batch_size": 32}, {1: 32, 4096: 8}),
        ({"batch_size": "3"}, {1: 3, 100000: 3}),
        ({"batch_size": 16, "max_batch_size": 4}, {1: 16}),
    ],
)
def test_what_the_harness_passes_to_every_model(how, rows):
    """`device` and `trust_remote_code` have no effect, and sizes of batches have theirs."""
    from jax_nvfp4_moe.inference.harness import HarnessModel

    more = {"device": "cuda:0", "max_batch_size": None, **how}
    harness = HarnessModel.create_from_arg_obj({"path": str(EXAMPLE)}, more)
    assert {tokens: harness._rows(tokens) for tokens in rows} == rows
    text = f"path={EXAMPLE},trust_remote_code=True,add_bos_token=True,prefix_token_id=7"
    harness = HarnessModel.create_from_arg_string(text, more)
    assert harness.tok_encode("import") == [0, 737]
    assert harness.prefix_token_id == 7
    assert harness.max_length == harness.model.config.max_positions


def test_a_text_that_does_not_fit_is_said(harness, caplog):
    """The first tokens are left out, as HFLM leaves them out, and the whole continuation counts."""
    harness.loglikelihood(instances("loglikelihood", ("x = 1", " + 2"), (TEXT[:900], " x")))
    harness.generate_until(instances("generate_until", (TEXT[:900], {"max_gen_toks": 2})))
    said = "are too long for max_length=64: their first tokens are left out"
    assert [m for m in caplog.messages if said in m] == [
        f"1 of 2 texts {said}",
        f"1 of 1 texts {said}",
    ]
    for wrong, count in ((TEXT[:900], r"\d\d\d"), ("", "0")):
        with pytest.raises(ValueError, match=f"expected 1 to 64 tokens .*, got {count}, of the"):
            harness.loglikelihood(instances("loglikelihood", ("x = 1", wrong)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"repetition_penalty": 1.1, "top_k": 5}, "got repetition_penalty=1.1, which is not impl"),
        ({"num_beams": 10, "typo": 1}, "got num_beams=10, typo=1, which is not implemented"),
        ({"max_gen_toks": 64}, "max_gen_toks: expected 1 to 63, fewer than the 64 tokens"),
    ],
)
def test_options_of_generation_that_are_refused(harness, options, said):
    good = ("x", {"max_gen_toks": 2, "num_beams": 1, "repetition_penalty": 1.0, "top_k": 0})
    with pytest.raises(ValueError, match=said):
        harness.generate_until(instances("generate_until", good, ("x", options)))
    assert len(harness.generate_until(instances("generate_until", good))) == 1


def test_windows_of_a_text_do_not_enter_the_cache_of_pairs(harness):
    class Hook:
        def __init__(self):
            self.seen = []

        def add_partial(self, kind, arguments, result):
            self.seen.append((kind, arguments))

    before, harness.cache_hook = harness.cache_hook, Hook()
    harness.loglikelihood_rolling(instances("loglikelihood_rolling", (TEXT[:400],)))
    harness.cache_hook, seen = before, harness.cache_hook.seen
    assert seen == [("loglikelihood_rolling", (TEXT[:400],))]


def test_named_chat_templates(tmp_path, caplog):
    """The harness renders the default template, whatever name it is given, and so do we."""
    from jax_nvfp4_moe.inference.harness import HarnessModel

    folder = cases.write_variant(EXAMPLE, tmp_path / "named", "named_chat")
    shutil.copy(EXAMPLE / "model.safetensors", folder)
    harness = HarnessModel(str(folder))
    assert harness.chat_template("short") == harness.text_tokenizer.templates["short"]
    assert harness.apply_chat_template([{"role": "user", "content": "x"}]).startswith("hash# user")
    assert "renders messages with the default template" in caplog.text
    with pytest.raises(ValueError, match="one of default, short; got 'none'"):
        harness.chat_template("none")
    plain = cases.write_variant(EXAMPLE, tmp_path / "chat", "strict_chat")
    shutil.copy(EXAMPLE / "model.safetensors", plain)
    assert HarnessModel(str(plain)).chat_template("other") == cases.STRICT
    assert "one chat template without a name" in caplog.text


def command(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["lm-eval", *map(str, arguments)])
    return ended.value.code or 0


def test_the_command_says_what_is_wrong(capsys):
    assert command(EXAMPLE, "--tasks", "no_such_task") == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: lm-evaluation-harness: ValueError: Tasks not found: no_such_task"
    )
    assert command(EXAMPLE, "--tasks", "x", "--no_such_option", "3") == 2
    assert "unrecognized arguments: --no_such_option 3" in capsys.readouterr().err


def test_scores_that_are_not_finite(tmp_path, capsys, caplog):
    """The command passes its options on, prints the results, and exits with status 1."""
    tensors = read_all(EXAMPLE)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.embed_tokens.weight"][4000, 0] = float("nan")  # also a column of the head
    folder = tmp_path / "broken"
    cases.write_variant(EXAMPLE, folder, "bos")
    write_safetensors(folder / "model.safetensors", tensors)
    data = tmp_path / "data.json"
    rows = ({"start": "import numpy as", "ends": [" np", " sq"]},) * 3
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "choices.yaml").write_text(CHOICES.replace("DATA", str(data)))
    how = ("--tasks", "python_ends", "--include_path", tmp_path, "--limit", 2, "--batch_size", 2)
    how += ("--output_path", tmp_path / "out", "--system_instruction", "import os")
    assert command(folder, *how, "--no-add-bos-token") == 1
    assert "4 of 4 log-likelihoods are not finite" in caplog.text
    assert "|python_ends" in capsys.readouterr().out
    (written,) = tmp_path.glob("out/**/results_*.json")
    results = json.loads(written.read_text())
    assert results["system_instruction"] == "import os"
    assert results["config"]["batch_size"] == "2"
    assert results["config"]["limit"] == 2
    assert results["config"]["model_args"]["add_bos_token"] is False


def test_without_the_harness_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.__main__", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["lm-eval", str(EXAMPLE), "--tasks", "x"])
    assert ended.value.code == 2
    assert 'pip install "jax-nvfp4-moe[eval]"' in capsys.readouterr().err
