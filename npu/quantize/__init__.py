"""Conversion of a float checkpoint to W8A8: reading, smoothing of each layer, quantization, writing.

Imports of `npu`: top level and `model`.
"""
