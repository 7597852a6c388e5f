"""npuserve: a gRPC service of Qwen3-class language models with streaming tokens.

The subpackages are links to the folders of the same names at the top of the repository, `v1` to `protos/npuserve/v1`.
"""
