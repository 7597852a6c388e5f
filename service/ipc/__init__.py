"""Messages between the processes of one server, and what ties the processes together.

Both ends of the local socket between front ends and engine, the protocol of child processes, heartbeats, and
the record of a resumable stream. Imports of `service`: the files at its top level only.
"""
