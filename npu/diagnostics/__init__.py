"""Comparisons of a device with the CPU and with golden functions: by kernel, captured step and token.

Imports of `npu`: top level, `backends`, `model` and `execution`.
"""
