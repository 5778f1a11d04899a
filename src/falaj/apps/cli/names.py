"""Names that the platform knows: completes them, suggests similar ones, and finds the object of a short reference.

An id may be typed as `last` (the newest), as its beginning, or as the name of the object: the newest of that name.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from falaj.errors import FalajError, InvalidInput, NotFound

if TYPE_CHECKING:
    from falaj.apps.cli.session import Session
    from falaj.governance.operations.operation import Operation
    from falaj.sdk.platform import Platform

LAST = "last"
COMPLETE_S = 1.0
"""A completion that takes longer offers nothing."""
PAGE, PAGES = 100, 100
"""So many objects are looked through at most."""
SIMILAR, COMPARED = 3, 1000
"""So many similar names are suggested, out of so many."""
_FULL_ID = re.compile(r"[a-z]+_[0-9a-z]{26}")


class Known(NamedTuple):
    """An object that a reference may mean."""

    id: str
    name: str


# ------------------------------------------------------------------------------------------ short references


def full_references(platform: Platform, operation: Operation, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with the ids of what its references mean."""
    found = dict(given)
    for name, reference in operation.references.items():
        if reference.kind is not None and reference.kind in BY_ID and isinstance(given.get(name), str):
            found[name] = full_id(platform, reference.kind, given[name])
    return found


def full_id(platform: Platform, kind: str, text: str) -> str:
    """Return the id of the object of a `kind` in BY_ID that `text` means; `text` itself if it is an id or unknown."""
    if _FULL_ID.fullmatch(text) or "/" in text or ":" in text:
        return text
    known = BY_ID[kind](platform)
    if text == LAST:
        newest = next(known, None)
        if newest is None:
            raise NotFound(f"there is no {_word(kind)} yet", details={"kind": kind, "reference": text})
        return newest.id
    fitting = [each for each in known if text in (each.id, each.name) or _begins(each.id, text)]
    named = [each for each in fitting if each.name == text]
    if named:
        if len(named) > 1:
            words = f"{text} is {named[0].id}, the newest of {len(named)} of that name"
            print(words, file=sys.stderr)
        return named[0].id
    if len(fitting) > 1:
        shown = ", ".join(each.id for each in fitting[:5])
        raise InvalidInput.at(
            _word(kind), given=text, allowed=f"the beginning of one id; {len(fitting)} begin so: {shown}"
        )
    return fitting[0].id if fitting else text


def _begins(ident: str, text: str) -> bool:
    """Tell whether `text` is the beginning of an id, with or without the kind before it."""
    return (ident.startswith(text) and "_" in text) or ident.partition("_")[2].startswith(text)


def _jobs(platform: Platform) -> Iterator[Known]:
    return (Known(each.id, each.name) for each in _pages(platform.jobs.list))


def _runs(platform: Platform) -> Iterator[Known]:
    """Yield runs of the workspace, newest first."""
    return (Known(each.id, each.name) for each in _pages(platform.runs.list))


def _work(platform: Platform) -> Iterator[Known]:
    return (Known(each.id, each.workflow) for each in reversed([*_pages(platform.workflows.list)]))


def _tokens(platform: Platform) -> Iterator[Known]:
    return (Known(each.id, each.purpose) for each in reversed([*_pages(platform.tokens.list)]))


def _alerts(platform: Platform) -> Iterator[Known]:
    return (Known(each.id, each.id) for each in reversed([*_pages(platform.monitoring.alerts)]))


def _optimizations(platform: Platform) -> Iterator[Known]:
    return (Known(each.id, each.id) for each in reversed([*_pages(platform.optimization.list)]))


BY_ID: dict[str, Callable[[Platform], Iterator[Known]]] = {
    "job": _jobs,
    "run": _runs,
    "work": _work,
    "token": _tokens,
    "alert": _alerts,
    "optimization": _optimizations,
}
"""The kinds whose objects have ids rather than names of their own, and how they are listed, newest first."""


# ------------------------------------------------------------------------------------------ names of a kind


