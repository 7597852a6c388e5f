"""Model described by a folder: its files and configuration, storage plan, weights and their loading, rotary tables.

`config`, `config_json`, `families`, `folder` and `rope_config` import no torch: front ends use them.
Imports of `npu`: top level and `backends`.
"""
