"""Count the programs that JAX compiles."""

import jax

# JAX reports this event once for each program that it compiles.
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """The programs that JAX has compiled since this object was made.

    Attributes:
      count: their number.
    """

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event, *_, **__):
        if event == _COMPILED:
            self.count += 1
