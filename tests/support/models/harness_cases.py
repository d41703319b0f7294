"""What `HarnessModel` and HFLM, the class of lm-evaluation-harness for transformers, both compute.

``tests/reference/harness.py`` stores what HFLM gives, and test_harness_reference.py compares what
`HarnessModel` gives. Importing this module needs neither the harness nor torch nor jax.
"""

import copy
import json
import pathlib
import shutil

TESTS = pathlib.Path(__file__).parents[2]
EXAMPLE = TESTS.parent / "jax_nvfp4_moe/examples/tiny-python-moe"
TEXT = (TESTS / "checkpoints/tiny-python-moe-reference/heldout.txt").read_text(encoding="utf-8")
END, BEGIN, BEGIN_ID = "<|endoftext|>", "hash", 4095  # BEGIN is the last token of the vocabulary
MAX_LENGTH = 64

CHAT = (
    "{{ bos_token }}{% for m in messages %}# {{ m.role }}\n{{ m.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}# assistant\n{% endif %}"
)
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "# {{ m.role }}\n{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)


def _around(before=(), after=()):
    """Return a post-processor that puts special tokens around a text."""
    ids = {END: 0, BEGIN: BEGIN_ID}

    def piece(name):
        return {"SpecialToken": {"id": name, "type_id": 0}}

    text, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    named = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in (*before, *after)}
    return {
        "type": "TemplateProcessing",
        "single": [*map(piece, before), text, *map(piece, after)],
        "pair": [text, second],
        "special_tokens": named,
    }


def _added(name, token):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": name, "special": True, **flags}


_OWN = {"added_tokens": [_added(END, 0), _added(BEGIN, BEGIN_ID)]}
_ADDS_OWN = _OWN | {"post_processor": _around([BEGIN])}
_NAMED = [{"name": "default", "template": CHAT}, {"name": "short", "template": STRICT}]
# Name -> new entries of tokenizer.json, and of tokenizer_config.json; None removes an entry.
VARIANTS = {
    "plain": ({}, {}),
    "bos": ({"post_processor": _around([END])}, {}),
    "bos_and_eos": ({"post_processor": _around([END], [END])}, {}),
    "other_bos": (_OWN, {"bos_token": BEGIN}),
    "adds_other_bos": (_ADDS_OWN, {"bos_token": BEGIN}),
    "no_bos": ({}, {"bos_token": None}),
    "chat": (_ADDS_OWN, {"bos_token": BEGIN, "chat_template": CHAT}),
    "strict_chat": ({}, {"chat_template": STRICT}),
    "named_chat": (_OWN, {"bos_token": BEGIN, "chat_template": _NAMED}),
}


def write_variant(source, folder, name):
    """Copy a checkpoint with another tokenizer and without its weights."""
    folder.mkdir(parents=True)
    for file in source.glob("*.json"):
        shutil.copy(file, folder)
    for file, edit in zip(("tokenizer.json", "tokenizer_config.json"), VARIANTS[name], strict=True):
        contents = json.loads((folder / file).read_text(encoding="utf-8")) | edit
        contents = {key: value for key, value in contents.items() if key not in edit or value}
        (folder / file).write_text(json.dumps(contents), encoding="utf-8")
    return folder


BEGUN = tuple(f"{name}import jax" for name in (END, BEGIN))
STARTS = ("", "import jax", " x = 1  ", *BEGUN, "é\n\n\tλ", "# a\n")
# `add_bos_token` and `prefix_token_id`. With True and a prefix, HFLM adds no bos_token to a text
# that begins with the prefix, where `HarnessModel` adds it exactly once.
OPTIONS = ((None, None), (True, None), (False, None), (None, 737), (False, 737))
SCORED = (
    *(("plain", None), ("plain", True), ("bos", None), ("bos", True), ("bos", False)),
    *(("adds_other_bos", None), ("no_bos", None)),
)


def tokens(lm):
    """Return how a model starts and cuts texts."""
    return {
        "prefix_token_id": lm.prefix_token_id,
        "eot_token_id": lm.eot_token_id,
        "max_length": lm.max_length,
        "ids": [lm.tok_encode(text) for text in STARTS],
        "without": [lm.tok_encode(text, add_special_tokens=False) for text in STARTS],
        "with": lm.tok_encode("import jax", add_special_tokens=True),
        "cut": lm.tok_encode(TEXT[:200], left_truncate_len=7),
    }


PAIRS = (
    ("import ", "numpy as np"),
    ("def f(x):\n    return", " x"),
    ("for i in", " range(10):\n        print(i)"),
    ("x =   ", "1"),
    ("", "class Layer:\n    pass"),
    ("", f"{END}import jax"),
    ("", f"{BEGIN}import jax"),
    ("import numpy as", " np"),
    ("import numpy as", " jnp"),
    ("import numpy as", " np\nimport os"),
    (TEXT[:2000], TEXT[2000:2040]),
    (TEXT[3000:3090], TEXT[3090:3200]),
    (f"{END}import", " os"),
)
WHOLE = ("x = 1", TEXT[:300], TEXT[500:1200], "", f"{END}import os\n", TEXT[2000:2600])
GENERATED = (
    ("import numpy as", {"until": ["\n"], "max_gen_toks": 24}),
    ("def add(a, b):\n    return", {"until": "\n\n", "max_gen_toks": 30}),
    ("for i in range(", {"until": [":", ") :", ")"], "max_gen_toks": 24}),
    ("class A:\n    def __init__(self", {"until": ["f.", "self.x"], "max_new_tokens": 24}),
    ("import os\nimport", {"max_gen_toks": 20, "do_sample": False, "temperature": 0.7}),
    ("x = [1, 2", {"until": [END, "zzz"], "max_tokens": 12}),
    (TEXT[:3000], {"until": ["\n\n\n"], "max_gen_toks": 16}),
    ("def f(x):\n", {"until": [" return"], "max_gen_toks": 40, "num_beams": 1}),
)


