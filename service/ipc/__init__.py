"""Communication between the processes of one server: messages, both ends of the local socket, and the protocol of child
processes.

It also holds the streams that a restarted engine continues. Imports of `service`: the files at its top level only.
"""
