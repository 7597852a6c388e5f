"""A model as its folder describes it: configuration, weights and their loading, rotary tables.

Imports of `npu`: top level and `backends`.
"""
