"""Test that patterns of a file match as `re` and `fnmatch` do, in a time linear in the name."""

import fnmatch
import random
import re
import time
import warnings

import pytest

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.checkpoint.formats.exclusions import Exclusions
from jax_nvfp4_moe.checkpoint.formats.pattern_lists import Entries, Wildcard
from jax_nvfp4_moe.checkpoint.formats.regular_expressions import PatternError, RegularExpression

LITERALS = ("a", "b", ".", "c", "_", "1", "{")
ESCAPES = (r"\.", r"\d", r"\w", r"\s", r"\W", r"\x61", r"\n", r"\-")
SETS = ("[ab]", "[^a]", "[a-c]", "[]a]", "[^]a]", r"[\d.]", r"[\]a]", "[.]", r"[a\\-c]")
ANCHORS = ("^", "$", r"\b", r"\B", r"\A", r"\Z")
REPEATS = ("*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "+?", "??", "{0}", "{,}", "{1,2}?")


class Draw:
    """Draws small patterns and texts."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def choice(self, depth):
        return "|".join(self.sequence(depth) for _ in range(self.random.choice((1, 1, 1, 2, 3))))

    def sequence(self, depth):
        items = ""
        for _ in range(self.random.randrange(4)):
            items += self.item(depth)
            if self.random.random() < 0.4:
                items += self.random.choice(REPEATS)
        return items

    def item(self, depth):
        kinds = [LITERALS] * 5 + [ESCAPES, SETS, ANCHORS]
        if depth and self.random.random() < 0.35:
            name = f"(?P<x{self.random.randrange(10**9)}>"
            opening = self.random.choice(("(", "(?:", name, "(?=", "(?!"))
            return f"{opening}{self.choice(depth - 1)})"
        return self.random.choice(self.random.choice(kinds))

    def text(self):
        return "".join(self.random.choice("aabbc.1_A\n-") for _ in range(self.random.randrange(7)))


@pytest.mark.parametrize("flags", ["", "(?i)", "(?s)", "(?is)"])
def test_regular_expressions_match_as_those_of_python(flags):
    draw, compared, matched = Draw(flags), 0, 0
    while compared < 6000:
        pattern = flags + draw.choice(2)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = re.compile(pattern)
        except re.error:
            continue
        found = RegularExpression(pattern)
        for _ in range(8):
            text = draw.text()
            if r"\B" in pattern and not text:
                continue  # Python 3.14 changed what this means
            match = expected.match(text) is not None
            assert found.match(text) == match, (pattern, text)
            assert not match or found.required in text
            compared, matched = compared + 1, matched + match
    assert 0.1 < matched / compared < 0.9


def test_simple_expressions_match_as_those_of_python():
    draw, matched = random.Random(0), 0
    parts = ("a", "b", r"\.", ".*", ".+", r"\d+", r"\w*", r"\w", ".", "_", r"\-")
    for _ in range(3000):
        body = "".join(draw.choice(parts) for _ in range(draw.randrange(6)))
        pattern = draw.choice(("", "^")) + body + draw.choice(("", "$"))
        text = "".join(draw.choice("aabb.1_-\n") for _ in range(draw.randrange(9)))
        match = re.match(pattern, text) is not None
        assert bool(Entries([f"re:{pattern}"], "x").find([text])) == match, (pattern, text)
        matched += match
    assert matched > 300


def test_wildcards_match_as_those_of_fnmatch():
    draw, matched = random.Random(0), 0
    for _ in range(5000):
        pattern = "".join(draw.choice("ab.*?[]!-c") for _ in range(draw.randrange(8)))
        text = "".join(draw.choice("aabb.c[]") for _ in range(draw.randrange(7)))
        found, match = Wildcard(pattern), fnmatch.fnmatchcase(text, pattern)
        assert found.match(text) == match, (pattern, text)
        assert not match or found.required in text
        matched += match
    assert matched > 100


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        ("(?<=a)b", "a look-behind"),
        ("(?<!a)b", "a look-behind"),
        (r"(a)\1", "a back-reference"),
        ("(?P<x>a)(?P=x)", "a back-reference"),
        ("(?>a)", "an atomic group"),
        ("a++", "a possessive quantifier"),
        ("(a)?(?(1)b|c)", "a condition on a group"),
        ("(?i:a)", "flags inside"),
        ("(?x)a", "flags inside"),
        ("a(?#b)", "a comment"),
        ("(", "is no regular expression: missing"),
        ("(?:(?:a{1,100}){1,100}){1,100}", "too large"),
        ("(?:(?:){65535}){65535}", "too large"),
        ("a" * 20_000, "20000 characters"),
        ("(" * 5000 + ")" * 5000, "is no regular expression"),
    ],
)
def test_patterns_that_are_refused_name_their_part(pattern, part):
    with pytest.raises(PatternError, match=re.escape(part)):
        RegularExpression(pattern)


def seconds(run):
    started = time.process_time()
    run()
    return time.process_time() - started


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|aa)*b", ".*.*.*.*.*.*.*x", ".*a.*a.*a.*a.*a.*a$", "(?!.*.*.*.*b)a*c", "(.*)*x"],
)
def test_matching_takes_linear_time(pattern):
    """`re` takes a time that is exponential in the text, or a high power of it."""
    expression = RegularExpression(pattern)
    assert seconds(lambda: expression.match("a" * 100_000 + "b")) < 5


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|aa)*b", "(a|a)" * 40 + "b", "a?" * 40 + "b", ".*a.*a.*a.*a.*a.*a$", "(a*b?)*c"],
)
def test_short_names_take_little_time_too(pattern):
    """`re` matches short names, but not by patterns with which it would backtrack for long."""
    entries = Entries([f"re:{pattern}"], "x")
    assert seconds(lambda: entries.find(["a" * 100 + "d"])) < 2


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        ("^(?!.*vision).*proj", "model.layers.0.q_proj", "model.vision.0.q_proj"),
        (r"(?=model\.)(?!model\.visual).*", "model.layers", "model.visual.x"),
        (r".*layers\.(?!0\.)\d+\.mlp", "model.layers.10.mlp", "model.layers.0.mlp"),
        (r".*a.*b.*c.*d.*e.*", "abcde", "abced"),
        ("(?i).*LM_HEAD", "model.lm_head", "model.head"),
    ],
)
def test_patterns_as_recipes_have_them(pattern, matches, others):
    entries = Entries([f"re:{pattern}"], "x")
    assert entries.find([matches]) == [0]
    assert entries.find([others]) == []


@pytest.mark.parametrize(
    "pattern",
    [
        "*.layers.{}.*gate*",
        "model.layers.{}.mlp.gate*",
        "*a*{}*b*c*d*e*",
        "*layers.*.mlp.experts.{}.up_proj*",
        "*[0-9].{}",
    ],
)
def test_many_wildcards_take_little_time(pattern):
    count = 20_000
    names = [f"model.layers.{layer}.mlp.experts.3.gate_proj" for layer in range(200)]

    def run():
        excluded = Exclusions([pattern.format(n) for n in range(count)], "x")
        found.extend(name for name in names if excluded.find(name))

    found: list[str] = []
    assert seconds(run) < 4
    few = [pattern.format(n) for n in range(len(names))]
    assert found == [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in few)]


def test_many_regular_expressions_take_little_time():
    patterns = [rf"re:.*layers\.{n}\..*gate.*" for n in range(50_000)]
    patterns += [f"re:.*(gate|up)_{n}.*" for n in range(500)]

    def run():
        entries = Entries(patterns, "x")
        assert entries.find(["model.layers.70.mlp.gate_proj"]) == [70]
        assert entries.find(["up_499"]) == [50_004, 50_049, 50_499]

    assert seconds(run) < 20


def test_wildcards_that_nothing_tells_apart_are_refused():
    patterns = [f"*.[{n}]*experts*z" for n in range(2000)]
    with pytest.raises(
        CheckpointError, match="2000 patterns have no longer literal text than 'exp"
    ):
        Exclusions(patterns, "config.json: ignore")
    with pytest.raises(CheckpointError, match=r"config\.json: ignore: 1001 patterns"):
        Entries(["re:(a|b)"] * 1001, "config.json: ignore")


def test_parts_of_names_exclude_whole_components():
    excluded = Exclusions([f"x{n}.y" for n in range(100_000)] + ["mlp.gate"], "x", parts_match=True)
    assert excluded.find("model.layers.0.mlp.gate") == "x 'mlp.gate'"
    assert excluded.find("model.layers.0.mlp.gate_proj") is None
    assert excluded.find("a.x77.y.b") == "x 'x77.y'"
