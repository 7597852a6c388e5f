"""Ascend NPUs (Atlas A2 and A3) through torch_npu: backend, graphs, updates of their lengths, errors."""
