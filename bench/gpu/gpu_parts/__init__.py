"""The parts of bench/gpu/gpu.py. Each module of a part has `units(context)`: names, and what each runs, which yields rows.

A row is a dict: "table" is the heading that it goes under, "ok": False says that something is wrong, all else are
columns.
"""
