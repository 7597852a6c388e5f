"""One gRPC call, whatever its message: server, status, log line, trace, health, connections.

Imports of `service`: top level, `ipc` and `processes`.
"""
