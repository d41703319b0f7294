"""HarnessModel: run lm-evaluation-harness on our models. Needs the extra "eval".

Importing this module registers the class with the harness under the name "jax-nvfp4-moe".

Source: https://github.com/EleutherAI/lm-evaluation-harness, ``docs/model_guide.md``.
"""

import dataclasses
import functools
import inspect
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, printable
from jax_nvfp4_moe.inference.chat_template import DEFAULT
from jax_nvfp4_moe.inference.drafting import choose_drafting, layers_to_load
from jax_nvfp4_moe.inference.generation import round_up, stream
from jax_nvfp4_moe.inference.not_finite import warn_not_finite
from jax_nvfp4_moe.inference.prefill import score_texts
from jax_nvfp4_moe.inference.tokenizer import TOKENIZER_CONFIG, Tokenizer, load_tokenizer
from jax_nvfp4_moe.models.loading import load_model
from jax_nvfp4_moe.parallel.automatic_mesh import AUTO
from jax_nvfp4_moe.parallel.processes import make_mesh

LOG = logging.getLogger("jax_nvfp4_moe")
NAME = "jax-nvfp4-moe"
_STEP = 64  # pad texts to a multiple of this length, so that they share compiled programs
_LOOK = 8  # number of new tokens between two searches for stop strings
# If the user does not choose the number of texts per call, a call has at most so many texts, and
# about so many tokens. The cache of 32768 tokens of Qwen3-30B-A3B takes 6.4 GB in float32.
_BATCH, _BATCH_TOKENS = 8, 32768
# What marks the end of a message that the model shall continue; transformers marks it in this way.
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
# Options of generation that are implemented, as `normalize_gen_kwargs` returns them.
_GENERATION = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")
# Options that are not implemented -> the values with which they change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1, None),
    "num_return_sequences": (1, None),
    "repetition_penalty": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "no_repeat_ngram_size": (0, None),
    "min_p": (0, None),
    "typical_p": (1, None),
    "use_cache": (True, False, None),
}


