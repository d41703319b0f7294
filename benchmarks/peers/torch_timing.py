"""Time calls of a torch peer: one CUDA graph of all of them, replayed between two events."""

import ctypes
import statistics

import torch

_WARM_UPS, _REPLAYS = 3, 7


def time_graph(launch, calls: int) -> dict[str, float]:
    """Return the microseconds of one of the `calls` calls that `launch` enqueues."""
    _run_once(launch)
    graph = _capture(launch)
    for _ in range(_WARM_UPS):
        graph.replay()
    times = [_replay(graph) * 1e3 / calls for _ in range(_REPLAYS)]
    return {"us": statistics.median(times), "low": min(times), "high": max(times)}


def _run_once(launch):
    """Compile, allocate and fail here: a capture must do none of them."""
    launch()
    torch.cuda.synchronize()
    # A launch that a library does not check leaves its error behind; torch checks this one.
    torch.zeros(1, device="cuda")


def _capture(launch):
    """Return the graph of what `launch` enqueues."""
    graph = torch.cuda.CUDAGraph()
    try:
        # The outer stream is left even where torch's own exit from a failed capture raises.
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.graph(graph):
            launch()
    except Exception:
        # torch 2.11 ends the process when a graph of a failed capture is freed: it never is.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
        raise
    return graph


def _replay(graph):
    """Return the milliseconds of one replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
