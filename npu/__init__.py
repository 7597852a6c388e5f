"""Device side of npuserve, for CPU, CUDA and Ascend: with `kernels`, the packages that need torch.

Imports between folders go in one direction: `quantization` ← `backends` ← `model` ← `execution` ← `profiling`.
`quantize` imports `quantization` and `model`; `emulator` imports `backends`. The modules of this level import none of
the folders. Only `parallel` imports torch.
"""

import os

# torch imports an installed torch_npu automatically, which fails without CANN; the backend imports it when selected.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
