"""Child processes: the protocol with the parent, sandboxes for input that may be hostile, and attributes of processes.

Imports of `service`: the files at its top level only.
"""
