"""Command line: one file for each command, and the modules that several commands share.

`bench` and `acceptance` are folders of their own. `serve` is in `supervisor`, `keys` in `access`.
"""
