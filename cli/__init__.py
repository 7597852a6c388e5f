"""Command line: one file for each command, and the modules that several commands share.

It lies above `service`, `client` and `npu`, and none of them imports it. `acceptance`, `bench` and `collect` are
folders of their own.
"""
