"""Decisions of the engine about requests: which are admitted, which run, which blocks they hold, when they end.

Plain Python without I/O, torch and clocks. Imports of `service`: top level and `ipc`.
"""
