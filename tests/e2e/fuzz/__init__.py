"""What a client may send that nobody thought of: HTTP/2 that is none, protobuf that is none, and any fields at all.

    python -m tests.e2e.fuzz --messages 100000      the long run; a short one is in the suite

After each burst a good request is answered; nothing may crash, nothing may leak, and only documented codes come back.
"""
