"""Parts of bench/gpu/gpu.py. Each part's module has `units(context)`, which yields (name, function that yields rows).

A row is a dict: "table" is its heading, "ok": False marks an error, all other items are columns.
"""
