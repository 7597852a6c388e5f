"""Reasoning and tool calls: parsing of answers, and the constraint that makes an answer a tool call.

Imports `npuserve.service` (errors), `npuserve.service.ipc` (messages), `npuserve.service.text` and the protos.
"""
