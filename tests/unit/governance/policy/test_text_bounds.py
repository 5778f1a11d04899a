"""Bounds on Cedar text: what is nested too deeply is refused before Cedar parses it, and what is accepted parses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import misbehaving_parsers
from falaj.assembly.parsing import PARSERS
from falaj.control.services import all_operations
from falaj.drivers.parsing.pool import ProcessParserPool
from falaj.drivers.sandbox.same_uid import SameUidSandbox
from falaj.errors import PolicyInvalid
from falaj.governance.policy.engine import PolicyEngine, PolicyText, PrincipalFacts
from falaj.governance.policy.examples import PolicyExample, _resource
from falaj.governance.policy.new_policies import POLICY, count_rules
from falaj.governance.policy.parsing import parsed_rules, policy_set
from falaj.governance.policy.schema import cedar_schema
from falaj.governance.policy.text_bounds import MAX_DEPTH, measure, require_bounded

SCHEMA = json.dumps(cedar_schema(all_operations().values()))

SHAPES: dict[str, Callable[[int], str]] = {
    "brackets": lambda n: "(" * n + "true" + ")" * n,
    "sets": lambda n: "[" * n + "1" + "]" * n + " == 1",
    "records": lambda n: "{a:" * n + "1" + "}" * n + " == 1",
    "nots": lambda n: "!(" * n + "true" + ")" * n,
    "bare nots": lambda n: "!" * n + "true",
    "negations": lambda n: "-(" * n + "1" + ")" * n + " == 1",
    "conditions": lambda n: "if (" * n + "true" + ") then true else true" * n,
    "else if": lambda n: "if true then true else " * n + "true",
    "if if": lambda n: "if " * n + "true" + " then true else true" * n,
    "and": lambda n: "true" + " && true" * n,
    "or": lambda n: "false" + "||false" * n,
    "sums": lambda n: "1" + " + 1" * n + " == 1",
    "differences": lambda n: "1" + "-1" * n + " == 1",
    "products": lambda n: "1" + " * 1" * n + " == 1",
    "attributes": lambda n: "resource" + ".workspace" * n + " == resource",
    "indices": lambda n: "resource" + '["workspace"]' * n + " == resource",
    "calls": lambda n: "[1]" + ".containsAll([1])" * n,
    "arguments": lambda n: "[1].contains(" * n + "1" + ")" * n,
    "brackets that stay open": lambda n: "(" * n,
    "brackets after a string that stays open": lambda n: '"' + "(" * n,
    "clauses": lambda n: "true }" + " when { true }" * n + " unless { false",
    "a chain around each bracket": lambda n: "(" * (n // 3) + "true" + (" && true" * 3 + ")") * (n // 3),
}


def policy(condition: str) -> str:
    return f"permit (principal, action, resource) when {{ {condition} }};"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [MAX_DEPTH + 10, 5_000, 20_000])
def test_deep_nesting_is_refused_before_it_is_parsed(shape: str, size: int) -> None:
    text = policy(SHAPES[shape](size))

    with pytest.raises(PolicyInvalid) as refused:
        require_bounded("policy", text[:800_000])

    (fault,) = refused.value.faults
    assert fault.where == "policy"
    assert fault.fix is not None


@pytest.mark.parametrize(
    "text",
    [
        policy('resource.name == "' + "((((!" * 1000 + '"'),
        policy(r'resource.name == "\"((((' + "(" * 1000 + '"'),
        "// " + "(" * 1000 + "\n" + policy("true"),
        policy("[" + "1, " * 10_000 + "1].contains(1)"),
        policy("true") * 3_000,
        policy(" || ".join(f'principal.name == "user-{n}" && resource.name like "a*"' for n in range(50))),
        '@id("a") @why("because") ' + policy("(1 + 2) * 3 == 9 && !(resource has zone)"),
    ],
)
def test_long_or_quoted_text_is_not_deep(text: str) -> None:
    require_bounded("policy", text)


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(PolicyInvalid, match="tokens"):
        require_bounded("policy", policy("[" + "1," * 30_000 + "1].contains(1)"))


def expression(random: Random, fuel: int) -> str:
    """Return a random Boolean expression of `fuel` steps or so."""
    if fuel < 1:
        return random.choice(
            ["true", 'resource.name == "(["', "principal == principal", "context has origin"]
        )
    parts = [
        expression(random, (fuel - 1) // random.choice((1, 2, 4))) for _ in range(random.choice((1, 2, 3)))
    ]
    forms = [
        f"({parts[0]})",
        f"!({parts[0]})",
        "(" + " && ".join(parts * random.choice((1, 5))) + ")",
        "(" + " || ".join(parts) + ") && true || true",
        f"(if {parts[0]} then {parts[-1]} else true)",
        f"[{parts[0]}, {parts[-1]}].contains(true)",
        f"{{a: {parts[0]}, b: [1, {{c: 2}}]}}.a",
    ]
    return random.choice(forms)


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 25))
def test_what_the_bounds_accept_can_be_parsed(random: Random, fuel: int) -> None:
    text = policy(expression(random, fuel))
    assume(len(text) < 200_000 and measure(text)[0] <= MAX_DEPTH)

    assert len(policy_set(parsed_rules(text))) == 1


def open_pool(parser: str) -> ProcessParserPool:
    folder = Path(misbehaving_parsers.__file__).parent
    return ProcessParserPool({POLICY: parser}, sandboxes=lambda: [SameUidSandbox()], folders=[folder])


@pytest.fixture(scope="module")
def parsers() -> Iterator[ProcessParserPool]:
    pool = open_pool(PARSERS[POLICY])
    yield pool
    pool.close()


@pytest.mark.parametrize("shape", ["brackets", "and", "nots", "else if", "sums", "attributes"])
def test_the_deepest_accepted_text_fits_the_small_stack_of_the_child(
    parsers: ProcessParserPool, shape: str
) -> None:
    accepted = [n for n in range(MAX_DEPTH) if measure(policy(SHAPES[shape](n)))[0] <= MAX_DEPTH]
    text = policy(SHAPES[shape](accepted[-1]))

    assert count_rules("policy", text, None, SCHEMA, parsers, owner="sara") == 1
    engine = PolicyEngine(all_operations().values(), [PolicyText("policy", text)])
    example = PolicyExample(who="sara", action="blobs.read", expect="deny")
    engine.decide(
        PrincipalFacts("sara", "sara", "user"),
        "blobs.read",
        _resource(example, all_operations()["blobs.read"]),
    )


def test_a_crash_of_the_parser_is_a_refusal() -> None:
    pool = open_pool("misbehaving_parsers:crash")

    with pytest.raises(PolicyInvalid, match="policy is not valid"):
        count_rules("policy", policy("true"), None, SCHEMA, pool, owner="sara")

    pool.close()


def test_a_policy_is_parsed_in_the_parser_process_and_its_faults_come_back(
    parsers: ProcessParserPool,
) -> None:
    assert count_rules("policy", policy("true") * 3, None, SCHEMA, parsers, owner="sara") == 3

    with pytest.raises(PolicyInvalid) as refused:
        count_rules("policy", policy("resource.nothing == 1"), None, SCHEMA, parsers, owner="sara")

    assert "nothing" in str(refused.value.faults[0].allowed)
