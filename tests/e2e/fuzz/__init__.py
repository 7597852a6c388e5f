"""Fuzzing of a server: invalid HTTP/2, malformed protobuf, and arbitrary values of all fields.

    python -m tests.e2e.fuzz --messages 100000      the long run; the tests have a short one

After each burst a valid request must be answered. There may be no crash, no leak, and only documented status codes.
"""
