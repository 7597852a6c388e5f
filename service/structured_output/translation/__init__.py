"""Translation of constraints to grammars of the library llguidance.

`translate.py` begins. JSON schemas are checked and rewritten (`schema.py`, `pattern.py`, `formats.py`). EBNF is
converted without a change of its language (`gbnf.py`, `gbnf_lark.py`, `greedy.py`). `tagged_arguments.py` writes the
arguments of tool calls between tags. `refusal.py` finds the part of a schema that the library refuses. All of it runs
in a compile process.

What each pass over a JSON schema is for: the schemas that llguidance 1.9.1 refuses without the pass, and those of which
it then allows an answer that is not valid. Of 1,697 schemas of the JSON Schema Test Suite (drafts 4 to 2020-12) and 954
of JSONSchemaBench, 2,002 compile. Their tests were judged, and 20 random answers of each by `jsonschema`. A pass with
two zeros is needed by a case of tests/service/structured_output/translation, which the last column names.

    pass                                     refused  weaker  otherwise
    no pass, the library alone                   214      34
    references (`_reference`)                     43      15
    formats (`formats.py`)                        51      20
    constants that are not exact                   0       9
    expressions of values (`pattern.py`)           0       5
    unsupported keywords                          46       0  errors have a path; some have no effect
    `oneOf` of schemas that exclude each other    29       0
    counts, such as 3.0                           24       0
    propertyNames (`restrict_names`)              22       0
    bounds of numbers                             20       0
    `inside_bound`                                 0       0  an exclusive bound is included
    divisors that are not exact                    0       0  multiples are not
    minProperties                                  0       0  a repeated name counts twice
    `require_finite_value`                         0       0  an answer has no end
    `declare_matched_names`                        0       0  an answer cannot continue
    expressions of names                           0       0  one written in two ways has no name
    `separate_names`                               0       0  a name that Python alone matches; it refuses 6 schemas
    `prefixItems` of `items`                       0       0  a keyword that the draft does not have
    `grouped`                                      0       0  the order of keywords has an effect
"""