def names_of(platform: Platform, kind: str, *, workspace: str | None = None) -> Iterator[str]:
    """Yield the names under which the caller can refer to objects of `kind`, or the newest ids."""
    if kind in BY_ID:
        yield LAST
        for each in BY_ID[kind](platform):
            yield each.id
    elif kind == "model_version":
        for model in _pages(platform.models.list, workspace=workspace):
            yield from (f"{model.name}@{each.alias}" for each in model.aliases if each.version)
            yield from (f"{model.name}@{number}" for number in range(model.versions, 0, -1))
    elif kind in ("user", "subject"):
        yield from (each.name for each in _pages(platform.users.list))
        if kind == "subject":
            yield from (each.name for each in _pages(platform.groups.list))
    elif kind in _PLATFORM_KINDS:
        yield from (each.name for each in _pages(getattr(platform, _PLATFORM_KINDS[kind]).list))
    elif kind == "zone":
        yield from (each.name for each in platform.zones.list())
    else:
        yield from (each.name for each in _pages(platform.objects.list, kind=kind, workspace=workspace))


_PLATFORM_KINDS = {"workspace": "workspaces", "group": "groups", "queue": "queues"}


def _pages(list_page: Callable[..., Any], **given: Any) -> Iterator[Any]:
    """Yield the items of the first pages."""
    after = ""
    for _ in range(PAGES):
        page = list_page(after=after, limit=PAGE, **{k: v for k, v in given.items() if v is not None})
        yield from page.items
        if not page.next:
            return
        after = page.next


def with_similar(session: Session, error: NotFound) -> NotFound:
    """Return `error` with the names that are like the one that was not found, where there are some."""
    kind, reference = error.details.get("kind"), str(error.details.get("reference", ""))
    place, _, name = reference.rpartition("/")
    if not kind or not name or _FULL_ID.fullmatch(name):
        return error
    try:
        with session.platform() as platform:
            known = dict.fromkeys(islice(_typed_names(platform, str(kind), place or None), COMPARED))
    except (FalajError, AttributeError):
        return error
    prefix = f"{place}/" if place else ""
    close = [f"{prefix}{each}" for each in get_close_matches(name.rpartition(":")[2], known, n=SIMILAR)]
    return NotFound(error.message, faults=error.faults, details=error.details | {"similar": close})


def _typed_names(platform: Platform, kind: str, workspace: str | None) -> Iterator[str]:
    """Yield the names of objects of `kind`, also of those that have ids."""
    if kind in BY_ID:
        return (each.name for each in BY_ID[kind](platform))
    return names_of(platform, kind, workspace=workspace)


# ----------------------------------------------------------------------------------------------- completion


def completion_of(kind: str) -> Callable[..., list[str]]:
    """Return the function that completes names of `kind` for a shell: from a platform that runs, else nothing."""

    def complete(ctx: Any, incomplete: str) -> list[str]:
        try:
            signal.signal(signal.SIGALRM, _stop)
            signal.setitimer(signal.ITIMER_REAL, COMPLETE_S)
            return _completed(_session(ctx), kind, incomplete)
        except Exception:  # a shell shows what a completion says in the middle of a command
            return []
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    return complete


def _completed(session: Session, kind: str, incomplete: str) -> list[str]:
    platform = session.running_platform()
    if platform is None:
        return []
    place, slash, begin = incomplete.rpartition("/")
    with platform:
        known = names_of(platform, kind, workspace=place or None)
        return [f"{place}{slash}{name}" for name in known if name.startswith(begin)]


def _session(ctx: Any) -> Session:
    """Return the session of a command line that is not complete yet."""
    from falaj.apps.cli.options import GlobalOptions
    from falaj.apps.cli.session import Session

    root, own = ctx.find_root().params, ctx.params
    before = GlobalOptions(root.get("home"), root.get("url"))
    return Session.of(before, GlobalOptions(own.get("home_option"), own.get("url_option")))


def _stop(_number: int, _frame: Any) -> None:
    raise TimeoutError


def _word(kind: str) -> str:
    return kind.replace("_", " ")
