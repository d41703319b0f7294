"""Tables of README and guides that come from ``benchmarks/results``, where the benchmarks write.

A table has one row for each cell that was measured, of the newest run that has the cell. The line
under a table has the devices, dates, versions and commits.
"""

from collections.abc import Callable, Mapping

import conversion_tables
import cpu_tables
import howto_tables
import layer_tables
import memory_tables
import model_tables
import speeds

# The name of a table in a guide -> what writes it.
TABLES: Mapping[str, Callable[[], str]] = {
    **speeds.TABLES,
    **layer_tables.TABLES,
    **model_tables.TABLES,
    **cpu_tables.TABLES,
    **conversion_tables.TABLES,
    **memory_tables.TABLES,
    **howto_tables.TABLES,
}
