"""Single figures in the sentences of README and guides, from ``benchmarks/results``.

A figure is text with its unit. It comes from the same rows as the tables of `benchmark_tables`, so
that a page cannot contradict a table.
"""

from collections.abc import Callable, Mapping

from readme_figures import README_FIGURES

# The name of a figure in a page -> what writes it.
FIGURES: Mapping[str, Callable[[], str]] = {**README_FIGURES}
