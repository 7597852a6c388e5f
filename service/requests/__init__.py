"""From the bytes of a request message to a checked `Request`, within limits of memory and time.

Imports of `service`: top level, `ipc`, `text`, `rpc` and `access`.
"""
