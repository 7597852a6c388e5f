"""Identity of callers and secrets of the server: API keys, TLS, and settings files that are reloaded when they change.

Imports of `service`: top level and `rpc`.
"""
