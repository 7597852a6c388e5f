"""Identity of callers and secrets of the server: API keys, TLS, and files that are read again when they change.

Imports of `service`: top level and `rpc`.
"""
