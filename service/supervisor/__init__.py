"""Parent process: starts and restarts the other processes, drains them, and serves the metrics page.

Imports of `service`: top level, `processes`, `text` and `ranks`. Never torch, never gRPC.
"""
