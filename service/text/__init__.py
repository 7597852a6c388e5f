"""Text and token ids: model folder, tokenizer, incremental decoding, stop strings, chat templates.

Imports of `service`: top level and `ipc`.
"""
