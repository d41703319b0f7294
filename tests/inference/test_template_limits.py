"""Test that chat templates cannot take seconds or gigabytes in the simplest ways."""

import resource

import pytest

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.inference import template_limits
from jax_nvfp4_moe.inference.chat_template import render

MESSAGES = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "ho"}]
LONG = "{% set long = 'a' * 9999999 %}"
DOUBLED = (
    "{% set ns = namespace(x=['a']) %}"
    "{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'a' * 10**10 }}", "more than 10000000 parts"),
        ("{{ [1] * 10**10 }}", "more than 10000000 parts"),
        ("{{ 9 ** (10**9) }}", "more than 100000 bits"),
        (LONG + "{{ long + long }}", "more than 10000000 parts"),
        (LONG + "{{ long ~ 'aa' }}", "more than 10000000 parts"),
        (LONG + "{{ long }}{{ long }}", "more than 10000000 parts"),
        (LONG + "{{ long.replace('a', long) }}", "more than 10000000 parts"),
        (LONG + "{{ long | replace('a', long) }}", "more than 10000000 parts"),
        (LONG + "{{ ''.join([long, long]) }}", "more than 10000000 parts"),
        (LONG + "{{ [long, long] | join }}", "more than 10000000 parts"),
        ("{{ 'a' | center(10**10) }}", "a width of 10000000000, and the limit is 100000"),
        ("{{ 'a'.ljust(10**10) }}", "a width of 10000000000, and the limit is 100000"),
        ("{{ 'a' | indent(width=10**10) }}", "a width of 10000000000, and the limit is 100"),
        ("{{ messages | tojson(indent=10**10) }}", "a width of 10000000000"),
        ("{{ '%1000000000d' % 1 }}", "a width that may exceed"),
        ("{{ '%*d' % (1000000000, 1) }}", "a width that may exceed"),
        ("{{ '%.1000000000f' | format(1.0) }}", "a width that may exceed"),
        ("{{ '{:>1000000000}'.format(1) }}", "a width that may exceed"),
        ("{{ '{:{w}}'.format(1, w=1000000000) }}", "a width that may exceed"),
        ("{{ strftime_now('%1000000000d') }}", "a width exceeds"),
        (DOUBLED + "{{ ns.x }}", "more than 10000000 parts"),
        (DOUBLED + "{{ ns.x | tojson }}", "more than 10000000 parts"),
        (DOUBLED + "{{ ns.x | string }}", "more than 10000000 parts"),
        (DOUBLED + "{{ 'a' ~ ns.x }}", "more than 10000000 parts"),
        (DOUBLED + "{{ '%s' % ns.x }}", "more than 10000000 parts"),
        ("{{ lipsum(n=10**9) }}", "'lipsum' is undefined"),
        ("a" * 100_001, "it has 100001 characters, and the limit is 100000"),
    ],
)
def test_texts_and_numbers_have_limits(source, message):
    with pytest.raises(CheckpointError, match=message):
        render(source, MESSAGES, {})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4e6  # KiB; `a` alone takes 10 GB


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}"
        "{% for a in r %}{% for b in r if b < 0 %}{% endfor %}{% endfor %}",
        "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        "{% endset %}",
        "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    ],
)
def test_time_has_a_limit(source, monkeypatch):
    monkeypatch.setattr(template_limits, "_SECONDS", 0.05)
    with pytest.raises(CheckpointError, match=r"the limit|RecursionError"):
        render(source, MESSAGES, {})


def test_what_templates_do_is_as_in_jinja2():
    source = (
        "{% for m in messages if m.role == 'user' %}{{ loop.index ~ '/' ~ loop.length }}"
        "{% if loop.last %} last{% endif %}{% else %}none{% endfor %} "
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}"
        "{% endfor %} {% for x in [] %}x{% else %}none{% endfor %} "
        "{{ 1 ~ none ~ [2, 'a'] }} {{ [1] * 2 + [3] }} {{ 2 ** 10 }} {{ '%s-%05d' % ('a', 3) }} "
        "{{ 'Order 1234567 {:>3}'.format(2) }} {{ 20000000 | round }} "
        "{{ {'a': 20000000} | tojson }} {{ 'a b' | replace('a', 'c') }} {{ ['a', 1] | join('+') }} "
        "{{ 'a' | indent(2, first=true) }}"
    )
    assert render(source, MESSAGES, {}) == (
        "1/1 last ho none 1None[2, 'a'] [1, 1, 3] 1024 a-00003 Order 1234567   2 20000000 "
        '{"a": 20000000} c b a+1   a'
    )


def test_an_error_of_a_template_is_one_line():
    with pytest.raises(CheckpointError) as caught:
        render("{{ raise_exception('no\nerror: forged' ~ 'x' * 9999) }}", MESSAGES, {})
    (line,) = str(caught.value).splitlines()
    assert "no error: forged" in line
    assert len(line) < 1100


def test_half_of_a_surrogate_pair_is_no_text():
    with pytest.raises(CheckpointError, match="UnicodeEncodeError"):
        render("{{ x }}", MESSAGES, {"x": "\ud800"})
