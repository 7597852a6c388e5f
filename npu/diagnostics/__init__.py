"""Comparisons of a device with the CPU and with golden functions, kernel by kernel and token by token.

Imports of `npu`: every folder but `quantize` and `emulator`.
"""
