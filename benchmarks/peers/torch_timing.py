"""Time calls of a torch peer: one CUDA graph of all calls, replayed between two events."""

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
    """Run `launch` once: a capture must not compile or allocate, and errors should show here."""
    launch()
    torch.cuda.synchronize()
    # If a library does not check a launch, its error remains; torch checks this call and raises.
    torch.zeros(1, device="cuda")


def _capture(launch):
    """Return the graph of the work that `launch` enqueues."""
    graph = torch.cuda.CUDAGraph()
    try:
        # The outer context restores the stream even if torch raises at the end of a failed capture.
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.graph(graph):
            launch()
    except Exception:
        # torch 2.11 ends the process when a graph of a failed capture is freed; never free it.
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
