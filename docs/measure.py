"""Measure the checkpoints of the tests, and write the results that the documentation shows.

``python docs/measure.py`` writes `results.json` beside this file, and `tables.py` makes a table of
it. Results of checkpoints whose files have not changed are kept, and `--again` measures them again.
The measures are those of the tests:

* experts, blocks, logits and decoding: `tests.reference.compare`, in float32 on the exact path.
* bfloat16: `times_rounding` of ``tests/models/test_default_dtype.py``. It takes most of the time,
  and `--bfloat16` asks for it. `--gpu` measures the same on a GPU, with its kernels.
* mesh: the largest difference between the logits of one device and those of two to four, in
  float32, divided by the largest logit. `--mesh` asks for it, and needs CPUs alone.
"""

import hashlib
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
CHECKPOINTS = ROOT / "tests" / "checkpoints"
RESULTS = pathlib.Path(__file__).parent / "results.json"


def folders() -> list[pathlib.Path]:
    """Return the checkpoints of the tests that have a model and the reference of a tool."""
    found = sorted(CHECKPOINTS.glob("*/reference.safetensors"))
    return [path.parent for path in found if (path.parent / "model.safetensors").exists()]


def digest(folder: pathlib.Path) -> str:
    """Return a digest of the files of a checkpoint, and of its reference."""
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors"):
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def read_results() -> dict[str, dict[str, Any]]:
    """Return the name of each checkpoint -> its digest and what was measured."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def measure_exact(folder: pathlib.Path) -> dict[str, float]:
    """Return the errors of one checkpoint in float32, to two digits."""
    from tests.reference.compare import compare

    names = ("experts", "blocks", "logits", "decoding")
    errors = compare(folder)
    return {name: float(f"{error:.1e}") for name, error in zip(names, errors, strict=True)}


def measure_bfloat16(folder: pathlib.Path) -> dict[str, float]:
    """Return the error of the default model over that of plain rounding, to two decimals."""
    from support.models.architecture import EXACT, load_case
    from test_default_dtype import run_both, times_rounding

    case = load_case(folder.name, how=EXACT)
    error, _, _ = times_rounding(case, run_both(case.model, case.ids))
    return {"bfloat16": float(f"{error:.2f}")}


def measure_gpu(folder: pathlib.Path) -> dict[str, Any]:
    """Return the same as `measure_bfloat16`, measured on a GPU, and the name of the GPU.

    Raises:
      SystemExit: the default device is no GPU.
    """
    import jax

    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(f"--gpu: expected a GPU as the default device, got {device.device_kind}")
    return {"gpu": measure_bfloat16(folder)["bfloat16"], "gpu_device": device.device_kind}


def measure_mesh(folder: pathlib.Path) -> dict[str, float]:
    """Return the difference between the logits over a mesh and those of one device, to two digits.

    The first of a few meshes is taken that divides the experts and their intermediate size.
    """
    from support.devices.host_devices import difference, make_mesh
    from support.models.architecture import KERNELS, load_case, run

    from jax_nvfp4_moe import load_model

    case = load_case(folder.name, how=KERNELS)
    expected, problem = run(case.model, case.ids), None
    for shape in ((2, 2), (2, 1), (3, 1), (1, 2)):
        try:
            model = load_model(folder, mesh=make_mesh(shape), **KERNELS)
        except ValueError as error:
            problem = error
            continue
        return {"mesh": float(f"{difference(run(model, case.ids), expected):.1e}")}
    raise SystemExit(f"{folder.name}: {problem}")


def update(measure: Callable[[pathlib.Path], dict[str, Any]], key: str, again: bool) -> None:
    """Measure what is missing or has changed, and write the results after each checkpoint.

    Args:
      measure: returns the measures of a checkpoint.
      key: one of these measures.
      again: whether to measure what is there as well.
    """
    results = {folder.name: {"digest": digest(folder)} for folder in folders()}
    for name, old in read_results().items():
        if old["digest"] == results.get(name, {}).get("digest"):
            results[name] = old
    for folder in folders():
        if again or key not in results[folder.name]:
            results[folder.name] |= measure(folder)
            print(folder.name, results[folder.name], flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if "--mesh" in sys.argv:
        import jax

        jax.config.update("jax_num_cpu_devices", 4)
    sys.path += [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "models"))]
    update(measure_exact, "decoding", "--again" in sys.argv)
    for name, measured in (("bfloat16", measure_bfloat16), ("gpu", measure_gpu)):
        if f"--{name}" in sys.argv:
            update(measured, name, "--again" in sys.argv)
    if "--mesh" in sys.argv:
        update(measure_mesh, "mesh", "--again" in sys.argv)
