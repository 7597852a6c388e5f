"""The parent process: starts and restarts the others, drains, and serves the metrics page.

Imports of `service`: top level, `ipc` and `text`. Never torch, never gRPC.
"""
