"""Requests from the bytes of a message to a checked `Request`: reading, parsing, validation, preparation in threads.

Imports of `service`: top level, `ipc`, `structured_output`, `text`, `parsing`, and for reading and parsing `rpc` and
`access`.
"""
