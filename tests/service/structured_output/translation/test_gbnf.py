"""EBNF and Lark: the converted grammar has exactly the texts of the original."""

from __future__ import annotations

import itertools
import random

import pytest

from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.translation import gbnf_lark
from npuserve.service.structured_output.translation.errors import ConstraintError
from npuserve.service.structured_output.translation.gbnf import Alt, Chars, Node, Ref, Rep, Seq, parse
from tests.support.grammars import accepts, compilation, matcher

GRAMMARS = [
    'root ::= x "b"\nx ::= [a-c]*', 'root ::= ("a" | "ab") "bc"?', 'root ::= "(" root ")" | "a" | ""',
    'root ::= root "a" | "b"',
    'root ::= "a" root "a" | "b" root "b" | "c"', 'root ::= x root x | ""\nx ::= "a" | "ab"',
    'root ::= [^ab]{1,2} | "a"+ "b"', 'root ::= s root? "c"\ns ::= [ab]*',
    'root ::= (root "a"?){0,2} "b"', "root ::= y | y root\ny ::= \"a\" [bc]* | \"b\"  # comment\n",
    'root ::= ("a" |\n  "b")\n  c\nc ::= "c" root | ""',
    'root ::= "a"{1,\t} "b"{\n1 ,\n2\n}',
    'root ::= "a"{0}', 'root ::= ("a" root){0,0} "b"', 'root ::= "a"{0} "b" root | "c"{0,0} | "a"',
]
ALPHABET = "abc()"
LENGTH = 5


def language(rules: dict[str, Node]) -> set[str]:
    """Return all texts of `root` over ALPHABET up to LENGTH: the least fixed point over all rules."""
    known: dict[str, set[str]] = {name: set() for name in rules}

    def of(node: Node, length: int) -> set[str]:
        if isinstance(node, Chars):
            return {c for c in ALPHABET if length and any(low <= ord(c) <= high for low, high in node.ranges)}
        if isinstance(node, Ref):
            return {text for text in known[node.name] if len(text) <= length}
        if isinstance(node, Alt):
            return set().union(*(of(item, length) for item in node.items))
        items = node.items if isinstance(node, Seq) else (node.item,) * node.min_count
        done = {""}
        for item in items:
            done = {a + b for a in done for b in of(item, length - len(a))}
        if isinstance(node, Rep):
            repeats = LENGTH if node.max_count == -1 else node.max_count - node.min_count
            for _ in range(repeats):
                done |= {a + b for a in done for b in of(node.item, length - len(a))}
        return done

    while (found := {name: of(node, LENGTH) for name, node in rules.items()}) != known:
        known = found
    return known["root"]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_converted_grammar_has_the_same_texts(grammar: str):
    expected = language(parse(grammar))
    rng = random.Random(1)
    candidates = ["".join(c) for n in range(LENGTH + 1) for c in itertools.product(ALPHABET, repeat=n)]
    compiled = compilation(Constraint("grammar", grammar))
    for text in {*rng.sample(candidates, 300), *sorted(expected)[:300]}:
        assert accepts(compiled.matcher(), text) is (text in expected), text


DEAD = {
    "a recursive alternative": ('root ::= "a" | x\nx ::= "b" x', {"a"}),
    "an optional rule": ('root ::= "a" x? y*\nx ::= x\ny ::= "b" y', {"a"}),
    "an empty class": ('root ::= "a" ([^\\x00-\\U0010ffff] | "b")', {"ab"}),
    "a rule of a dead rule": ('root ::= "a" | x y\nx ::= x "a"\ny ::= y | "b"', {"a"}),
    "a rule that is not reached": ('root ::= "a"\nx ::= "b" x', {"a"}),
    "a repetition of at least 0": ('root ::= "a" (root x){0,3}\nx ::= [^\\x00-\\U0010ffff]', {"a"}),
}


@pytest.mark.parametrize("name", DEAD)
def test_parse_of_a_dead_rule_keeps_the_other_texts(name: str):
    grammar, texts = DEAD[name]
    assert language(parse(grammar)) == texts
    compiled = compilation(Constraint("grammar", grammar))
    for text in ("", "a", "b", "ab", "aa", "ba"):
        assert accepts(compiled.matcher(), text) is (text in texts), text


def random_node(rng: random.Random, depth: int) -> Node:
    kind = rng.choice(["chars", "ref", "ref"] if depth > 2 else ["chars", "ref", "ref", "seq", "seq", "alt", "rep"])
    if kind == "chars":
        return Chars(((code := ord(rng.choice("abc")), code),))
    if kind == "ref":
        return Ref(rng.choice(["root", "x", "y", "z"]))
    if kind == "rep":
        min_count = rng.randrange(2)
        return Rep(random_node(rng, depth + 1), min_count, rng.choice([-1, min_count + 1]))
    items = tuple(random_node(rng, depth + 1) for _ in range(rng.randint(2, 3)))
    return Seq(items) if kind == "seq" else Alt(items)


