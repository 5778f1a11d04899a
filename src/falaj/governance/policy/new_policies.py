"""Check a policy that is not stored yet: its text is a stranger's, and is parsed in the parser process (decision 0018).

The stack that it is parsed with is smaller than those of the platform's threads: what it can parse, they can.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from falaj.errors import FalajError, Fault, Internal, InvalidInput, PolicyInvalid
from falaj.governance.policy.parsing import confined_rules, valid_rules
from falaj.governance.policy.text_bounds import measure, require_bounded
from falaj.ports.parsers import ByteSource, Parsed, ParserPool

POLICY = "policy"
"""The name of the parser, see assembly/parsing.py."""
STACK_BYTES = 1 << 20
MAX_RULES, MAX_TOKENS, MAX_BYTES = 200, 20_000, 100_000
"""What the policies of one workspace may have together. Decision 0033 has what the worst of them cost."""


def count_rules(
    name: str, text: str, workspace: str | None, schema: str, parsers: ParserPool, *, owner: str
) -> int:
    """Return how many rules the policy `text` has; PolicyInvalid if it is not valid."""
    require_bounded(name, text)
    options = {"name": name, "text": text, "workspace": workspace, "schema": schema}
    try:
        return int(parsers.parse(POLICY, (), options, owner=owner).facts["rules"])
    except PolicyInvalid:
        raise
    except InvalidInput as error:  # it crashed, or exceeded the limits of memory, stack or time
        given = f"a text that could not be parsed: {error.message}"
        raise PolicyInvalid.at(name, given=given, allowed="Cedar", fix="split the policy") from None
    except (KeyError, TypeError, ValueError):
        raise Internal("the parser of policies returned no number of rules") from None


def require_room(texts: Sequence[str], schema: str) -> None:
    """Raise InvalidInput if the policies of a workspace are too large together: every decision pays for its rules, and
    every process parses the texts whenever a grant changes."""
    used = {
        "rules": (sum(len(valid_rules(POLICY, text, schema)) for text in texts), MAX_RULES),
        "tokens": (sum(measure(text)[1] for text in texts), MAX_TOKENS),
        "bytes": (sum(len(text.encode()) for text in texts), MAX_BYTES),
    }
    faults = [
        Fault(
            where="text",
            given=f"{found} {unit} in all policies of the workspace",
            allowed=f"at most {most} {unit}",
            fix="withdraw a policy, or compare with a group, a label or a pattern instead of many names",
        )
        for unit, (found, most) in used.items()
        if found > most
    ]
    if faults:
        raise InvalidInput("the policies of the workspace would be too large", faults=faults)


def parse_policy(_sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    """Count the rules of a policy, on a small stack. This code runs in the parser process."""
    found: list[int] = []
    errors: list[FalajError] = []

    def parse() -> None:
        try:
            found.append(len(confined_rules(**options)))
        except FalajError as error:
            errors.append(error)

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=parse)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return Parsed({"rules": found[0]})
