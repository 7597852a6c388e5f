"""One gRPC call, whatever its message: server, status and log line, tracing, health, connections.

Imports of `service`: top level and `ipc`.
"""
