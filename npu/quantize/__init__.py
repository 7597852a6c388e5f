"""Conversion of a checkpoint to W8A8.

Imports of `npu`: top level and `model`.
"""
