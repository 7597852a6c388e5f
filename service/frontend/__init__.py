"""Front-end process: the gRPC servers, their servicers, and the building of response messages.

Imports of `service`: every folder but `engine`, `scheduling` and `cli`.
"""
