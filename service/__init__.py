"""Host side of the server: gRPC messages, text, scheduling and processes. Only the engine process imports torch."""
