"""Profiles of the running engine: the kernels of some steps as a trace and as a table.

`session` starts and ends a profile. `trace_file` has Chrome's trace format, and `trace_folder` bounds the files
that are kept. `kernel_table` sums up the calls, and `floor` counts the bytes that they have to move. Imports of `npu`:
top level, `backends`, `model` and `execution`.
"""
