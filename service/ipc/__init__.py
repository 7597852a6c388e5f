"""The wire between front ends and the engine: messages, their framing, and both ends of the local socket.

Imports of `service`: the files at its top level only.
"""
