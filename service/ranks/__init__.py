"""Ranks: loading of the model by one process or by a group of processes (tensor parallelism), and their start and end.

Imports of `service`: top level and `processes`.
"""
