"""Reasoning and tool calls: parsing of answers, and the constraint that makes an answer a tool call.

Imports of `service`: top level, `ipc` and `text`.
"""
