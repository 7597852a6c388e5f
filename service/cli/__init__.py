"""Command line: one file for each command, and the modules that several commands share.

`acceptance`, `bench` and `collect` are folders of their own. `serve` is in `supervisor`.
"""
