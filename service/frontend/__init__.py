"""The front-end process: the gRPC services and the building of response messages.

Imports of `service`: every folder but `engine`, `scheduling` and `cli`.
"""