@register_model(NAME)
class HarnessModel(TemplateLM):
    """A checkpoint as a model of lm-evaluation-harness.

    On the command line: ``jax-nvfp4-moe lm-eval PATH --tasks NAME``. In Python::

      import lm_eval
      from jax_nvfp4_moe.inference.harness import HarnessModel

      model = HarnessModel("path/to/checkpoint", scheme="w4a4")
      results = lm_eval.simple_evaluate(model, tasks=["arc_easy"])

    Tokens, scores and texts are those of ``HFLM``, the harness's class for models of transformers.

    Attributes:
      model: model from `load_model`.
      tokenizer: None, as in the harness's base class. The tokenizer is `text_tokenizer`.
      text_tokenizer: the checkpoint's `Tokenizer`.
      max_length: largest number of tokens that the model sees.
      max_gen_toks: largest number of new tokens if a task does not set it.
    """

    def __init__(
        self,
        path: str,
        scheme: str | None = None,
        dtype: str = "float32",
        kernel: str | None = None,
        mesh: str | None = None,
        dispatch: str = "psum",
        draft: str | None = None,
        draft_tokens: int | str = "auto",
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_gen_toks: int = 256,
        seed: int = 0,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        device: str | None = None,
        trust_remote_code: bool | None = None,
        **unknown: Any,
    ):
        """Load a checkpoint.

        Args:
          path: folder or Hub name, as for `load_model`.
          scheme: as for `load_model`. Defaults to None.
          dtype: as for `load_model`. Defaults to "float32".
          kernel: name of a backend, the argument `backend` of `load_model`. Defaults to None.
          mesh: sizes of the mesh axes, such as "expert=4,tensor=2", or "auto" as for `load_model`.
            None runs on one device.
          dispatch: as for `load_model`. Defaults to "psum".
          draft: as for `generate`; "mtp" also loads the drafting layers. Defaults to None.
          draft_tokens: as for `generate`. Defaults to "auto".
          max_length: largest number of tokens that the model sees. None takes the positions of the
            model. A longer text loses its first tokens, and a warning says so.
          batch_size: number of texts per call of the model. None, "auto" and "auto:N" mean 8, or
            fewer if their tokens would exceed 32768.
          max_batch_size: largest number of texts per call if `batch_size` leaves it open. None
            means 8.
          max_gen_toks: largest number of new tokens if a task does not set it. Defaults to 256.
          seed: seed of sampled texts. Defaults to 0.
          add_bos_token: how texts start. None (the default): as the tokenizer starts them. True:
            with the token bos_token exactly once, also if the text already begins with it, as the
            text of a chat template can. False: without a token that the text does not have.
          prefix_token_id: id of the token in front of a text without context. None takes the
            tokenizer's bos_token, or its eos_token if it has no bos_token.
          device: has no effect. The harness passes a name of torch, "cuda:0" by default, to every
            model. JAX decides which device is used.
          trust_remote_code: has no effect. The harness passes it with its option
            ``--trust_remote_code``, which data sets may need. Code of a checkpoint is never
            executed.
          **unknown: any other argument is an error.

        Raises:
          CheckpointError: the checkpoint or its tokenizer cannot be loaded.
          TypeError: there is no argument of this name.
          ValueError: an argument is wrong; see `load_model`.
        """
        super().__init__()
        _refuse_unknown(unknown)
        if add_bos_token not in (None, True, False):
            raise ValueError(f"add_bos_token: expected True, False or None; got {add_bos_token!r}")
        self._fixed_batch, self._most = _batch_sizes(batch_size, max_batch_size)
        self.text_tokenizer: Tokenizer = load_tokenizer(path)
        templates = self.text_tokenizer.templates
        self._templates = {} if templates.keys() <= {DEFAULT} else templates
        devices = mesh if mesh in (None, AUTO) else make_mesh(mesh)
        how = {"backend": kernel, "mesh": devices, "dispatch": dispatch}
        how["draft"] = layers_to_load(draft)
        self.model = load_model(path, scheme=scheme, dtype=jnp.dtype(dtype), **how)
        choose_drafting(self.model, draft, draft_tokens)  # raises before the tasks are read
        self._drafting = {"draft": draft, "draft_tokens": draft_tokens}
        positions = self.model.config.max_positions
        self.max_length = positions if max_length is None else int(max_length)
        if not 1 <= self.max_length <= positions:
            raise ValueError(
                f"max_length: expected 1 to {positions}, the positions of the model; "
                f"got {max_length}"
            )
        self._prefix = _check_id(prefix_token_id, self.model.config.vocab_size)
        self.max_gen_toks, self._path = max_gen_toks, str(path)
        self._key = jax.random.key(seed)
        self._bos = self._special_id("bos_token")
        self._add_bos = add_bos_token
        if add_bos_token and self._bos is None:
            LOG.warning(
                "add_bos_token: the tokenizer of %s has no bos_token, so texts start without one",
                printable(self._path),
            )

    def _special_id(self, name: str) -> int | None:
        """Return the id of a special token such as "bos_token", or None if there is none."""
        text = self.text_tokenizer.special.get(name)
        return None if text is None else self.text_tokenizer.encoder.token_to_id(text)

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text: eos_token, or the first stop id."""
        found = self._special_id("eos_token")
        if found is not None:
            return found
        if not self.text_tokenizer.stop_ids:
            raise ValueError(
                f"{printable(self._path)}: expected eos_token in {TOKENIZER_CONFIG}, or "
                "eos_token_id in generation_config.json or config.json; found none of them"
            )
        return self.text_tokenizer.stop_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """Id of the token in front of a text without context: bos_token, or the end of a text."""
        if self._prefix is not None:
            return self._prefix
        return self.eot_token_id if self._bos is None else self._bos

    @property
    def tokenizer_name(self) -> str:
        """Name under which the harness stores requests of this tokenizer."""
        return self._path.replace("/", "__")

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **ignored: Any,
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
          string: the text.
          add_special_tokens: whether to add the tokens that start a text. None (the default) adds
            them unless the text already begins with `prefix_token_id`, as the text of a chat
            template can. If `add_bos_token` is True, bos_token is never added twice; if it is
            False, nothing is added.
          left_truncate_len: number of last tokens to keep. None (the default) and 0 keep all.
          **ignored: arguments of other models of the harness. They have no effect.
        """
        asked = add_special_tokens
        if asked is None:
            asked = bool(self._add_bos) or not string.startswith(self._prefix_text)
        as_tokenizer = asked and self._add_bos is None
        ids = self.text_tokenizer.encode(string, special=as_tokenizer).tolist()
        if asked and self._add_bos and self._bos is not None and ids[:1] != [self._bos]:
            ids = [self._bos, *ids]
        return ids[-left_truncate_len:] if left_truncate_len else ids

    @functools.cached_property
    def _prefix_text(self) -> str:
        """Text of `prefix_token_id`."""
        return self._raw_text([self.prefix_token_id])

    def _raw_text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens."""
        return self.text_tokenizer.encoder.decode([*map(int, ids)], skip_special_tokens=False)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of a chat template, which the harness stores with the results.

        Args:
          chat_template: True for the default template, or the name of another one. False (the
            default) and None mean that no template is used.

        Returns:
          The source, or None if no template is used or the checkpoint has none.

        Raises:
          ValueError: the checkpoint has templates with names, and none of them has this name.
        """
        if chat_template is None or chat_template is False:
            return None
        default = self.text_tokenizer.template
        if chat_template is True or chat_template == "default":
            return default
        if not self._templates:
            LOG.warning(
                "apply_chat_template: the checkpoint has one chat template without a name, which "
                "is used in place of %r",
                chat_template,
            )
            return default
        if chat_template not in self._templates:
            raise ValueError(
                "apply_chat_template: expected the name of a chat template of "
                f"{printable(self._path)}, one of "
                f"{', '.join(map(printable, sorted(self._templates)))}; got {chat_template!r}"
            )
        LOG.warning(
            "apply_chat_template: the harness stores the chat template %r with its results, but "
            "renders messages with the default template",
            chat_template,
        )
        return self._templates[chat_template]

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return messages as one text, rendered by the default chat template.

        Args:
          chat_history: the messages.
          add_generation_prompt: whether to append the text that begins an answer. Defaults to True.
            If it is False, the model shall continue the last message, so the text ends with that
            message and without the text that would end it.

        Raises:
          CheckpointError: the checkpoint has no chat template, or the template fails, without the
            system message too.
          ValueError: the template leaves out or changes the message to continue.
        """
        render = self._render if add_generation_prompt else self._render_continued
        try:
            return render(chat_history)
        except CheckpointError as error:
            rest = [message for message in chat_history if message["role"] != "system"]
            if self.text_tokenizer.template is None or len(rest) == len(chat_history):
                raise
            LOG.warning("The system message is left out, because with it %s", error)
            return render(rest)

    def _render(self, messages) -> str:
        """Return messages as text, with the text that begins an answer."""
        return self.text_tokenizer.chat(messages, add_generation_prompt=True)

    def _render_continued(self, messages) -> str:
        """Return messages as text that ends with the last message."""
        *before, last = messages
        marked = [*before, {**last, "content": last["content"] + _CONTINUED}]
        text = self.text_tokenizer.chat(marked, add_generation_prompt=False)
        place = text.rfind(_CONTINUED.strip())
        if place < 0 or last["content"].strip() not in text:
            raise ValueError(
                "chat_history: expected a last message that the chat template renders unchanged, "
                f"so that the model can continue it; got {last['content']!r}, rendered as {text!r}"
            )
        kept = text[:place]
        # A template that strips messages has also stripped the space at the end of the mark.
        return kept if text.startswith(_CONTINUED, place) else kept.rstrip()

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text.

        A text that is longer than the model's window is scored in several windows. Each token is
        predicted exactly once.
        """
        pairs, owners = [], []
        for index, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in windows:
                pairs.append((None, *make_disjoint_window(window)))
                owners.append(index)
        sums = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
            sums[owner] += value
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def _loglikelihood_tokens(self, requests, **ignored) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding yields it.

        The longest texts run first. If memory does not suffice, the run then fails at the start and
        not after an hour.

        Args:
          requests: texts, token ids of the context and token ids of the continuation. The texts are
            None for a window of a longer text.
          **ignored: arguments of other models of the harness. They have no effect.
        """
        self._check_lengths(requests)
        lengths = [sum(map(len, request[1:])) for request in requests]
        order = sorted(range(len(requests)), key=lambda i: -lengths[i])
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        sizes = {i: min(lengths[i], self.max_length) for i in order}
        for chosen in self._batches(order, sizes):
            texts = [self._cut(*requests[i][1:]) for i in chosen]
            for i, result in zip(chosen, self._score(texts), strict=True):
                found[i] = result
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], result)
        bad = sum(not math.isfinite(value) for value, _ in found)
        if bad:
            warn_not_finite("%d of %d log-likelihoods are not finite", bad, len(found))
        return found

    def _check_lengths(self, requests) -> None:
        """Check that each continuation can be scored, and warn of contexts that are cut."""
        for texts, _, continuation in requests:
            if not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"continuation: expected 1 to {self.max_length} tokens (max_length), got "
                    f"{len(continuation)}, of the context and continuation {_shortened(texts)}"
                )
        self._warn_cut(sum(len(a) + len(b) > self.max_length + 1 for _, a, b in requests), requests)

    def _warn_cut(self, count: int, requests) -> None:
        if count:
            LOG.warning(
                "%d of %d texts are too long for max_length=%d: their first tokens are left out",
                count,
                len(requests),
                self.max_length,
            )

    def _rows(self, tokens: int) -> int:
        """Return the number of texts per call of the model if the longest has so many tokens."""
        if self._fixed_batch is not None:
            return self._fixed_batch
        return max(1, min(self._most, _BATCH_TOKENS // tokens))

    def _batches(self, order: Sequence[int], sizes: Mapping[int, int]) -> Iterator[list[int]]:
        """Yield the texts of each call of the model, of which the first is the longest.

        Args:
          order: the texts, from the longest to the shortest.
          sizes: number of tokens of each text.
        """
        start = 0
        while start < len(order):
            rows = self._rows(sizes[order[start]])
            yield list(order[start : start + rows])
            start += rows

    def _cut(self, context, continuation) -> tuple[list[int], int]:
        """Return the last tokens that fit the model, and how many of them to score.

        One token more than `max_length` fits, because the last token is only predicted.
        """
        whole = [*context, *continuation][-(self.max_length + 1) :]
        return whole, len(continuation)

    def _score(self, texts: Sequence[tuple[list[int], int]]) -> Iterator[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding yields it.

        Args:
          texts: pairs of token ids and the number of last tokens to score; at most one batch.
        """
        longest = max(len(whole) for whole, _ in texts) - 1
        width, rows = min(round_up(longest, _STEP), self.max_length), self._rows(longest)
        ids = np.zeros((max(rows, len(texts)), width + 1), np.int32)
        lengths, counts = (np.ones(len(ids), np.int32) for _ in range(2))
        for row, (whole, count) in enumerate(texts):
            ids[row, : len(whole)] = whole
            lengths[row], counts[row] = len(whole) - 1, count
        places, ends = np.arange(ids.shape[1] - 1)[None, :], lengths[:, None]
        counted = (places < ends) & (places >= ends - counts[:, None])
        sums, likeliest = score_texts(self.model, ids[:, :-1], ids[:, 1:], counted, lengths)
        sums, likeliest = np.asarray(sums, np.float64), np.asarray(likeliest)
        return zip(sums[: len(texts)].tolist(), likeliest[: len(texts)].tolist(), strict=True)

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to the first stop string.

        Raises:
          ValueError: an option of generation is not implemented, or leaves no room for the context.
        """
        found = [""] * len(requests)
        by_options: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_options.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        groups = [(self._options(requests[some[0]].args[1]), some) for some in by_options.values()]
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        for options, chosen in groups:
            room = self.max_length - options.new
            self._warn_cut(sum(len(prompts[i]) > room for i in chosen), chosen)
            chosen.sort(key=lambda i: -len(prompts[i]))
            sizes = {i: min(len(prompts[i]), room) + options.new for i in chosen}
            for some in self._batches(chosen, sizes):
                texts = self._continue([prompts[i][-room:] for i in some], options)
                for i, text in zip(some, texts, strict=True):
                    found[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return found

    def _options(self, given) -> "_Options":
        """Return the options of a request, after checking them."""
        options: dict[str, Any] = {**normalize_gen_kwargs(given, self.max_gen_toks)}
        refused = {
            name: value
            for name, value in options.items()
            if name not in _GENERATION and value not in _NEUTRAL.get(name, ())
        }
        if refused:
            raise ValueError(
                f"generation_kwargs: expected {', '.join(_GENERATION)}; got {_listed(refused)}, "
                "which is not implemented and would change the text"
            )
        new = options["max_gen_toks"]
        if not 1 <= new < self.max_length:
            raise ValueError(
                f"max_gen_toks: expected 1 to {self.max_length - 1}, fewer than the "
                f"{self.max_length} tokens that the model sees (max_length); got {new}"
            )
        top_k = options.get("top_k")
        stops = [stop for stop in options["until"] if stop]
        ended = self._raw_text([self.eot_token_id])
        return _Options(
            new,
            tuple(stops if ended in stops else [*stops, ended]),
            options.get("temperature", 0.0),
            None if top_k in (None, 0, -1) else top_k,
            options.get("top_p", 1.0),
        )

    def _continue(self, prompts: list[list[int]], options: "_Options") -> list[str]:
        """Return the texts that follow one batch of prompts, which share all options."""
        prompts = [prompt or [self.prefix_token_id] for prompt in prompts]
        lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        ids = np.zeros((len(prompts), lengths.max()), np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        self._key, key = jax.random.split(self._key)
        stop_ids = (*self.text_tokenizer.stop_ids, self.eot_token_id)
        tokens = stream(
            self.model,
            jnp.asarray(ids),
            max_new_tokens=options.new,
            lengths=jnp.asarray(lengths),
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            stop_ids=stop_ids,
            key=key,
            **self._drafting,
        )
        # Another tokenization of a stop string may have a few tokens more.
        encode = functools.partial(self.text_tokenizer.encode, special=False)
        look = max(len(encode(stop)) for stop in options.stops) + 2
        texts = [_Continuation(self._raw_text, options.stops, stop_ids, look) for _ in prompts]
        for some in _chunks(tokens, _LOOK):
            for text, new in zip(texts, np.stack(some, axis=1).tolist(), strict=True):
                text.extend(new)
            if all(text.ended for text in texts):
                break
        return [text.shown(self.text_tokenizer.decode) for text in texts]


@dataclasses.dataclass(frozen=True)
class _Options:
    """How a text is generated.

    Attributes:
      new: largest number of new tokens.
      stops: texts that end the text.
      temperature: as for `generate`.
      top_k: as for `generate`.
      top_p: as for `generate`.
    """

    new: int
    stops: tuple[str, ...]
    temperature: float
    top_k: int | None
    top_p: float


class _Continuation:
    """The new tokens of one row, up to the first one with which a stop string is complete.

    Attributes:
      tokens: the new tokens.
      ended: whether a stop id or a stop string was found.
    """

    def __init__(self, raw_text, stops: Sequence[str], stop_ids: Sequence[int], look: int):
        """Begin with no tokens.

        Args:
          raw_text: function that returns the text of token ids, with special tokens.
          stops: texts that end the text.
          stop_ids: tokens that end the text.
          look: number of last tokens whose text is searched for the stops.
        """
        self.tokens: list[int] = []
        self.ended = False
        self._raw_text, self._stops, self._stop_ids, self._look = raw_text, stops, stop_ids, look

    def extend(self, new: Sequence[int]) -> None:
        """Add new tokens. Those after the end are dropped."""
        for token in new:
            if self.ended:
                return
            self.tokens.append(token)
            last = self._raw_text(self.tokens[-self._look :])
            self.ended = token in self._stop_ids or any(stop in last for stop in self._stops)

    def shown(self, decode) -> str:
        """Return the text before the stops, by a function that decodes without special tokens."""
        text = decode(self.tokens)
        for stop in self._stops:  # one after another, as the harness does
            text = text.split(stop)[0]
        return text


def _refuse_unknown(unknown: Mapping[str, Any]) -> None:
    """Raise `TypeError` if there are arguments that `HarnessModel` does not have."""
    if unknown:
        parameters = inspect.signature(HarnessModel.__init__).parameters.values()
        known = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        raise TypeError(
            f"HarnessModel: expected only the arguments {', '.join(known[1:])}; got "
            f"{_listed(unknown)}"
        )


def _listed(options: Mapping[str, Any]) -> str:
    """Return options for a message."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _batch_sizes(batch_size, max_batch_size) -> tuple[int | None, int]:
    """Return the number of texts per call that the user fixes, or None; and the largest number."""
    for name, value in (("batch_size", batch_size), ("max_batch_size", max_batch_size)):
        automatic = name == "batch_size" and str(value).partition(":")[0] == "auto"
        if value is not None and not automatic and not (str(value).isdecimal() and int(value)):
            raise ValueError(f'{name}: expected a positive number or "auto", got {value!r}')
    fixed = batch_size is not None and str(batch_size).isdecimal()
    return int(batch_size) if fixed else None, int(max_batch_size or _BATCH)


def _check_id(token: int | None, vocabulary: int) -> int | None:
    """Return `prefix_token_id` after checking it."""
    if token is not None and (type(token) is not int or not 0 <= token < vocabulary):
        raise ValueError(
            f"prefix_token_id: expected an id from 0 to {vocabulary - 1}, got {token!r}"
        )
    return token


def _shortened(texts) -> str:
    """Return texts for a message."""
    return repr(tuple(text if len(text) < 80 else f"...{text[-80:]}" for text in texts or ()))


def _chunks(values: Iterable, count: int) -> Iterator[tuple]:
    """Yield tuples of `count` values, and a shorter last one.

    `itertools.batched` does the same, but needs Python 3.12.
    """
    iterator = iter(values)
    while some := tuple(itertools.islice(iterator, count)):
        yield some
