"""Model described by a folder: its files and configuration, storage plan, weights and their loading, rotary tables.

`config`, `folder`, `rope_config`, `families` and `layers` import no torch: front ends use them.
Imports within this folder: `families` and `forms` import `layers`, and the files here import all three. Imports of
`npu`: top level, `quantization` and `backends`.
"""
