"""A separate stream, and a device context."""

import sys

import numpy as np
import torch

models, output = sys.argv[1:3]

torch.cuda.set_device(0)
stream = torch.cuda.Stream()
with torch.cuda.device(0), torch.cuda.stream(stream):
    a = torch.arange(16, dtype=torch.float32, device="cuda").reshape(4, 4)
    b = a @ a.T
stream.synchronize()
torch.cuda.current_stream().wait_stream(stream)
b.record_stream(torch.cuda.current_stream())
torch.cuda.nvtx.range_push("copy")
np.save(f"{output}/product.npy", b.cpu().numpy())
torch.cuda.nvtx.range_pop()
