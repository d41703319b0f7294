"""Time calls of a torch peer: one CUDA graph of all of them, replayed between two events."""

import statistics

import torch

_WARM_UPS, _REPLAYS = 3, 7


def time_graph(launch, calls: int) -> dict[str, float]:
    """Return the microseconds of one of the `calls` calls that `launch` enqueues."""
    launch()  # compiles and allocates, which a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(_WARM_UPS):
        graph.replay()
    times = [_replay(graph) * 1e3 / calls for _ in range(_REPLAYS)]
    return {"us": statistics.median(times), "low": min(times), "high": max(times)}


def _replay(graph):
    """Return the milliseconds of one replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
