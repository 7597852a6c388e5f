"""Structured output: constraints compiled to grammars, and matchers that say which tokens may come next.

Only the engine process imports this folder. It imports neither torch nor gRPC. A constraint is translated and compiled
once in a child process with limits of time and memory (`compile_process.py`), and only then in the engine.

Imports of `service`: top level, `ipc`, `processes` and `text`.
"""
