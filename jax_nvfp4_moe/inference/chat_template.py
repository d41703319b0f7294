"""Find the chat templates of a checkpoint, and render them in a sandbox.

Templates see what transformers shows them: messages, tools and documents as plain data, the special
tokens, the caller's variables, and a few functions.

Source: transformers 5.24.0, ``utils/chat_template_utils.py``.
"""

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import exists, read_json
from jax_nvfp4_moe.checkpoint.hub import TEMPLATES
from jax_nvfp4_moe.inference.text_file import read_text
from jax_nvfp4_moe.inference.tokenizer_class import TOKENIZER_CONFIG
from jax_nvfp4_moe.inference.tokenizer_faults import one_line

log = logging.getLogger("jax_nvfp4_moe")

TEMPLATE = "chat_template.jinja"
# Files of processors, which transformers' tokenizers do not read. They come last.
PROCESSORS = ("chat_template.json", "processor_config.json")
DEFAULT, TOOL_USE = "default", "tool_use"
_KEY = "chat_template"
_SOURCE_LENGTH = 100_000  # characters of a template; to compile them takes up to 4 s
# The names under which a message holds its reasoning. Templates read the first.
_REASONING = ("reasoning_content", "thinking", "reasoning")

Messages = Sequence[Mapping[str, Any]]


def read_templates(folder: pathlib.Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a checkpoint: name -> source.

    A single template has the name "default". The first of these places that holds a template
    decides, and a warning says where a later one differs:

    1. the file ``chat_template.jinja``, and the folder ``additional_chat_templates``
    2. ``chat_template`` of ``tokenizer_config.json``: text, or several templates with names
    3. ``chat_template`` of ``chat_template.json``, then of ``processor_config.json``

    Raises:
      CheckpointError: a template is not text. The message names file and key.
    """
    places = [(TEMPLATE, _from_files(folder)), (TOKENIZER_CONFIG, _named(config, TOKENIZER_CONFIG))]
    for name in PROCESSORS:
        if exists(folder, name):
            places.append((name, _named(read_json(folder, name), name)))
    places = [(place, templates) for place, templates in places if templates]
    for place, templates in places[1:]:
        if templates != places[0][1]:
            log.warning(
                "%s and %s hold different chat templates; %s is taken",
                places[0][0],
                place,
                places[0][0],
            )
    return places[0][1] if places else {}


def choose_template(templates: Mapping[str, str], tools: object) -> str:
    """Return the source of the template for a conversation with these tools, or without.

    Raises:
      CheckpointError: there is none.
    """
    if tools is not None and TOOL_USE in templates:
        return templates[TOOL_USE]
    if DEFAULT in templates:
        return templates[DEFAULT]
    if templates:
        raise CheckpointError(
            [f"no chat template is named {DEFAULT!r}; the checkpoint has {sorted(templates)}"]
        )
    raise CheckpointError(
        [
            f"no chat template: the checkpoint has no file {TEMPLATE}, and no field {_KEY} in "
            f"{TOKENIZER_CONFIG}. Pass a prompt as plain text instead"
        ]
    )


def render(source: str, messages: Messages, variables: Mapping[str, Any]) -> str:
    """Return what a template makes of messages and variables.

    Raises:
      CheckpointError: the template fails.
      ValueError: there is no message, or a message is not a mapping.
    """
    shown = [_message(message) for message in plain_data(list(messages))]
    if not shown:
        raise ValueError("messages: expected at least one message, got none")
    try:
        return _run(source, shown, plain_data(dict(variables)))
    except Exception as error:  # expressions in a template can raise any exception
        raise CheckpointError(
            [f"the chat template failed: {type(error).__name__}: {one_line(error)}"]
        ) from None


def check_mappings(name: str, values: Any) -> None:
    """Check that an argument is None or a list of mappings.

    Raises:
      ValueError: it is not. The message names the argument.
    """
    listed = isinstance(values, Sequence) and not isinstance(values, str)
    if values is None or (listed and all(isinstance(value, Mapping) for value in values)):
        return
    raise ValueError(f"{name}: expected None or a list of dictionaries, got {quoted(values)}")


def plain_data(value: Any) -> Any:
    """Return a value as numbers, text, lists and dictionaries.

    The sandbox does not know which methods of other objects do harm. A value that has no such form,
    such as an image, becomes text that names its type.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, np.generic):
        return plain_data(value.item())
    if isinstance(value, (str, int, float)):  # a subclass may have methods of its own
        kind = next(kind for kind in (str, int, float) if isinstance(value, kind))
        return _SCALARS[kind](value)
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain_data(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    dump = getattr(value, "model_dump", None)  # pydantic, as clients of OpenAI's API use it
    return plain_data(dump()) if callable(dump) else f"<{type(value).__name__}>"


_SCALARS: Mapping[type, Any] = {str: str.__str__, int: int.__int__, float: float.__float__}


def _message(message):
    """Return a message without keys that hold None, and with its reasoning under all names."""
    if not isinstance(message, dict):
        raise ValueError(
            f"messages: expected dictionaries such as {{'role': 'user', 'content': 'hi'}}, "
            f"got {quoted(message)}"
        )
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _from_files(folder) -> dict[str, str]:
    """Return the templates that are files of their own."""
    found = {}
    if exists(folder, TEMPLATE):
        found[DEFAULT] = read_text(folder, TEMPLATE, 4 * _SOURCE_LENGTH)
    if (folder / TEMPLATES).is_dir():
        for path in sorted((folder / TEMPLATES).glob("*.jinja")):
            found[path.stem] = read_text(folder, f"{TEMPLATES}/{path.name}", 4 * _SOURCE_LENGTH)
    return found


def _named(config, file) -> dict[str, str]:
    """Return the templates of a JSON file by their names."""
    given = config.get(_KEY)
    if given is None:
        return {}
    pairs: list[tuple[Any, Any]]
    if isinstance(given, list) and all(isinstance(one, dict) for one in given):
        pairs = [(one.get("name"), one.get("template")) for one in given]
    else:
        pairs = list(given.items()) if isinstance(given, dict) else [(DEFAULT, given)]
    if not all(isinstance(part, str) for pair in pairs for part in pair):
        raise CheckpointError(
            [
                f"{file}: {_KEY}: expected text, or a list of objects with name and template, "
                f"got {quoted(given)}"
            ]
        )
    return dict(pairs)


def _run(source, messages, variables):
    """Return the text of a template, within the limits of time and length."""
    from jax_nvfp4_moe.inference import template_limits  # imports jinja2, which not all need

    if len(source) > _SOURCE_LENGTH:
        raise template_limits.LimitError(
            f"it has {len(source)} characters, and the limit is {_SOURCE_LENGTH}"
        )
    template = _compiled(source)
    with template_limits.limited_time():
        text = template_limits.join_pieces(template.generate(messages=messages, **variables))
    text.encode()  # a half of a surrogate pair, which JSON can hold, is no text
    return text


@functools.lru_cache(maxsize=8)
def _compiled(source):
    """Return a template, ready to render. Compiling takes longer than rendering."""
    from jax_nvfp4_moe.inference import template_sandbox

    return template_sandbox.ENVIRONMENT.from_string(source)