def source(node: Node) -> str:
    """Return an expression in GBNF."""
    if isinstance(node, Chars):
        return f"[{chr(node.ranges[0][0])}]"
    if isinstance(node, Ref):
        return node.name
    if isinstance(node, Rep):
        return f"({source(node.item)}){{{node.min_count},{'' if node.max_count == -1 else node.max_count}}}"
    return "(" + (" | " if isinstance(node, Alt) else " ").join(map(source, node.items)) + ")"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 6))])
def test_random_grammars_are_refused_only_without_a_text(seed: int):
    """A grammar whose shortest text is longer than LENGTH is skipped."""
    rng, accepted = random.Random(seed), 0
    for _ in range(50):
        rules = {name: random_node(rng, 0) for name in ("root", "x", "y", "z")}
        grammar = "\n".join(f"{name} ::= {source(node)}" for name, node in rules.items())
        texts = language(rules)
        if not texts:
            continue
        state = compilation(Constraint("grammar", grammar))
        accepted += 1
        candidates = {"".join(rng.choices("abc", k=rng.randint(0, LENGTH))) for _ in range(30)}
        for text in {*candidates, *sorted(texts)[:20]}:
            assert accepts(state.matcher(), text) is (text in texts), (grammar, text)
    assert accepted > 10


@pytest.mark.parametrize("grammar", [
    "root ::= root", 'root ::= x "a" | y\nx ::= y x\ny ::= "b" y', "root ::= [^\\x00-\\U0010ffff]"])
def test_parse_of_a_grammar_without_a_text_is_refused(grammar: str):
    with pytest.raises(ConstraintError, match="no finite text satisfies the rule 'root'"):
        parse(grammar)


def test_escapes_and_classes():
    state = r'root ::= "\"\\\n\x41\u00e9" [\]\-&~\[a-c]{2} [^\x00-\x7f] .'
    assert accepts(matcher("grammar", state), '"\\\nAé&]é!')
    assert not accepts(matcher("grammar", state), '"\\\nAé&]e!')


@pytest.mark.parametrize(("text", "message"), [
    ("", "empty"), ('a ::= "x"', "must have the rule 'root'"), ("root ::= b", "unknown rule 'b'"), ('root ::= ("a"',
        "unclosed '\\('"),
    ('root ::= "a")', "unmatched '\\)'"), ("root ::= *", "nothing to repeat"), ('root ::= "a" root',
        "no finite text"), ('root ::= "\\q"', "escape"),
    ('root ::= "a"\nroot ::= "b"', "defined twice at line 2"), ('root ::= "a"{3,1}', "in order"),
    ('root ::= "a"{99999}', "at most|in \\[0"), ("root ::= [b-a]", "wrong order"),
    ("root ::= @", "unexpected '@' at line 1, column 10"), ('root ::= "\\ud800"', "must be a character"), ("start: x",
        "unknown"), ("start: (", "xpected"),
    ('start: %json {"type": "object"}', "%json"), ('%llguidance {"no_forcing": false}\nstart: "a"', "%llguidance"),
    ("start: <call>", "<call>"), ("start: <[257]>", "257"),
    ("start: @other", "@other"), ('start: x\nx[stop="a"]: /.*/', "the option"), ('start: x\nx[max_tokens=3]: /.*/',
        "the option"), ("start: x::_\n", "the parameter"), ('root ::= "a"{٣}', "unexpected '{٣}'"),
    # errors of the library have the position in the client's grammar
    ('start: a\na: "x" )\n', r"expecting rule.* at line 2, column 8$"),
    ('start: "a"\n\n\nfoo bar', r" at line 4, column 5$"),
    ("start: a\na: b", r"^unknown name: .* at line 2, column 4$"),
    ("start: A{0,0}", r"cannot be 0.* at line 1, column "),
])
def test_malformed_or_refused_grammar(text: str, message: str):
    with pytest.raises(ConstraintError, match=message):
        matcher("grammar", text)


def test_error_of_a_converted_grammar_has_no_position(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gbnf_lark, "to_lark", lambda text: "start: a\n)")
    with pytest.raises(ConstraintError, match=r"^Expected|^expecting") as error:
        matcher("grammar", 'root ::= "a"')
    assert "line" not in str(error.value)


def test_lark_brackets_are_an_optional_part():
    for text, expected in (("ac", True), ("abc", True), ("abbc", False)):
        assert accepts(matcher("grammar", 'start: "a" ["b"] "c"'), text) is expected
    assert accepts(matcher("grammar", 'start: x "!"\nx[lazy]: /[a-z ]*b/'), "a b!")


def test_lark_words_in_strings_and_comments_are_no_directives():
    grammar = '// %json <call> @x\nstart: "<call> %json @x [stop=1] ::" /[<>@%]+/  # @y'
    assert accepts(matcher("grammar", grammar), "<call> %json @x [stop=1] ::<@%>")
