"""The subcommand `chat`: a conversation with a model in a terminal."""

import contextlib
import copy
import itertools
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np
import typer
from jax.sharding import Mesh

from jax_nvfp4_moe.checkpoint.errors import CheckpointError
from jax_nvfp4_moe.cli.options import (
    BackendOption,
    DispatchOption,
    DraftOption,
    DraftTokensOption,
    DtypeOption,
    ModelPath,
    SchemeOption,
    SeedOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    example_or,
    number,
    read_argument,
    read_drafting,
)
from jax_nvfp4_moe.cli.output import report, say, write
from jax_nvfp4_moe.cli.process_options import over_devices
from jax_nvfp4_moe.inference.chat_template import check_mappings
from jax_nvfp4_moe.inference.conversation import Conversation
from jax_nvfp4_moe.inference.drafting import layers_to_load
from jax_nvfp4_moe.inference.tokenizer import Tokenizer, load_tokenizer
from jax_nvfp4_moe.models.loading import load_model

_CONTEXT = 8192
_TAKEN = ("add_generation_prompt", "messages", "self")  # `Tokenizer.chat` passes them itself
_GOES_ON = "The conversation goes on without this line. Type /reset to start a new one."
_HELP = "Type /reset to start over, /exit or Ctrl-D to leave. Ctrl-C stops an answer."


@over_devices
def chat_command(
    *,
    devices: Mesh | str,
    path: ModelPath = None,
    max_new_tokens: Annotated[int, number(help="Largest number of tokens in an answer.")] = 1024,
    max_length: Annotated[
        int | None,
        number(
            "--context",
            help="Largest number of tokens in all turns; by default 8192, or fewer if the model "
            "has fewer positions.",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message that begins the conversation.")
    ] = None,
    template_variable: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Variable of the chat template, such as enable_thinking=false. The value is JSON; "
            "what is not JSON is text. Repeat the option for several variables.",
        ),
    ] = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    scheme: SchemeOption = None,
    dtype: DtypeOption = "bfloat16",
    backend: BackendOption = None,
    dispatch: DispatchOption = "psum",
    draft: DraftOption = None,
    draft_tokens: DraftTokensOption = "auto",
) -> None:
    """Talk to a model.

    The model answers each line that you type, and remembers the lines before. A line that it cannot
    answer, for example because the context is full, gets a message, and the conversation goes on
    without it.
    """
    _check_input()
    variables = read_variables(template_variable or ())
    if system is not None:
        system = read_argument("--system", system)
    with example_or(path) as folder:
        tokenizer = load_tokenizer(folder)
        how = {"dtype": dtype, "backend": backend, "mesh": devices, "dispatch": dispatch}
        model = load_model(folder, scheme=scheme, draft=layers_to_load(draft), **how)
    conversation = Conversation(
        model,
        max_length=_choose_length(max_length, model.config.max_positions),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_ids=tokenizer.stop_ids,
        key=jax.random.key(seed),
        **read_drafting(draft, draft_tokens),
    )
    _greet(tokenizer, variables)
    _converse(conversation, Turns(tokenizer, system, variables), max_new_tokens)


def _converse(conversation, beginning, max_new_tokens):
    """Answer the lines that the user types, and do what they ask for with a slash."""
    turns, answered = copy.copy(beginning), False
    for line in _lines():
        word = line.strip()
        if word in ("/exit", "/quit"):
            return
        if word == "/reset":
            turns = copy.copy(beginning)
            report("Started a new conversation.")
        elif word == "/help":
            report(_HELP)
        elif word:
            before = copy.copy(turns)
            try:
                _reply(conversation, turns, line, max_new_tokens)
                answered = True
            except _NoAnswerError as error:
                if error.fatal and not answered:
                    raise CheckpointError([str(error)]) from error
                report(f"error: {error}. {_GOES_ON}")
                turns = before


class _NoAnswerError(Exception):
    """Report that a line gets no answer.

    Attributes:
      fatal: whether the tokenizer or the chat template has failed, so that no line may get one.
    """

    def __init__(self, message: str, fatal: bool):
        super().__init__(message)
        self.fatal = fatal


class Turns:
    """The turns of user and model, kept as messages, as text and as tokens.

    Only new text is encoded, as long as the chat template renders earlier turns as before. Encoding
    the whole conversation again could split the same text into other tokens, which would not match
    the model's cache.

    A shallow copy keeps its turns while others are added to the original.

    Attributes:
      tokenizer: tokenizer of the model.
      ids: int32 ``[n]``, tokens of the whole text, with the last answer.
      ended: whether a stop id ended the last answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ):
        """Begin with a system message, or with no text. Templates see `variables`."""
        self.tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self._text, self.ids, self.ended = "", np.zeros(0, np.int32), True

    def ask(self, line: str) -> np.ndarray:
        """Add a message of the user, and return all tokens up to the beginning of the answer."""
        encode = self.tokenizer.encode
        if self.tokenizer.template is None:
            new = encode(line, special=not len(self.ids))
            self.ids = np.concatenate([self.ids, new])
            return self.ids
        self._messages = [*self._messages, {"role": "user", "content": line}]
        text = self.tokenizer.chat(self._messages, **self._variables)
        if self._text and text.startswith(self._text):
            new = encode(text[len(self._text) :], special=False)
            self.ids = np.concatenate([self.ids, new])
        else:  # the template renders earlier turns differently now, so the old tokens do not fit
            self.ids = encode(text, special=False)
        self._text = text
        return self.ids

    def answered(self, tokens: list[int]) -> None:
        """Add the model's answer, without the token that ended it."""
        spoken = [token for token in tokens if token not in self.tokenizer.stop_ids]
        self.ended = len(spoken) < len(tokens)
        said = self.tokenizer.decode(spoken)
        self._messages = [*self._messages, {"role": "assistant", "content": said}]
        self._text += said
        self.ids = np.concatenate([self.ids, np.asarray(spoken, np.int32)])


