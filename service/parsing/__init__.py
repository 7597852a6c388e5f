"""Reasoning and tool calls: parsing of answers, and the constraint that makes an answer a tool call.

Imports of `service`: top level, `structured_output` and `text`.
"""
