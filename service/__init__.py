"""The host side: bytes, text and ints, from the gRPC message to the scheduler and back."""
