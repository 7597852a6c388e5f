"""The device side: everything that touches a tensor."""

import os

# torch would import an installed torch_npu by itself, which fails without a CANN; the backend imports it when chosen.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
