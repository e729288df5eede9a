"""CUDA graphs of calls."""

import torch


def capture(call):
    """A graph of one call, after a first one outside of it, and what the call returned."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    return graph, result
