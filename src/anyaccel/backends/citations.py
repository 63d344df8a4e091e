"""URLs that several capability sheets cite as sources.

Vendor-specific URLs are defined in the module that contains the vendor's sheet.
"""

from __future__ import annotations

PYTORCH = "https://github.com/pytorch/pytorch/issues/"
DIFFUSERS = "https://github.com/huggingface/diffusers/issues/"
COMFYUI = "https://github.com/Comfy-Org/ComfyUI/issues/"

TORCH_SOURCE = "https://github.com/pytorch/pytorch/blob/v2.13.0/"
DIFFUSERS_SOURCE = "https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/"
ACCELERATE_SOURCE = "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/"

DIFFUSERS_TORCH_UTILS = DIFFUSERS_SOURCE + "utils/torch_utils.py"
TORCH_DISTRIBUTED = TORCH_SOURCE + "torch/distributed/distributed_c10d.py"
INDUCTOR_CACHE = TORCH_SOURCE + "torch/_inductor/runtime/cache_dir_utils.py"
SCHEDULER_SYNC = "https://github.com/huggingface/diffusers/pull/11696"
TENSORS = "https://docs.pytorch.org/docs/stable/tensors.html"
TORCH_INSTALL = "https://pytorch.org/get-started/locally/"

# uv selects the vendor's build of torch by name.
UV_TORCH = "https://docs.astral.sh/uv/guides/integration/pytorch/"

GB = 10**9
GIB = 2**30
