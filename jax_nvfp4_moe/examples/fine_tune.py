"""Fine-tune a checkpoint in NVFP4 with LoRA, save the adapters, and merge them into the weights.

Run it: ``python -m jax_nvfp4_moe.examples.fine_tune --output FOLDER``. FOLDER gets ``adapters``,
the files of PEFT, and ``merged``, a checkpoint that `load_model` reads. On a CPU this takes
minutes.

Without ``--text``, the example model learns a style of Python that it has never seen: the functions
of an imagined shipping office, which `write_functions` writes. The held-out functions convert pairs
of units that no training function converts.
"""

import argparse
import functools
import pathlib

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.examples.lora import CHECKPOINT, loss

UNITS = (
    "barrel",
    "bolt",
    "brick",
    "bundle",
    "cask",
    "coil",
    "crate",
    "drum",
    "keg",
    "loaf",
    "pallet",
    "pipe",
    "reel",
    "sack",
    "sheet",
    "spool",
    "tile",
    "truck",
)
PLACES = ("Dock", "Harbor", "Yard", "Quay", "Depot", "Annex", "Kiln", "Mill")
FORM = """\
#: {place} | {one} -> {other}
@audited("{place_lower}-{index:03d}")
def {one}To{other_title}({one}Qty: Qty, *, spare: Qty = Qty({spare})) -> Maybe[Qty]:
  unless({one}Qty >= spare, orElse="too few of {one}")
  {other}Qty = ({one}Qty - spare).per({per})
  return Some({other}Qty.asUnit("{other}"))


"""
PROMPT = '#: Dock | crate -> truck\n@audited("dock-007")\ndef'


def is_held_out(one: int, other: int) -> bool:
    """Return whether functions that convert unit `one` to unit `other` are kept for the test."""
    return (3 * one + other) % 5 == 0


def write_functions(count: int, *, held_out: bool, seed: int = 0) -> str:
    """Return the source of `count` functions of the shipping office.

    Args:
      count: number of functions.
      held_out: whether to convert the pairs of units that are kept for the test, or the others.
      seed: seed of the choice.
    """
    rng, found = np.random.default_rng(seed), []
    while len(found) < count:
        one, other = rng.integers(len(UNITS), size=2)
        if one != other and is_held_out(one, other) == held_out:
            place = PLACES[rng.integers(len(PLACES))]
            found.append(
                FORM.format(
                    place=place,
                    place_lower=place.lower(),
                    index=rng.integers(1000),
                    one=UNITS[one],
                    other=UNITS[other],
                    other_title=UNITS[other].title(),
                    spare=rng.integers(1, 10),
                    per=rng.integers(2, 100),
                )
            )
    return "".join(found)


def make_rows(tokenizer, text: str, length: int) -> np.ndarray:
    """Return the tokens of a text as rows, int32 ``[n, length]``; the last tokens may be left out.

    Raises:
      ValueError: the text has fewer than `length` tokens.
    """
    ids = tokenizer.encode(text)
    if len(ids) < length:
        raise ValueError(f"text: expected at least {length} tokens, got {len(ids)}")
    rows = len(ids) // length
    return np.asarray(ids[: rows * length], np.int32).reshape(rows, length)


@nnx.jit
def step(model, optimizer, ids):
    """Do a step of the optimizer on the LoRA parameters; return the loss before it."""
    wrt = nnx.DiffState(0, nnx.LoRAParam)
    value, gradients = nnx.value_and_grad(loss, argnums=wrt)(model, ids)
    optimizer.update(model, gradients)
    return value


def measure(model, rows, batch: int = 8) -> float:
    """Return the mean cross-entropy of rows of tokens, in nats per token."""
    whole = len(rows) // batch * batch
    parts = [rows[at : at + batch] for at in range(0, whole, batch)]
    parts += [rows[whole:]] if len(rows) > whole else []
    values = [float(_loss(model, jnp.asarray(part))) for part in parts]
    return float(np.average(values, weights=[len(part) for part in parts]))


_loss = nnx.jit(loss)


