"""HarnessModel: run lm-evaluation-harness on our models. Needs the extra "eval".

Importing this module registers the class with the harness under the name "jax-nvfp4-moe".

Source: https://github.com/EleutherAI/lm-evaluation-harness, ``docs/model_guide.md``.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jax_nvfp4_moe.inference.generation import round_up, stream
from jax_nvfp4_moe.inference.prefill import score_texts
from jax_nvfp4_moe.inference.tokenizer import Tokenizer, load_tokenizer
from jax_nvfp4_moe.models.loading import load_model
from jax_nvfp4_moe.parallel.processes import make_mesh

NAME = "jax-nvfp4-moe"
_STEP = 64  # pad texts to a multiple of this length, so that they share compiled programs
_LOOK = 8  # number of new tokens between two searches for stop strings


@register_model(NAME)
class HarnessModel(TemplateLM):
    """A checkpoint as a model of lm-evaluation-harness.

    On the command line: ``jax-nvfp4-moe lm-eval PATH --tasks NAME``. In Python::

      import lm_eval
      from jax_nvfp4_moe.inference.harness import HarnessModel

      model = HarnessModel("path/to/checkpoint", scheme="w4a4")
      results = lm_eval.simple_evaluate(model, tasks=["arc_easy"])

    Attributes:
      model: model from `load_model`.
      tokenizer: None, as in the harness's base class. The tokenizer is `text_tokenizer`.
      text_tokenizer: the checkpoint's `Tokenizer`.
      max_length: largest number of tokens that the model sees.
    """

    def __init__(
        self,
        path: str,
        scheme: str | None = None,
        dtype: str = "float32",
        kernel: str | None = None,
        mesh: str | None = None,
        dispatch: str = "psum",
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_gen_toks: int = 256,
        seed: int = 0,
        **ignored: Any,
    ):
        """Load a checkpoint.

        Args:
          path: folder or Hub name, as for `load_model`.
          scheme: as for `load_model`. Defaults to None.
          dtype: as for `load_model`. Defaults to "float32".
          kernel: name of a backend, the argument `backend` of `load_model`. Defaults to None.
          mesh: sizes of the mesh axes, such as "expert=4,tensor=2". None runs on one device.
          dispatch: as for `load_model`. Defaults to "psum".
          max_length: largest number of tokens that the model sees. None takes 2048, or the
            positions of the model if there are fewer.
          batch_size: number of texts per call of the model. None and "auto" mean 8.
          max_gen_toks: largest number of new tokens if a task does not set it. Defaults to 256.
          seed: seed of sampled texts. Defaults to 0.
          **ignored: arguments that the harness passes to every model, such as a device.

        Raises:
          CheckpointError: the checkpoint or its tokenizer cannot be loaded.
          ValueError: an argument is wrong; see `load_model`.
        """
        super().__init__()
        self.text_tokenizer: Tokenizer = load_tokenizer(path)
        devices = None if mesh is None else make_mesh(mesh)
        how = {"backend": kernel, "mesh": devices, "dispatch": dispatch}
        self.model = load_model(path, scheme=scheme, dtype=jnp.dtype(dtype), **how)
        self.max_length = max_length or min(2048, self.model.config.max_positions)
        self._batch = 8 if batch_size in (None, "auto") else int(batch_size)
        self._max_gen_toks, self._path = max_gen_toks, str(path)
        self._key = jax.random.key(seed)

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text."""
        if not self.text_tokenizer.stop_ids:
            raise ValueError(
                f"{self._path}: expected eos_token_id in generation_config.json or config.json, "
                "found it in neither"
            )
        return self.text_tokenizer.stop_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """Id of the token in front of a text without context: bos_token, or the end of a text."""
        name = self.text_tokenizer.special.get("bos_token")
        found = None if name is None else self.text_tokenizer.encoder.token_to_id(name)
        return self.eot_token_id if found is None else found

    @property
    def tokenizer_name(self) -> str:
        """Name under which the harness stores requests of this tokenizer."""
        return self._path.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **ignored: Any
    ) -> list[int]:
        """Return the token ids of a text, with special tokens if the caller asks for them."""
        return self.text_tokenizer.encode(string, special=bool(add_special_tokens)).tolist()

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the source of the checkpoint's chat template, or an empty text."""
        return self.text_tokenizer.template or ""

    def apply_chat_template(self, chat_history, add_generation_prompt: bool = True) -> str:
        """Return messages as one text, rendered by the chat template."""
        return self.text_tokenizer.chat(chat_history, add_generation_prompt=add_generation_prompt)

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
                pairs.append((("", ""), *make_disjoint_window(window)))
                owners.append(index)
        sums = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
            sums[owner] += value
        return sums

    def _loglikelihood_tokens(self, requests, **ignored) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding yields it.

        The longest texts run first. If memory does not suffice, the run then fails at the start and
        not after an hour.
        """
        order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i][1:])))
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for chosen in _chunks(order, self._batch):
            texts = [self._cut(*requests[i][1:]) for i in chosen]
            for i, result in zip(chosen, self._score(texts), strict=True):
                found[i] = result
                self.cache_hook.add_partial("loglikelihood", requests[i][0], result)
        return found

    def _cut(self, context, continuation) -> tuple[list[int], int]:
        """Return the last tokens that fit the model, and how many of them to score.

        One token more than `max_length` fits, because the last token is only predicted.
        """
        whole = [*context, *continuation][-(self.max_length + 1) :]
        return whole, min(len(continuation), len(whole) - 1)

    def _score(self, texts: Sequence[tuple[list[int], int]]) -> Iterator[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding yields it.

        Args:
          texts: pairs of token ids and the number of last tokens to score; at most one batch.
        """
        width = round_up(max(len(whole) for whole, _ in texts) - 1, _STEP)
        ids = np.zeros((self._batch, min(width, self.max_length) + 1), np.int32)
        lengths, counts = (np.ones(self._batch, np.int32) for _ in range(2))
        for row, (whole, count) in enumerate(texts):
            ids[row, : len(whole)] = whole
            lengths[row], counts[row] = len(whole) - 1, count
        places, ends = np.arange(ids.shape[1] - 1)[None, :], lengths[:, None]
        counted = (places < ends) & (places >= ends - counts[:, None])
        sums, likeliest = score_texts(self.model, ids[:, :-1], ids[:, 1:], counted, lengths)
        sums, likeliest = np.asarray(sums, np.float64), np.asarray(likeliest)
        return zip(sums[: len(texts)].tolist(), likeliest[: len(texts)].tolist(), strict=True)

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to the first stop string."""
        found = [""] * len(requests)
        by_options: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_options.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        for chosen in by_options.values():
            options = normalize_gen_kwargs(requests[chosen[0]].args[1], self._max_gen_toks)
            chosen.sort(key=lambda i: -len(requests[i].args[0]))
            for some in _chunks(chosen, self._batch):
                texts = self._continue([requests[i].args[0] for i in some], options)
                for i, text in zip(some, texts, strict=True):
                    found[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return found

    def _continue(self, contexts: list[str], options) -> list[str]:
        """Return the texts that follow one batch of contexts, which share all options."""
        new = min(options["max_gen_toks"], self.max_length - 1)
        prompts = [self.tok_encode(text)[-(self.max_length - new) :] for text in contexts]
        prompts = [prompt or [self.prefix_token_id] for prompt in prompts]
        lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        ids = np.zeros((len(prompts), lengths.max()), np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        self._key, key = jax.random.split(self._key)
        tokens = stream(
            self.model,
            jnp.asarray(ids),
            max_new_tokens=new,
            lengths=jnp.asarray(lengths),
            temperature=options.get("temperature", 0.0),
            top_k=options.get("top_k"),
            top_p=options.get("top_p", 1.0),
            stop_ids=self.text_tokenizer.stop_ids,
            key=key,
        )
        rows = np.zeros((len(prompts), 0), np.int32)
        for some in _chunks(tokens, _LOOK):
            rows = np.concatenate([rows, np.stack(some, axis=1)], axis=1)
            texts = [self._until(row, options["until"]) for row in rows]
            if all(ended for _, ended in texts):
                break
        return [self._until(row, options["until"])[0] for row in rows]

    def _until(self, tokens, stops) -> tuple[str, bool]:
        """Return the text of `tokens` up to its end, and whether an end was found.

        A stop id or a stop string ends the text.
        """
        ends = np.flatnonzero(np.isin(tokens, self.text_tokenizer.stop_ids))
        text = self.text_tokenizer.decode(tokens[: ends[0]] if len(ends) else tokens)
        places = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text, bool(places or len(ends))


def _chunks(values: Iterable, count: int) -> Iterator[tuple]:
    """Yield tuples of `count` values, and a shorter last one.

    `itertools.batched` does the same, but needs Python 3.12.
    """
    iterator = iter(values)
    while some := tuple(itertools.islice(iterator, count)):
        yield some
