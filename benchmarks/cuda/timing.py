"""Device time of a short operation: calls captured in one CUDA graph, replayed, median of events."""

from collections.abc import Callable, Sequence

import torch

COPY_BYTES_PER_SECOND = 4.3e12
"""What a large device-to-device copy reaches on an H200, bytes read and written counted."""


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 20) -> float:
    """Microseconds per call of `calls` run one after the other; give several on different data to pass the caches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which makes what the calls read
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        times = []
        for _ in range(replays):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2] * 1000.0 / len(calls)
