"""What pydantic allows, in the words of this house."""

from __future__ import annotations

import re

_RULES = (
    (r"Extra inputs are not permitted", "no such field"),
    (r"Field required", "a value"),
    (r"Input should be a valid (?:integer|int).*", "a whole number"),
    (r"Input should be a valid number.*", "a number"),
    (r"Input should be a valid boolean.*", "true or false"),
    (r"Input should be a valid string", "a text"),
    (r"Input should be a valid (?:tuple|list)", "a list"),
    (r"Input should be a valid (?:datetime|date).*", "a moment, like 2024-06-01T08:00:00Z"),
    (r"Input should have timezone info", "a moment with its zone, like 2024-06-01T08:00:00Z"),
    (r"Input should be less than or equal to (.*)", r"at most \1"),
    (r"Input should be greater than or equal to (.*)", r"at least \1"),
    (r"(?:Tuple|List) should have (at (?:least|most) \d+ items?) after validation.*", r"\1"),
    (r"(?:Value error, |Input should be )(.*)", r"\1"),
)


def rule(words: str) -> str:
    """What is allowed, where pydantic says `words`; its own words where there are no better ones."""
    for pattern, better in _RULES:
        if found := re.fullmatch(pattern, words, re.DOTALL):
            return found.expand(better)
    return words