def _requests(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


def scores(lm):
    """Return scores of pairs and of whole texts, with the tokens of the pairs, and new texts."""
    whole = [text for text in WHOLE if lm.tok_encode(text)]
    generated = [(text, dict(options)) for text, options in GENERATED]
    return {
        "pairs": [lm._encode_pair(*pair) for pair in PAIRS if pair[0]],
        "scores": [[*found] for found in lm.loglikelihood(_requests("loglikelihood", PAIRS))],
        "whole": lm.loglikelihood_rolling(
            _requests("loglikelihood_rolling", [(text,) for text in whole])
        ),
        "texts": lm.generate_until(_requests("generate_until", generated)),
    }


_SYSTEM = {"role": "system", "content": "Write Python. "}
_QUESTION = {"role": "user", "content": "Import numpy"}
_ANSWER = {"role": "assistant", "content": "import numpy as  "}
MESSAGES = (
    [_QUESTION],
    [_SYSTEM, _QUESTION],
    [_QUESTION, _ANSWER, {"role": "user", "content": " and os "}],
)
CONTINUED = ([_QUESTION, _ANSWER], [_SYSTEM, _QUESTION, _ANSWER | {"content": "import"}])


def chats(lm):
    """Return rendered messages and the sources of chat templates."""
    texts = [lm.apply_chat_template([*messages]) for messages in MESSAGES]
    continued = [
        lm.apply_chat_template([*messages], add_generation_prompt=False) for messages in CONTINUED
    ]
    return {
        "texts": texts,
        "continued": continued,
        "ids": [lm.tok_encode(text) for text in (*texts, *continued)],
        "templates": [lm.chat_template(name) for name in (True, "default", False)],
        "named": lm.chat_template("short"),
    }


def _task(name, kind, *metrics, target="{{ends[0]}}", text="Complete: {{start}}", **entries):
    return {
        **{"task": name, "output_type": kind, "doc_to_text": text, "doc_to_target": target},
        **{"dataset_path": "json", "test_split": "test", "fewshot_split": "train"},
        "fewshot_config": {"sampler": "first_n"},
        "metric_list": [{"metric": metric} for metric in metrics],
        **entries,
    }


def _writes(name, until, tokens, **entries):
    how = {"until": until, "max_gen_toks": tokens}
    return _task(name, "generate_until", "exact_match", generation_kwargs=how, **entries)


TASKS = (
    _task("choices", "multiple_choice", "acc", "acc_norm", target=0, doc_to_choice="{{ends}}"),
    _writes("writes", ["\n", ")"], 16),
    _writes("continues", ["\n"], 12, gen_prefix="# then"),
    _task("texts", "loglikelihood_rolling", "byte_perplexity", text="", target="{{text}}"),
)
ROWS = tuple(
    {"start": start, "ends": ends, "text": TEXT[300 * index : 300 * index + 280]}
    for index, (start, ends) in enumerate(
        (
            ("import numpy as", ["np", "sq", "(((("]),
            ("for i in", ["range", "))", "return x"]),
            ("def __init__", ["(self", "= = =", "::"]),
            ("if x is not", ["None", "in", "while"]),
        )
    )
)
# Variant and options of `lm_eval.simple_evaluate`.
_SYSTEM_TEXT = {"system_instruction": "Write Python."}
_CHAT = {"apply_chat_template": True, "fewshot_as_multiturn": True}
_SHORT = {"gen_kwargs": "max_gen_toks=6"}
RUNS = {
    "plain": ("plain", {}),
    "few_shot": ("bos", {"num_fewshot": 2, "limit": 2, **_SHORT}),
    "system": ("adds_other_bos", {"num_fewshot": 1, **_SYSTEM_TEXT, **_SHORT}),
    "chat": ("chat", {"num_fewshot": 2, **_CHAT, **_SYSTEM_TEXT, **_SHORT}),
    "chat_in_one_turn": (
        "strict_chat",
        {"num_fewshot": 1, **_CHAT, "fewshot_as_multiturn": False, **_SHORT},
    ),
    "named_chat": ("named_chat", {"apply_chat_template": "default", **_SYSTEM_TEXT, **_SHORT}),
}


def run_tasks(lm, folder, options):
    """Return the requests that the harness makes of local tasks, the answers and the metrics."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    data = folder / "rows.json"
    data.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    files = {"data_files": {"train": str(data), "test": str(data)}}
    # The harness writes its options into the tasks that it gets.
    tasks = [copy.deepcopy(task) | {"dataset_kwargs": files} for task in TASKS]
    own = {"tasks": tasks, "task_manager": TaskManager(include_defaults=False)}
    found = lm_eval.simple_evaluate(lm, **own, bootstrap_iters=0, **options)
    assert found is not None
    answers = {}
    for name in (task["task"] for task in TASKS):
        metrics, samples = found["results"][name], found["samples"][name]
        answers[name] = {
            "samples": [[sample["arguments"], sample["resps"]] for sample in samples],
            "metrics": {key: value for key, value in metrics.items() if isinstance(value, float)},
        }
    return answers
