"""Text and token ids: model folder, tokenizer, incremental decoding, stop strings, chat templates, plain-text encoding.

Imports of `service`: top level and `processes`.
"""
