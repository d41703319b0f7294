"""The subcommand `chat`: a conversation in a terminal."""

import contextlib
import itertools
import signal
import sys
from collections.abc import Iterator
from typing import Annotated

import jax
import numpy as np
import typer
from jax.sharding import Mesh

from jax_nvfp4_moe.cli.example import ModelPath, example_or
from jax_nvfp4_moe.cli.options import (
    BackendOption,
    DispatchOption,
    DtypeOption,
    SchemeOption,
    read_argument,
)
from jax_nvfp4_moe.cli.output import report, say
from jax_nvfp4_moe.cli.process_options import over_devices
from jax_nvfp4_moe.inference.conversation import Conversation
from jax_nvfp4_moe.inference.tokenizer import Tokenizer, load_tokenizer
from jax_nvfp4_moe.models.loading import load_model

_CONTEXT = 8192
_HELP = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer."


@over_devices
def chat_command(
    *,
    devices: Mesh | None,
    path: ModelPath = None,
    max_new_tokens: Annotated[int, typer.Option(help="Of one answer, at most.")] = 1024,
    max_length: Annotated[
        int | None,
        typer.Option("--context", help="Tokens of all turns; 8192, or what the model has."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest.")] = None,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest up to this.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    scheme: SchemeOption = None,
    dtype: DtypeOption = "bfloat16",
    backend: BackendOption = None,
    dispatch: DispatchOption = "psum",
) -> None:
    """Talk to a model: it answers each line that you type, and remembers the lines before."""
    with example_or(path) as folder:
        tokenizer = load_tokenizer(folder)
        how = {"dtype": dtype, "backend": backend, "mesh": devices, "dispatch": dispatch}
        model = load_model(folder, scheme=scheme, **how)
    if system is not None:
        system = read_argument("system", system)
    conversation = Conversation(
        model,
        max_length=max_length or min(_CONTEXT, model.config.max_positions),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_ids=tokenizer.stop_ids,
        key=jax.random.key(seed),
    )
    if tokenizer.template is None:
        report("This checkpoint has no chat template: the model continues your text as it is.")
    report(_HELP)
    turns = Turns(tokenizer, system)
    for line in _lines():
        if line.strip() in ("/exit", "/quit"):
            return
        if line.strip() == "/reset":
            turns = Turns(tokenizer, system)
            report("A new conversation.")
        elif line.strip() == "/help":
            report(_HELP)
        elif line.strip():
            _reply(conversation, turns, line, max_new_tokens)


class Turns:
    """What user and model have said, as messages, as text and as tokens.

    Tokens of earlier turns stay what they were: only text behind them is encoded.

    Attributes:
      tokenizer: of the model.
      ids: tokens of the text so far, with the last answer.
    """

    def __init__(self, tokenizer: Tokenizer, system: str | None = None):
        """Begin with a system message, or with nothing."""
        self.tokenizer = tokenizer
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self._text, self.ids = "", np.zeros(0, np.int32)

    def ask(self, line: str) -> np.ndarray:
        """Add what the user says; return all tokens up to where the answer begins."""
        encode = self.tokenizer.encode
        if self.tokenizer.template is None:
            new = encode(line, special=not len(self.ids))
            self.ids = np.concatenate([self.ids, new])
            return self.ids
        self._messages.append({"role": "user", "content": line})
        text = self.tokenizer.chat(self._messages)
        if self._text and text.startswith(self._text):
            new = encode(text[len(self._text) :], special=False)
            self.ids = np.concatenate([self.ids, new])
        else:  # the template shows earlier turns in another way than they were said
            self.ids = encode(text, special=False)
        self._text = text
        return self.ids

    def answered(self, tokens: list[int]) -> None:
        """Add what the model has said, without the token that ended it."""
        spoken = [token for token in tokens if token not in self.tokenizer.stop_ids]
        said = self.tokenizer.decode(spoken)
        self._messages.append({"role": "assistant", "content": said})
        self._text += said
        self.ids = np.concatenate([self.ids, np.asarray(spoken, np.int32)])


def _lines() -> Iterator[str]:
    """Yield what the user types, until the end of the input."""
    prompt = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - lets the user edit a line, and find earlier ones
    while True:
        try:
            yield read_argument("input", input(prompt))
        except EOFError:
            return
        except KeyboardInterrupt:
            say(f"\n{_HELP}")


def _reply(conversation, turns, line, max_new_tokens):
    """Print the answer to a line as it comes; Ctrl-C ends it."""
    tokens: list[int] = []
    with _interrupts() as stopped:

        def spoken():
            answer = conversation.answer(turns.ask(line), max_new_tokens)
            with contextlib.closing(answer):
                for token in itertools.takewhile(lambda _: not stopped, answer):
                    tokens.append(token)
                    yield token

        for piece in turns.tokenizer.decode_stream(spoken()):
            print(piece, end="", flush=True)
    print(flush=True)
    if stopped:
        say("Stopped.")
    turns.answered(tokens)


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Give a list that Ctrl-C adds to in place of raising; a second Ctrl-C raises.

    An interrupt in the middle of a step would lose the cache, whose arrays the step has taken.
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
