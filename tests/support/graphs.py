"""CUDA graphs of calls."""

import torch


def capture(call):
    """Warms up with one eager call, then captures a second call: the graph and the result of the call."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    return graph, result
