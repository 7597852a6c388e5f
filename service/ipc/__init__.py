"""The wire between front ends and the engine: messages, their framing, and both ends of the local socket.

Imports of `service`: top level, and the constraint of `structured_output`.
"""
