"""The sandbox in which chat templates run, with the functions that they expect.

Source: transformers 5.24.0, ``utils/chat_template_utils.py``.
"""

import datetime
import json
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.utils

from jax_nvfp4_moe.inference.template_limits import LimitedEnvironment, check_format_of_dates


class Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training. It is a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares the attribute like this

    def parse(self, parser):
        """Return the body as a call, so that what it sets does not reach the rest."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


class Namespace(jinja2.utils.Namespace):
    """A namespace without names that begin with an underscore, which reach into Python."""

    def __init__(*arguments, **values):  # so that a value may be called "self"
        self, *given = arguments
        values = dict(*given, **values)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name, value):
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


class Dictionary:
    """The function `dict`, without the other attributes of the type."""

    def __call__(self, *arguments: Any, **values: Any) -> dict:
        """Return a new dictionary."""
        return dict(*arguments, **values)

    def fromkeys(self, *arguments: Any) -> dict:
        """Return a dictionary with the same value for all keys."""
        return dict.fromkeys(*arguments)


def _check_name(name):
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace cannot hold {name!r}, which begins with an underscore"
        )


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Return a value as JSON. jinja2's own filter escapes characters for HTML."""
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(form):
    check_format_of_dates(form)
    return datetime.datetime.now().strftime(form)


ENVIRONMENT = LimitedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
)
ENVIRONMENT.filters["tojson"] = _tojson
ENVIRONMENT.limit_filters()
ENVIRONMENT.globals |= {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
    "dict": Dictionary(),
    "namespace": Namespace,
}
