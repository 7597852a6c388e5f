"""What client and server share: answers joined from a stream, and the key types of certificates.

It lies below both, so that the server imports no client. Its modules import gRPC's generated code and cryptography.
"""
