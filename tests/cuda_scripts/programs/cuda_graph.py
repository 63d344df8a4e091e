"""A CUDA graph, which has no equivalent on other devices."""

import sys

import torch

models, output = sys.argv[1:3]

static_input = torch.zeros(4, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    static_output = static_input * 2
graph.replay()
