"""Test that README and guides have no measured number that stands there by hand.

A table or a figure that ``docs/tables.py`` writes has its numbers from a result or from a record of
an experiment. A number in a sentence would stay when the next run gives another one.
"""

import re

import figures
import measurements
import pytest
import tables
from support.files.given import ROOT

pytestmark = pytest.mark.every_case  # each page has other figures

PAGES = {path.relative_to(ROOT).as_posix(): path for path in tables.pages()}
# Words of a page that look like a measurement and are a stated fact -> why. Keep it short.
STATED: dict[str, dict[str, str]] = {
    "docs/guides/formats.md": {
        "linear layers with blocks of 128": "bytes for each weight, which follow from the format",
    },
    "docs/guides/run_a_model.md": {
        "less than 20 ms": "a limit in the code, which decides how many tokens come at once",
    },
}


def check(text, stated=()):
    """Return the measurements that stand by hand, and the stated facts that stand no more."""
    found = measurements.find(text)
    by_hand = [words for words in found if not any(fact in words for fact in stated)]
    return by_hand, [fact for fact in stated if not any(fact in words for words in found)]


@pytest.mark.parametrize("page", PAGES)
def test_numbers_of_a_page_come_from_results(page):
    """Write a table or a figure instead, or drop the number."""
    text = PAGES[page].read_text(encoding="utf-8")
    assert check(text, STATED.get(page, {})) == ([], [])


def test_a_stated_fact_is_on_a_page_and_has_a_reason():
    assert STATED.keys() <= PAGES.keys()
    assert all(reason for facts in STATED.values() for reason in facts.values())


def test_a_stated_fact_excuses_itself_alone():
    text = "JAX stores what took one second to compile.\n\n| a | 1.33 |\n"
    fact = "took one second"
    assert check(text, {fact: "JAX's own limit"}) == (["| a | 1.33 |"], [])
    assert check("It is fast.", {fact: "JAX's own limit"}) == ([], [fact])


@pytest.mark.parametrize(
    "sentence",
    [
        "A step takes 1524 us at batch 1.",
        "Loading took\n22.7 s from a cold disk.",
        "The tests take about 7 minutes on two cores.",
        "Between two kernels, 0.5 to 1.4 us pass.",
        "It decodes 7,661 tokens/s with 64 texts.",
        "It decodes 656 tokens a second.",
        "Weights are converted at 211 to 285 GB/s.",
        "Products ran at 779 TFLOP/s.",
        "A step takes 1.3 x the floor.",
        "It is 2.3 times as fast as llama.cpp.",
        "It is two to seven times as fast as llama.cpp.",
        "With two GPUs it takes twice as long.",
        "The layer is 2.3 times faster than Marlin.",
        "That made steps up to 8 % faster.",
        "It reaches 89 % of the speed of a copy.",
        "An Intel CPU takes 0.8 to 1.3 times as long as XLA.",
        "The peak was 2571 MB.",
        "| a | 1.33 |",
        "| layer | 2.5 x |",
        "| tokens | us |\n|---|---|\n| one | 14 |",
        "| what | 22.7 s; peak |",
    ],
)
def test_a_measurement_in_a_page_is_found(sentence):
    """The negative control: planted into a page, each of them is found."""
    text = PAGES["docs/guides/memory.md"].read_text(encoding="utf-8")
    before = measurements.find(text)
    assert len(measurements.find(f"{text}\n\n{sentence}\n")) > len(before)


@pytest.mark.parametrize(
    "sentence",
    [
        "The file has 18 GB, and a card has 141 GB.",
        "Blocks of 16 values share a scale; bfloat16 weights are four times as large.",
        "Attention takes heads of up to 256 channels, and cuDNN 9.5 is not needed.",
        "Use jax 0.11.2 and Python 3.11 on SM 9.0.",
        "Tests bound the error by twice that of plain XLA.",
        "| device | 9.0 to 9.2 |\n|---|---|\n| H200 | executed, 128 experts |",
        "| Python | jax |\n|---|---|\n| 3.11 | the last one that has it |",
        "Weights take 3.6 times fewer bytes than in bfloat16.",
        "```text\n12.3 tokens/s\n```",
        "<!-- table: speed -->\n| a | 1.33 x |\n<!-- end of table -->",
        "It runs at <!-- figure: x -->656 tokens/s<!-- end of figure --> on one H200.",
    ],
)
def test_a_fact_is_no_measurement(sentence):
    assert measurements.find(sentence) == []


def test_a_number_after_a_figure_is_found():
    text = "at <!-- figure: x -->656 tokens/s<!-- end of figure -->, in 5 ms"
    assert len(measurements.find(text)) == 1


@pytest.mark.parametrize("name", sorted(figures.FIGURES))
def test_a_figure_is_text_with_a_unit(name):
    assert re.fullmatch(r"[\d,.]+( to [\d.]+)? \S.*", figures.FIGURES[name]())
