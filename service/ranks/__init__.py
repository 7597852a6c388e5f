"""Ranks: loading of the model by one process or by a group of processes (tensor parallelism), and their life.

Imports of `service`: top level, `ipc`.
"""
