"""Text and token ids: model folder, tokenizer, incremental decoding, stop strings, chat templates, plain-text encoding.

Imports `npuserve.service` (errors, config, arguments), `npuserve.service.ipc` (child processes), and the built-in model
and the checks of a model's files from `npuserve.npu`.
"""
