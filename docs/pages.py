"""Write the sources of the documentation: the repository's Markdown, and a reference.

The reference has a page for each entry of `PAGES`, and reads the names from the package. If the top
level exports a name from a module that no entry lists, that module gets its own page. A new public
name is therefore never left out. ``python docs`` makes HTML of these sources.
"""

import base64
import dataclasses
import functools
import importlib
import inspect
import json
import os
import pathlib
import re
import shutil
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax_nvfp4_moe
from jax_nvfp4_moe.ops.records import RECORDS
from jax_nvfp4_moe.scheme import Problem, Scheme, Target

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = jax_nvfp4_moe.__name__
# The sections of the site, with their guides in the order in which a new user needs them.
SECTIONS = {
    "Start": ("why", "install", "tutorial", "glossary"),
    "How-to": (
        "run_a_model",
        "drafting",
        "schemes",
        "flax_models",
        "in_your_jax_project",
        "other_libraries",
        "quantize",
        "evaluate",
        "fine_tune",
        "save",
        "several_gpus",
        "several_hosts",
        "serving",
    ),
    "Support": ("families", "formats", "hardware", "memory", "refused"),
    "Performance": ("performance",),
    "Accuracy": ("accuracy",),
    "Help": ("faq", "troubleshooting"),
    "Developers": ("how_it_works", "architecture", "build", "where_time_goes", "tested"),
}
GUIDES = tuple(f"docs/guides/{name}.md" for names in SECTIONS.values() for name in names)


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of the reference.

    Attributes:
      title: its title.
      text: its first paragraph.
      units: modules or subpackages. The page has the names that the top level exports from them.
      whole: modules whose public names are all on the page. A missing module is skipped.
      more: further names, as paths in the package. A name is left out if its module needs a package
        that is not installed.
    """

    title: str
    text: str = ""
    units: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    more: tuple[str, ...] = ()


PAGES = {
    "models": Page(
        "Models",
        "Load a checkpoint, run the model, and save it as it was loaded.",
        (
            "models",
            "inference.generation",
            "inference.generative_model",
            "nn.saving",
            "inference.tokenizer",
        ),
        ("nn.saving.saved_folder",),
        (
            "inference.tokenizer.Tokenizer",
            "inference.conversation.Conversation",
            "models.decoder.Decoder",
            "models.decoder.Cache",
            "models.scores.TokenScores",
        ),
    ),
    "export": Page(
        "Export",
        "Write compiled programs of models and layers with `jax.export`, and load them again.",
        ("inference.exporting",),
    ),
    "layers": Page(
        "Layers",
        "Flax NNX modules for your own models.",
        (
            "nn.linear",
            "nn.experts",
            "nn.variables",
            "numerics.routing",
            "numerics.activations",
        ),
        more=(
            "nn.experts.token_router.TokenRouter",
            "nn.experts.moe.LatentProjections",
            "nn.experts.routed_experts.FP8Experts",
            "nn.experts.routed_experts.UnquantizedExperts",
            "nn.experts.routed_experts.ExpertOptions",
            "numerics.rope.Rope",
        ),
    ),
    "ops": Page(
        "Ops",
        "Functions of arrays. Each function chooses scheme and backend while it is traced.",
        ("ops",),
        ("ops",),
    ),
    "weights": Page(
        "Weights",
        "NVFP4 tensors as pytrees, and functions of NVFP4 numbers.",
        ("numerics.tensor", "numerics.nvfp4", "numerics.layouts", "numerics.fp8"),
        more=(
            "numerics.tensor.TransposedNVFP4Tensor",
            *(
                f"numerics.nvfp4.{name}"
                for name in ("quantize", "dequantize", "fake_quantize", "pack", "unpack", "decode")
            ),
        ),
    ),
    "training": Page(
        "Training",
        "Low-rank adapters beside frozen weights, their files, and merging.",
        ("training.lora", "training.peft_files", "training.merging", "training.merged_checkpoint"),
    ),
    "choice": Page(
        "Scheme and backend",
        "The scheme says which numbers are computed, and the backend which kernel does it.",
        ("scheme", "backends", "nn.explanation"),
    ),
    "checkpoints": Page(
        "Checkpoints",
        "Read and write checkpoint folders, and inspect what is inside.",
        ("checkpoint", "cli.inspection"),
        more=(
            "cli.inspection.inspect",
            "checkpoint.safetensors.open_tensors",
            "checkpoint.export.write_checkpoint",
            "checkpoint.export.write_safetensors",
            "checkpoint.export.LazyTensor",
        ),
    ),
    "quantizing": Page(
        "Quantizing and quality",
        "Make an NVFP4 model, and measure how much accuracy it lost.",
        (
            "quantization.pipeline",
            "quantization.casting",
            "quantization.module_calibration",
            "inference.evaluation",
        ),
        more=(
            "inference.harness.HarnessModel",
            "quantization.layer_errors.measure_errors",
            "quantization.layer_errors.LayerErrors",
            "numerics.rounding.Algorithm",
            "numerics.rounding.quantize_weight",
        ),
    ),
    "parallel": Page(
        "Several devices",
        "Balance experts over the devices of a mesh, and join several processes.",
        more=(
            "inference.balance.count_experts",
            "inference.balance.place_model",
            "inference.balance.device_load",
            "parallel.placement.balance_experts",
            "parallel.placement.Placement",
            "parallel.placement.imbalance",
            "parallel.peers.connect_peers",
            "parallel.whole_steps.start_together",
            "parallel.processes.join",
            "parallel.processes.make_mesh",
            "parallel.processes.is_first",
        ),
    ),
    "libraries": Page(
        "Other libraries",
        "Use NVFP4 weights in models that [Qwix](https://github.com/google/qwix) quantizes.",
        more=("nn.qwix_provider.NVFP4Provider", "nn.qwix_provider.quantize_params"),
    ),
    "testing": Page(
        "Testing",
        "Cases, random parameters and the accuracy rule, for your own tests.",
        ("testing",),
        ("testing",),
    ),
}


def public(module: types.ModuleType) -> dict[str, Any]:
    """Return the public names of `module` and their values, without modules.

    These are the names in its ``__all__``. Without ``__all__``, they are the names that the module
    defines or, for the package itself, the names that it imports.
    """
    names = getattr(module, "__all__", None)
    found = {n: getattr(module, n) for n in names or vars(module) if not n.startswith("_")}
    found = {n: value for n, value in found.items() if not isinstance(value, types.ModuleType)}
    if names or module is jax_nvfp4_moe:
        return found
    return {
        n: value
        for n, value in found.items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    }


def _members(path) -> dict[str, Any]:
    """Return the public names of a module of the package; none if there is no such module."""
    try:
        module = importlib.import_module(f"{PACKAGE}.{path}")
    except ModuleNotFoundError as error:
        if error.name == f"{PACKAGE}.{path}":
            return {}
        raise
    return {f"{path}.{name}": value for name, value in public(module).items()}


def _listed(paths) -> dict[str, Any]:
    """Return names of the package and their values, without those that need a missing package."""
    found = {}
    for path in paths:
        module, _, name = path.rpartition(".")
        try:
            found[path] = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
        except ModuleNotFoundError as error:
            if f"{error.name}.".startswith(f"{PACKAGE}."):
                raise
    return found


def left_out(pages: Mapping[str, Page] = PAGES) -> list[str]:
    """Return the names that pages list, and that need a package which is not installed."""
    paths = [path for page in pages.values() for path in page.more]
    return [path for path in paths if path not in _listed(paths)]


def _is_in(value, unit: str) -> bool:
    """Return whether the module or subpackage `unit` defines a value."""
    return f"{value.__module__}.".startswith(f"{PACKAGE}.{unit}.")


def _own_page(unit) -> Page:
    """Return the page of a module that no entry lists, such as "Expert mesh"."""
    return Page(unit.rpartition(".")[2].replace("_", " ").capitalize(), units=(unit,))


def reference(pages: Mapping[str, Page] = PAGES) -> dict[str, tuple[Page, dict[str, Any]]]:
    """Return the pages of the reference by their keys, each with its names and their values."""
    left = public(jax_nvfp4_moe)
    units = {unit for page in pages.values() for unit in page.units}
    missed = [v for v in left.values() if not any(_is_in(v, unit) for unit in units)]
    others = sorted({value.__module__.removeprefix(f"{PACKAGE}.") for value in missed})
    filled = {}
    for key, page in {**pages, **{unit: _own_page(unit) for unit in others}}.items():
        names = {
            name: value
            for name, value in left.items()
            if any(_is_in(value, unit) for unit in page.units)
        }
        for found in (*map(_members, page.whole), _listed(page.more)):
            seen = {id(value) for value in names.values()}
            names |= {name: value for name, value in found.items() if id(value) not in seen}
        if names:
            filled[key] = page, names
    return filled


def _directive(value) -> str:
    """Return the autodoc directive for a value."""
    if not inspect.isclass(value):
        return "autofunction" if callable(value) else "autodata"
    return "autoexception" if issubclass(value, BaseException) else "autoclass"


def render(page: Page, names: Mapping[str, Any]) -> str:
    """Return the Markdown of a page of the reference; autodoc fills in the names."""
    blocks = [f"# {page.title}\n\n{_with_links(page.text)}\n"]
    for name, value in names.items():
        directive = f".. {_directive(value)}:: {PACKAGE}.{name}"
        blocks.append(f"## {name.rpartition('.')[2]}\n\n```{{eval-rst}}\n{directive}\n```\n")
    return "\n".join(blocks)


def _with_links(text) -> str:
    """Return a sentence with names in backticks as references, as docstrings have them."""
    return re.sub(r"(?<!})`([\w.]+)`", r"{py:obj}`\1`", text)


def _link(name) -> str:
    """Return a link to a name of the reference."""
    return f"{{py:obj}}`{name} <{PACKAGE}.{name}>`"


def _first_line(value) -> str:
    """Return the first sentence of a docstring as Markdown, also for a cell of a table."""
    words = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    code = words.replace("``", "`").replace("|", "\\|")
    return re.sub(r"<(\w)", r"&lt;\1", code)


_OPS = """Each op has a definition in plain JAX, the backend `reference`, which runs on every device
of XLA. Where the table names a kernel, that kernel runs the problems that its limits allow.
[Supported hardware](../docs/guides/hardware.md) lists the limits, and says which kernels were
executed, emulated or only compiled. A kernel with the remark W4A4 does not run W4A16. The columns
8.x to 12.x are compute capabilities of NVIDIA GPUs."""


def overview() -> str:
    """Return the Markdown of the page with all names of the reference, one line each."""
    blocks = [
        "# Overview\n\nThis page lists all public names. After `import jax_nvfp4_moe as nvfp4`, a "
        "name without a\nmodule is `nvfp4.NAME`. Import the others from their modules:\n\n"
        "```python\nfrom jax_nvfp4_moe.inference.tokenizer import Tokenizer\n```\n"
    ]
    for key, (page, names) in reference().items():
        blocks.append(f"## {page.title}\n\n{_with_links(page.text)} [Full page]({key}.md).\n")
        # A list, and not a table, because a phone shows long names in a list without scrolling.
        lines = [f"- {_link(name)}: {_first_line(value)}" for name, value in names.items()]
        blocks.append("\n".join(lines) + "\n")
    blocks.append(f"## Ops and their kernels\n\n{_OPS}\n\n{ops_table()}")
    return "\n".join(blocks)


# Columns of the table of ops -> the device of each that decides.
_DEVICES = {
    "CPU": Target("cpu"),
    "8.x": Target("cuda", (8, 0)),
    "9.0": Target("cuda", (9, 0)),
    "10.x": Target("cuda", (10, 0)),
    "12.x": Target("cuda", (12, 0)),
}
# Public op -> the ops of the records that run it, where they have other names.
_OPS_OF_RECORDS = {
    "attention": ("attention", "latent_attention"),
    "linear": ("grouped_gemm",),
}
_EQUATION = re.compile(r"``([^`]+ = [^`]+)``")


def _equations(value) -> list[str]:
    """Return the equations of a docstring: its first indented block, or the first inline one."""
    text = inspect.getdoc(value).partition("\nArgs:")[0]
    block = re.search(r"::\n\n((?:  .*\n)+)", text)
    if block:
        return [line.strip() for line in block[1].splitlines()]
    return [" ".join(found.split()) for found in _EQUATION.findall(text)[:1]]


def _kernels(ops, target) -> str:
    """Return the records that run one of `ops` on a device with a kernel, in order."""
    names = []
    for record in RECORDS:
        op = next((op for op in ops if op in record.lower), None)
        if op is None or not record.extension or record.platform != target.platform:
            continue
        problems = {s: Problem(op, s, target) for s in (Scheme.W4A16, Scheme.W4A4)}
        devices = [device for device in record.devices if device.reaches(problems[Scheme.W4A16])]
        if devices:
            able = [s for s, p in problems.items() if any(d.implements(p) for d in devices)]
            names.append(f"`{record.name}`" + (" (W4A4)" if able == [Scheme.W4A4] else ""))
    return "<br>".join(names)


def ops_table() -> str:
    """Return the Markdown of a table of all ops: what each computes, and its kernels by device."""
    columns = "op", "what it computes", *_DEVICES
    rows = [columns, ["---"] * len(columns)]
    for name in jax_nvfp4_moe.ops.__all__:
        value = getattr(jax_nvfp4_moe.ops, name)
        ops = _OPS_OF_RECORDS.get(name, (name,))
        if not any(op in record.lower for op in ops for record in RECORDS):
            continue
        # An equation that stands in the first sentence is not repeated.
        first, equations = _first_line(value), _equations(value)
        lines = [first, *(f"`{line}`" for line in equations if line not in first)]
        kernels = (_kernels(ops, target) for target in _DEVICES.values())
        rows.append((_link(f"ops.{name}"), "<br>".join(lines).replace(" | ", " \\| "), *kernels))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def command_line() -> str:
    """Return the Markdown of the page about the command, from its own help."""
    import typer.main

    from jax_nvfp4_moe.cli.app import app

    blocks = [
        "# Command line\n\nResults go to standard output. Everything else goes to standard error."
    ]
    for name, command in typer.main.get_command(app).commands.items():
        blocks.append(f"\n## {name}\n\n{_with_code(inspect.cleandoc(command.help or ''))}\n")
        blocks.append("| argument | default | meaning |\n|---|---|---|")
        blocks += [_row(parameter) for parameter in command.params if parameter.name != "help"]
    return "\n".join(blocks) + "\n"


def _with_code(text) -> str:
    """Return the help of a command as Markdown, with its options as code."""
    return re.sub(r"(?<![\w`-])--\w[\w-]*", r"`\g<0>`", text)


def _row(parameter) -> str:
    """Return the table row of one argument of a command."""
    option = parameter.param_type_name == "option"
    spelled = ", ".join(f"`{o}`" for o in parameter.opts) if option else f"`{parameter.name}`"
    plain = parameter.default is None or isinstance(parameter.default, bool)
    default = "required" if parameter.required else "" if plain else f"`{parameter.default!r}`"
    words = _with_code(getattr(parameter, "help", None) or "").replace("|", "\\|")
    return f"| {spelled} | {default} | {words} |"


def linked(text: str, folder: str = "") -> Iterator[str]:
    """Yield the files of the repository that Markdown links to, as paths from its root.

    Args:
      text: the Markdown.
      folder: folder of the Markdown in the repository; its links are relative to that folder.
    """
    for target in re.findall(r"\]\(([^)#:\s]+)\)", text):
        path = os.path.normpath(os.path.join(folder, target))
        if (ROOT / path).is_file():
            yield path


@functools.cache
def _places() -> dict[str, str]:
    """Return public name -> its page of the reference."""
    return {name: key for key, (_, names) in reference().items() for name in names}


_SOURCE = re.compile(r"\[`(?:nvfp4\.)?([\w.]+)`\]\(((?:\.\./)+)jax_nvfp4_moe/[\w/]+\.py\)")


def with_reference_links(text: str) -> str:
    """Return Markdown whose links from public names to their source lead to the reference.

    On GitHub, where the reference is not, such a link shows the docstring in the source.
    """
    places = _places()

    def replace(link):
        name, up = link[1], link[2]
        if name not in places:
            return link[0]
        heading = name.rpartition(".")[2].lower()
        return f"[`{name}`]({up}reference/{places[name]}.md#{heading})"

    return _SOURCE.sub(replace, text)


def notebook_page(path: pathlib.Path, folder: pathlib.Path) -> str:
    """Return the Markdown of a notebook and its outputs; write its pictures to `folder`."""
    blocks, pictures = [], 0
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        code = cell["cell_type"] == "code"
        blocks.append(f"```python\n{source}\n```" if code else source)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{(pictures := pictures + 1)}.png"
                (folder / name).write_bytes(base64.b64decode(data["image/png"]))
                blocks.append(f"![]({name})")
            else:
                text = output.get("text", data.get("text/plain", ()))
                blocks.append(f"```text\n{''.join(text).rstrip()}\n```")
    return "\n\n".join(blocks) + "\n"


def _contents(title, pages) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def write(folder: pathlib.Path) -> None:
    """Write all sources into `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    home = _read("README.md")
    notebooks = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("notebooks/*.ipynb"))
    guides = {path: _read(path) for path in GUIDES}
    chapters = {"reference/overview": overview()}
    chapters |= {f"reference/{key}": render(*page) for key, page in reference().items()}
    chapters["reference/command_line"] = command_line()
    found = [*linked(home), "CONTRIBUTING.md", "CHANGELOG.md"]
    for path, text in guides.items():
        found += linked(text, os.path.dirname(path))
    own = [path for path in dict.fromkeys(found) if path not in (*notebooks, *guides)]
    project = [path for path in own if path.endswith(".md")]
    pages = {f"{name}.md": text for name, text in chapters.items()} | guides
    pages |= {path: _read(path) for path in project}
    sections = {
        title: [f"docs/guides/{name}.md" for name in names] for title, names in SECTIONS.items()
    }
    sections["Notebooks"] = [path.replace(".ipynb", ".md") for path in notebooks]
    sections["Reference"] = list(chapters)
    sections["Project"] = project
    listed = ((title, paths) for title, paths in sections.items() if paths)
    pages["index.md"] = home + "".join(_contents(title, paths) for title, paths in listed)
    (folder / "notebooks").mkdir(parents=True)
    pages |= {path: notebook_page(ROOT / path, folder / "notebooks") for path in notebooks}
    # Links to notebooks become links to the pages of the notebooks.
    pages = {
        path.replace(".ipynb", ".md"): re.sub(r"(\(|/)(\d\d_\w+)\.ipynb", r"\1\2.md", text)
        for path, text in pages.items()
    }
    pages = {path: with_reference_links(text) for path, text in pages.items()}
    for path in set(own) - set(project):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    for path, text in pages.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
