"""Tables of quantizing, of converting weights to a kernel's layout, and of loading."""

from collections.abc import Callable, Mapping

import records
from records import TITLES

_SCALES = {
    "given": "scale given",
    "given, swizzled": "scale given, swizzled",
    "found": "scale found",
    "found, swizzled": "scale found, swizzled",
}


def quantize() -> str:
    """Return the table of `quantize_nvfp4` beside the speed of a copy and plain XLA."""
    result = records.read("quantize.NVIDIA-H200")
    rows = [{**row, "run": result} for row in result["rows"]]
    tokens = max(row["tokens"] for row in rows)
    rows = [row for row in rows if row["tokens"] == tokens]
    headings = (
        *("global scale", "rows x columns", "over plain XLA", "of a copy's speed"),
        *("GB/s", "us"),
    )
    lines = (
        (
            *(_SCALES[row["case"]], f"{row['tokens']} x {row['k']}", f"{row['times_xla']:.1f} x"),
            f"{row['of_floor']:.0%}".replace("%", " %"),
            *(f"{row['gb_per_s']:.0f}", f"{row['us']:.0f}"),
        )
        for row in rows
    )
    return records.table(headings, lines) + records.sources(rows)


def layout() -> str:
    """Return the table of converting the experts of one layer to a kernel's layout."""
    result = records.read("layout.NVIDIA-H200")
    rows = [{**row, "run": result} for row in result["rows"]]
    headings = "experts of a layer", "GB/s", "ms", "codes and scales, MB", "temporary memory, MB"
    lines = (
        (
            *(TITLES[row["case"]], f"{row['gb_per_s']:.0f}", f"{row['seconds'] * 1e3:.1f}"),
            *(f"{row['bytes'] / 1e6:.0f}", f"{row['scratch_given'] / 1e6:.0f}"),
        )
        for row in rows
    )
    return records.table(headings, lines) + records.sources(rows)


def load() -> str:
    """Return the table of loading a checkpoint, with its peaks of memory."""
    results = {
        "an H200": records.read("load.NVIDIA-H200"),
        "a CPU with two cores": records.read("load.cpu"),
    }
    headings = (
        *("loaded to", "stored, GB", "seconds", "GB/s"),
        *("peak of the host, GB", "peak of the GPU, GB", "bound, GB"),
    )

    def line(device, found):
        gigabytes = {
            name: found[f"{name}_bytes"] / 1e9
            for name in ("stored", "peak", "device_peak", "bound")
        }
        peak = f"{gigabytes['device_peak']:.2f}" if gigabytes["device_peak"] else "-"
        return (
            *(device, f"{gigabytes['stored']:.2f}", f"{found['seconds']:.1f}"),
            f"{found['gigabytes_per_second']:.2f}",
            *(f"{gigabytes['peak']:.2f}", peak, f"{gigabytes['bound']:.2f}"),
        )

    rows = [{"run": result} for result in results.values()]
    text = records.table(headings, (line(*item) for item in results.items()))
    return text + records.sources(rows, device="One NVIDIA H200; one CPU with two cores")


# The name of a table in a guide -> what writes it.
TABLES: Mapping[str, Callable[[], str]] = {"quantize": quantize, "layout": layout, "load": load}
