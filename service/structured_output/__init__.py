"""Structured output: all state of constrained answers, from the check of a request to the mask of a token.

    validation.py        a front end checks the constraint of a request
    constraint.py        the constraint on the wire, and what the engine reads of its request
    manager.py           the one interface of the engine's loop (vLLM: StructuredOutputManager)
    translation/         a constraint as a grammar of the library llguidance, or a refusal that names the keyword
    compile_process.py   compiles it in a child process with limits of time and memory, before the engine does
    compiler.py          bounds the queue of constraints, and the memory of the compiled grammars that are kept
    lexer.py             bounds the memory of the states that answers build: GrammarLexer, LexerPool
    answer_matcher.py    state of one answer: mask, advance, replay, release (vLLM: StructuredOutputGrammar)
    matcher.py           the same of the library; `Matcher.fill` writes the bits of a mask
    mask_threads.py      when a mask is filled, and in which thread (vLLM: grammar_bitmask)
    forced_text.py       tokens that must follow
    vocabulary.py        the bytes of all tokens

Interface. `StructuredOutputManager` has `pending` (compile or look up), `poll` (compiled or refused), `cancel`,
`prepare` (fill masks) and `close`. It returns an `AnswerMatcher` for each answer. Its `mask`, `advance` and
`take_forced` follow the sampled tokens, `is_complete`, `has_ended` and `error` say how the answer stands, `discard`
releases it. There is no rollback: a step samples a constrained row once the tokens before it are known.
engine/request_registry.py calls the manager when a request begins or ends, engine/pipeline.py in each step.

Death. When the engine dies, all of this dies with it. The front end submits the request again with its constraint and
the tokens so far (`Request.output_ids`). The new engine compiles the constraint, and the matcher replays the tokens
(`AnswerMatcher._replay`). A compile process that dies is replaced once (`CompileProcess.compile`).

Front ends import constraint.py and validation.py, which load neither the library nor numpy. No file imports torch.
Imports of `service`: top level, `processes` and `text`.
"""
