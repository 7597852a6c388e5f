"""Translation of constraints to grammars of the library llguidance.

`translate.py` begins. JSON schemas are checked and rewritten (`schema.py`, `pattern.py`, `formats.py`). EBNF is
converted without a change of its language (`gbnf.py`, `gbnf_lark.py`, `greedy.py`). `tagged_arguments.py` writes the
arguments of tool calls between tags. `refusal.py` finds the part of a schema that the library refuses. All of it runs
in a compile process.
"""
