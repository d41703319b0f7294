"""Write the tables and figures of README and guides that code and measurements decide.

``python docs/tables.py`` replaces the text between two comments. They name a table of this module,
of another ``*_tables.py`` or of ``docs/experiments.json``, or a figure of `figures`::

    <!-- table: refused_families -->
    <!-- end of table -->

    <!-- table: experiments.steps_without_chains -->
    <!-- end of table -->

    It runs at <!-- figure: decode_qwen3_1 -->656 tokens/s<!-- end of figure --> on one H200.
"""

import collections
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import accuracy_tables
import benchmark_tables
import experiments
import figures
import kernel_tables
import measure
import parallel_tables

from jax_nvfp4_moe.checkpoint.folder import merge_text_config
from jax_nvfp4_moe.checkpoint.formats import config_keys
from jax_nvfp4_moe.checkpoint.formats.refused_formats import REFUSED_FORMATS
from jax_nvfp4_moe.models.loading import ARCHITECTURES, find_architecture
from jax_nvfp4_moe.models.refused import REFUSED_FAMILIES
from jax_nvfp4_moe.numerics.activations import ACTIVATIONS, ALIASES

GUIDES = pathlib.Path(__file__).parent / "guides"
README = GUIDES.parents[1] / "README.md"
_QUANTIZERS = ("nvidia-modelopt", "llmcompressor")
# The parts of drafting layers that every file has.
_DRAFT = ("joint", "embedding_norm", "hidden_norm", "layers", "norm")
# What `measure` writes -> how the table shows it.
_MEASURES = dict.fromkeys(("experts", "blocks", "logits", "decoding"), "{:.1e}")
_MEASURES |= {"bfloat16": "{:.2f}", "gpu": "{:.2f}", "mesh": "{:.1e}"}
# What `measure` writes -> the column of the table of families.
_WORST = {"logits": "logits on a CPU", "gpu": "rounding on a GPU", "mesh": "mesh"}
_PLACE = re.compile(r"(<!-- table: ([\w.]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_FIGURE = re.compile(r"(<!-- figure: (\w+) -->).*?(<!-- end of figure -->)", re.DOTALL)


def families() -> str:
    """Return the table of the supported families, with the worst that `measure` has measured.

    A family has the checkpoints of the tests whose architecture is in its file. A cell is empty if
    nothing was measured. LoRA is "yes" for each family with a checkpoint, because
    ``tests/training/test_lora.py`` adapts every checkpoint.
    """
    names, measured = collections.defaultdict(list), collections.defaultdict(list)
    for name, architecture in ARCHITECTURES.items():
        names[_title(architecture)].append(f"`{name}`")
    results = measure.read_results()
    for folder in measure.folders():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        family = _title(find_architecture(merge_text_config(config)))
        measured[family].append(results.get(folder.name, {}))
    drafts = {_title(row) for row in ARCHITECTURES.values() if row.drafting}
    columns = "family", "checkpoints", *_WORST.values(), "LoRA", "drafts", "`architectures`"
    rows = [columns, ["---"] * len(columns)]
    for family in sorted(names, key=str.lower):
        found = measured[family]
        worst = (_worst(key, found) for key in _WORST)
        lora, drafted = "yes" if found else "", "mtp" if family in drafts else ""
        rows.append((family, len(found), *worst, lora, drafted, ", ".join(names[family])))
    devices = {one["gpu_device"] for found in measured.values() for one in found if "gpu" in one}
    table = "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)
    return f"{table}\nGPU: {', '.join(sorted(devices)) or 'not measured'}.\n"


def _worst(key: str, measured: Sequence[Mapping[str, Any]]) -> str:
    """Return the largest of the values that several checkpoints have under one key, as text."""
    values = [one[key] for one in measured if key in one]
    worst = _MEASURES[key].format(max(values)) if values else ""
    return "0" if worst == "0.0e+00" else worst.replace("e-0", "e-")


def drafting() -> str:
    """Return the table of the families whose drafting layers are read, and of their names."""
    forms = {_title(row): row.drafting for row in ARCHITECTURES.values() if row.drafting}
    rows = []
    for title in sorted(forms, key=str.lower):
        names = [name.format(first="N", last="L") for name in forms[title].names.values()]
        inside = [
            name for part, name in zip(forms[title].names, names, strict=True) if part in _DRAFT
        ]
        rows.append(f"| {title} | {', '.join(f'`{name}`' for name in inside)} |")
    return "\n".join(["| family | names |", "|---|---|", *rows]) + "\n"


def _title(architecture) -> str:
    """Return how the file of an architecture names its family."""
    file = sys.modules[architecture.read_config.__module__]
    return (file.__doc__ or "").splitlines()[0].rstrip(".")


def activations() -> str:
    """Return the table of the activations between the two matrices of an expert."""
    rows = []
    for name, activation in ACTIVATIONS.items():
        others = ", ".join(f"`{alias}`" for alias, meant in ALIASES.items() if meant == name)
        order = "alternate" if activation.interleaved else "gate, then up"
        numbers = {"alpha": activation.alpha, "beta": activation.beta, "limit": activation.limit}
        usual = {"alpha": 1.0, "beta": 0.0, "limit": math.inf}
        own = ", ".join(f"{key} {value:g}" for key, value in numbers.items() if value != usual[key])
        rows.append(f"| `{name}` | {others} | {order if activation.gated else 'no gate'} | {own} |")
    heading = (
        "| `activation` | other names | gate and up rows of the first matrix | default parameters |"
    )
    return "\n".join([heading, "|---|---|---|---|", *rows]) + "\n"


def _reasons(heading: str, refused: Mapping[str, str]) -> str:
    """Return a table of names and reasons; names with one reason share a row."""
    names = collections.defaultdict(list)
    for name, reason in refused.items():
        names[reason].append(f"`{name}`")
    rows = [f"| {', '.join(listed)} | {reason} |" for reason, listed in names.items()]
    return "\n".join([f"| {heading} | why it is refused |", "|---|---|", *rows]) + "\n"


def refused_families() -> str:
    """Return the table of the architectures that are known and refused."""
    return _reasons("`architectures`", REFUSED_FAMILIES)


def refused_formats() -> str:
    """Return the table of the formats that are known and refused."""
    return _reasons("`quant_algo`, `format` or `quant_method`", REFUSED_FORMATS)


def harmless_keys() -> str:
    """Return the table of the keys of quantization configs that change nothing."""
    reasons = {}
    for known in config_keys.ALL:
        reasons.update(known.harmless)
    names = collections.defaultdict(list)
    for name, reason in sorted(reasons.items()):
        names[reason].append(f"`{name}`")
    rows = [f"| {', '.join(listed)} | {reason} |" for reason, listed in names.items()]
    return "\n".join(["| key | why it changes nothing |", "|---|---|", *rows]) + "\n"


def checkpoints() -> str:
    """Return the table of the checkpoints of the tests, with what `measure` has measured."""
    results = measure.read_results()
    columns = "checkpoint", *_MEASURES, "drafts", "architecture", "quantized by", "transformers"
    rows = [columns, ["---"] * len(columns)]
    rows += [_checkpoint(folder, results.get(folder.name, {})) for folder in measure.folders()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _checkpoint(folder: pathlib.Path, measured: Mapping[str, float]) -> list[str]:
    """Return the row of one checkpoint. A cell is empty if nothing was measured or is there."""
    config, facts = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("config", "reference")
    )
    tools = {name.replace("_", "-"): version for name, version in facts["tools"].items()}
    quantizer = [f"{name} {tools[name]}" for name in _QUANTIZERS if name in tools]
    without = () if accuracy_tables.has_experts(measured) else ("experts", "blocks")
    errors = [
        form.format(measured[key]) if key in measured and key not in without else ""
        for key, form in _MEASURES.items()
    ]
    errors = ["0" if error == "0.0e+00" else error.replace("e-0", "e-") for error in errors]
    name, architecture = f"`{folder.name}`", config["architectures"][0]
    drafts = "mtp" if ARCHITECTURES[architecture].drafting else ""
    quantized = (quantizer or ["none"])[0].replace("nvidia-modelopt", "ModelOpt")
    return [name, *errors, drafts, architecture, quantized, tools["transformers"]]


# The name of a table in a guide -> what writes it.
TABLES: Mapping[str, Callable[[], str]] = {
    "activations": activations,
    "families": families,
    "refused_families": refused_families,
    "refused_formats": refused_formats,
    "harmless_keys": harmless_keys,
    "checkpoints": checkpoints,
    "drafting": drafting,
    **accuracy_tables.TABLES,
    **benchmark_tables.TABLES,
    **kernel_tables.TABLES,
    **parallel_tables.TABLES,
    **experiments.tables(),
}


def with_tables(text: str) -> str:
    """Return the Markdown of a page with its tables and figures as they are now.

    Raises:
      KeyError: the page names a table that is not in `TABLES`, or a figure that is not in
        `figures.FIGURES`.
    """
    text = _PLACE.sub(lambda place: place[1] + TABLES[place[2]]() + place[3], text)
    return _FIGURE.sub(lambda place: place[1] + figures.FIGURES[place[2]]() + place[3], text)


def pages() -> list[pathlib.Path]:
    """Return README and the guides."""
    return [README, *sorted(GUIDES.glob("*.md"))]


if __name__ == "__main__":
    for path in pages():
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
