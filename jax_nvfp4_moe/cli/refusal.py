"""Report how far a checkpoint that is refused would load."""

import pathlib
from typing import Any

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import merge_text_config
from jax_nvfp4_moe.checkpoint.survey import Survey, SurveyedModule, survey_checkpoint
from jax_nvfp4_moe.cli.escaping import escape_line
from jax_nvfp4_moe.cli.inspection import any_layer, mebibytes
from jax_nvfp4_moe.cli.output import show, table, to_json
from jax_nvfp4_moe.models.loading import find_architecture


def report_refused(
    path: str | pathlib.Path, error: CheckpointError, as_json: bool
) -> CheckpointError:
    """Print which modules of a refused checkpoint can be read.

    Nothing is printed if the config or the header of a file cannot be read.

    Args:
      path: folder or Hub name of the checkpoint.
      error: the error of the load.
      as_json: whether to print JSON.

    Returns:
      The error to raise: one sentence for each reason, with a star for each layer number.
    """
    try:
        survey = survey_checkpoint(path)
    except CheckpointError:
        return error  # nothing can be told about the modules, and `error` says why
    problems = _each_once(
        [*_refused_family(survey), *map(any_layer, (*error.problems, *survey.problems))]
    )
    if as_json:
        show(to_json(_report(path, survey, problems)))
    else:
        show("\n".join(map(escape_line, _describe(path, survey))))
    return CheckpointError(problems, error.where or str(path))


def _refused_family(survey) -> list[str]:
    """Return why the architecture is refused, or nothing."""
    try:
        find_architecture(merge_text_config(survey.config))
    except CheckpointError as error:
        return list(error.problems)
    return []


def _each_once(problems) -> list[str]:
    return list(dict.fromkeys(problems))


def _report(path, survey: Survey, problems) -> dict[str, Any]:
    """Return the survey as values for JSON; see `cli.inspection.bytes_report`."""
    return {
        "path": str(path),
        "architectures": survey.config.get("architectures"),
        "tensors": sum(module.tensors for module in survey.modules),
        "file_bytes": _bytes(survey),
        "readable_bytes": _bytes(survey, "read"),
        "refused": problems,
        "modules": [
            {
                "module": name,
                "count": len(modules),
                "format": form,
                "verdict": verdict,
                "bytes": sum(module.nbytes for module in modules),
            }
            for (name, form, verdict), modules in _kinds(survey).items()
        ],
    }


def _describe(path, survey: Survey):
    """Yield the survey as lines of text."""
    names = survey.config.get("architectures")
    names = names if isinstance(names, list) else [names]
    said = [f"{rules.summary} ({rules.source})" for rules in survey.quant.rules]
    yield f"{path}"
    yield f"architecture  {', '.join(map(_escaped, names))}"
    yield f"tensors       {sum(m.tensors for m in survey.modules)}, {mebibytes(_bytes(survey))}"
    yield f"quantization  {'; '.join(said) or 'none that is supported'}"
    yield ""
    rows = [("module in the file", "count", "format", "size", "verdict")]
    for (name, form, verdict), modules in _kinds(survey).items():
        size = mebibytes(sum(module.nbytes for module in modules))
        rows.append((_escaped(name), str(len(modules)), form, size, verdict))
    read = mebibytes(_bytes(survey, "read"))
    yield from table([*rows, ("total that can be read", "", "", read, "")])


def _kinds(survey) -> dict[tuple[str, str, str], list[SurveyedModule]]:
    """Return the modules that differ in their layer alone as one kind."""
    kinds: dict[tuple[str, str, str], list[SurveyedModule]] = {}
    for module in survey.modules:
        key = any_layer(module.name), module.format, str(module.verdict)
        kinds.setdefault(key, []).append(module)
    return kinds


def _escaped(name) -> str:
    """Return a name from a file without control characters, which could change a terminal."""
    return quoted(str(name))[1:-1]


def _bytes(survey, verdict=None) -> int:
    """Return the bytes of all modules, or of those with one verdict."""
    return sum(m.nbytes for m in survey.modules if verdict in (None, m.verdict))
