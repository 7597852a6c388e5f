"""gRPC service `vllm.grpc.engine.VllmEngine`, for gateways such as smg. It needs the extra `gateway` (smg-grpc-proto).

Its requests become requests of InferenceService, so that checks, limits, metrics and answers are the same.
docs/vllm-engine.md has the contract. `frontend` imports this folder, only if the stubs are installed.

Imports of `service`: `rpc`, `access`, `requests`, `text`, `streams`, `processes`, `ipc` and the top level.
"""