def train(model, rows, *, steps, learning_rate=1e-2, batch=8, seed=0, report=lambda done: None):
    """Train the LoRA parameters of a model, in place, with AdamW and a cosine schedule.

    Args:
      model: model with adapters.
      rows: tokens to learn, ``[n, t]``.
      steps: number of steps.
      learning_rate: the largest one; it falls to zero along a cosine. Defaults to 0.01.
      batch: number of rows of a step. Defaults to 8.
      seed: seed of the order of the rows.
      report: is called with the number of steps before the first step, and after each one.
    """
    rate = optax.cosine_decay_schedule(learning_rate, steps)
    optimizer = nnx.Optimizer(model, optax.adamw(rate, weight_decay=0.0), wrt=nnx.LoRAParam)
    rng = np.random.default_rng(seed)
    report(0)
    for done in range(1, steps + 1):
        chosen = rng.choice(len(rows), batch, replace=len(rows) < batch)
        step(model, optimizer, jnp.asarray(rows[chosen]))
        report(done)


def complete(model, tokenizer, prompt: str, new_tokens: int = 80) -> str:
    """Return a prompt and the most likely tokens after it."""
    ids = tokenizer.encode(prompt)
    new = nvfp4.generate(model, jnp.asarray([ids], jnp.int32), max_new_tokens=new_tokens)
    return tokenizer.decode([*ids, *np.asarray(new)[0].tolist()])


def read_texts(arguments) -> tuple[str, str]:
    """Return the text to learn and the held-out text that the arguments name."""
    if arguments.text is None:
        made = functools.partial(write_functions, seed=arguments.seed)
        return made(400, held_out=False), made(16, held_out=True)
    text = arguments.text.read_text(encoding="utf-8")
    if arguments.held_out is not None:
        return text, arguments.held_out.read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def parse(arguments=None):
    """Return the parsed arguments of the command line, or of a sequence of words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--checkpoint", default=CHECKPOINT, help="folder or Hub name; the example by default")
    add("--text", type=pathlib.Path, help="file to learn; by default functions that are made here")
    add("--held-out", type=pathlib.Path, help="file to test with; by default the end of --text")
    add("--rank", type=int, default=8, help="rank of the adapters (default: 8)")
    add("--targets", nargs="+", default=["mixers"], help="what to adapt (default: mixers)")
    add("--steps", type=int, default=60, help="number of steps (default: 60)")
    add("--learning-rate", type=float, default=1e-2, help="the largest one (default: 0.01)")
    add("--batch", type=int, default=8, help="sequences of a step (default: 8)")
    add("--length", type=int, default=128, help="tokens of a sequence (default: 128)")
    add("--no-merge-aware", action="store_true", help="train without the rounding of the merge")
    add("--seed", type=int, default=0, help="seed of adapters and order (default: 0)")
    add("--output", type=pathlib.Path, help="folder to write; by default nothing is written")
    return parser.parse_args(arguments)


def main(arguments=None) -> dict[str, float]:
    """Fine-tune, save and merge; return the held-out losses before, after and merged."""
    given = parse(arguments)
    model = nvfp4.load_model(given.checkpoint)
    tokenizer = nvfp4.load_tokenizer(given.checkpoint)
    rows, held_out = (make_rows(tokenizer, text, given.length) for text in read_texts(given))
    print(f"{rows.size} tokens to learn, {held_out.size} held out")
    if given.text is None:
        print(f"\nBefore:\n{complete(model, tokenizer, PROMPT)}\n")
    aware = not given.no_merge_aware
    how = {"targets": given.targets, "merge_aware": aware, "rngs": nnx.Rngs(given.seed)}
    nvfp4.add_lora(model, given.rank, **how)
    losses = {}

    def report(done):
        if done % max(1, given.steps // 5) == 0 or done == given.steps:
            losses["trained"] = measure(model, held_out)
            losses.setdefault("before", losses["trained"])
            print(f"step {done}: held-out loss {losses['trained']:.3f}", flush=True)

    how = {"learning_rate": given.learning_rate, "batch": given.batch, "seed": given.seed}
    train(model, rows, steps=given.steps, report=report, **how)
    if given.output is not None:
        nvfp4.save_lora(model, given.output / "adapters")
        merged = given.output / "merged"
        nvfp4.merge_model(given.checkpoint, given.output / "adapters", merged)
        print(f"wrote {given.output / 'adapters'} and {merged}")
    nvfp4.merge_lora(model)
    losses["merged"] = measure(model, held_out)
    print(f"merged: held-out loss {losses['merged']:.3f}")
    if given.text is None:
        print(f"\nAfter:\n{complete(model, tokenizer, PROMPT)}")
    return losses


if __name__ == "__main__":
    main()
