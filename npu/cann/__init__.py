"""Ascend's software and hosts as far as they can be read without torch: error codes, versions, checks before the start,
processors near an NPU. Imports of `npu`: top level.
"""