def read_variables(given: Sequence[str]) -> dict[str, Any]:
    """Return the variables of ``--template-variable``: name -> value.

    Raises:
      ValueError: an item is not ``NAME=VALUE``, or its name is taken. The message names the option.
    """
    return dict(map(_variable, given))


def _variable(text):
    """Return the name and the value of one variable."""
    text = read_argument("template-variable", text)
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(
            f"--template-variable: expected NAME=VALUE, such as enable_thinking=false; got {text!r}"
        )
    if name in _TAKEN:
        raise ValueError(f"--template-variable: {name} is not a variable that you can set")
    found: object = value
    with contextlib.suppress(ValueError, RecursionError):  # it is not JSON
        found = json.loads(value)
    if name in ("tools", "documents"):
        check_mappings(f"--template-variable: {name}", found)
    return name, found


def _check_input():
    """Raise `ValueError` if nobody can type: a shell closes standard input by ``<&-``."""
    if sys.stdin is None:
        raise ValueError("standard input is closed, and chat reads from it what you type")


def _choose_length(asked: int | None, positions: int) -> int:
    """Return the largest number of tokens in all turns."""
    if asked is not None and asked > positions:
        raise ValueError(
            f"--context: expected 1 to {positions}, the positions of the model; got {asked}"
        )
    return min(_CONTEXT, positions) if asked is None else asked


def _greet(tokenizer, variables):
    """Say what the user can type, and what the template does not do."""
    if tokenizer.template is None:
        report(
            "This checkpoint has no chat template. The model continues your text as you type it."
        )
        if variables:
            report(f"--template-variable has no effect: {', '.join(variables)}")
    report(_HELP)


def _lines() -> Iterator[str]:
    """Yield the lines that the user types, until the end of the input."""
    prompt = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - adds line editing and a history to `input`
    while True:
        try:
            yield read_argument("input", input(prompt))
        except EOFError:
            return
        except ValueError as error:  # the line is not text
            report(f"error: {error}")
        except KeyboardInterrupt:
            say(f"\n{_HELP}")


def _reply(conversation, turns, line, max_new_tokens):
    """Print the answer to a line as it is generated; Ctrl-C stops the answer.

    Raises:
      _NoAnswerError: there is no answer, or no whole one. `turns` then holds a part of the turn.
    """
    tokens: list[int] = []
    with _interrupts() as stopped:
        ids = _ask(conversation, turns, line)
        try:
            answer = conversation.answer(ids, max_new_tokens)
            _print_answer(turns.tokenizer, answer, tokens, stopped)
            turns.answered(tokens)
        except CheckpointError as error:  # the tokenizer has failed to decode
            raise _NoAnswerError(str(error), fatal=True) from error
    if stopped:
        say("Stopped.")
    elif len(ids) + len(tokens) >= conversation.max_length and not turns.ended:
        report(
            f"The context of {conversation.max_length} tokens is full, so the answer ends here. "
            "Type /reset to start a new conversation."
        )


def _ask(conversation, turns, line):
    """Return the tokens up to the beginning of the answer, if there is room for one."""
    try:
        ids = turns.ask(line)
    except CheckpointError as error:
        raise _NoAnswerError(str(error), fatal=True) from error
    try:
        conversation.check(ids)
    except ValueError as error:
        raise _NoAnswerError(str(error), fatal=False) from error
    return ids


def _print_answer(tokenizer, answer, tokens, stopped):
    """Print an answer, and append its tokens to `tokens`, until `stopped` is not empty."""

    def spoken():
        with contextlib.closing(answer):
            for token in itertools.takewhile(lambda _: not stopped, answer):
                tokens.append(token)
                yield token

    try:
        for piece in tokenizer.decode_stream(spoken()):
            write(piece)
    finally:
        write("\n")


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yield a list to which Ctrl-C appends, instead of raising `KeyboardInterrupt`.

    The caller can then stop between two steps. An exception in the middle of a step would lose the
    cache, because the step has taken over its arrays. A second Ctrl-C raises.
    """
    seen: list[int] = []

    def note(number, frame):
        if seen:
            signal.default_int_handler(number, frame)
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
