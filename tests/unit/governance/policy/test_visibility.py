"""Lists show exactly what decisions object by object would: for random rules, roles, labels and owners."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import update

from falaj.errors import InvalidInput
from falaj.governance import objects
from falaj.governance.operations.caller import Caller, acting_as
from falaj.governance.policy.authorizer import SEE, Authorizer
from falaj.governance.policy.parsing import parsed_rules
from falaj.governance.policy.relevance import IDENTITY, OWN, attributes_read
from falaj.governance.tables import objects as objects_table
from falaj.ports.metadata import Transaction
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.residency import Label
from falaj.records.names import ROOT, PrincipalId, new_id
from falaj.records.record import utc_now
from platforms import OwnPlatform

CONDITIONS = (
    "true",
    "resource.owner == principal.owner",
    'principal.owner == resource.owner && context.origin == "test"',
    'resource.owner == "{owner}"',
    'resource.name like "*-1*"',
    'resource has zone && resource.zone == "frankfurt"',
    "resource has zone",
    'resource.classes.contains("health")',
    'resource.classes.containsAny(["health", "money"]) && resource.owner != principal.owner',
    'resource has jurisdictions && resource.jurisdictions.contains("AE")',
    'resource.workspace.name == "default"',
    'resource in Workspace::"{workspace}"',
    'resource == Blob::"{ident}"',
    '[resource].contains(Blob::"{ident}")',
    "resource is Blob",
    "principal in resource.workspace.developer",
    "9223372036854775807 + 1 > 0",
    'resource has zone && resource.zone == "frankfurt" && 9223372036854775807 + 1 > 0',
    'if resource has zone then resource.name like "*2" else resource.classes.isEmpty()',
    '{{ "has": resource.owner, "in": "x" }}["has"] == principal.owner',
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_list_has_what_decisions_object_by_object_allow(platform: OwnPlatform, seed: int) -> None:
    dice = random.Random(seed)
    platform.workspaces.create("other")
    callers = [
        platform.join("ann", Role.VIEWER),
        platform.join("ben", Role.DEVELOPER, Role.AUDITOR),
        platform.join("cy", Role.VIEWER, workspace="other"),
    ]
    made = scattered(platform, callers, dice)
    for number in range(dice.randint(0, 4)):
        publish(platform, f"rule-{number}", random_rule(dice, made), dice)

    for caller in [*callers, replace(callers[0], workspace=made[0].workspace)]:
        for workspace in ("default", "other"):
            seen = may_list(platform, caller, workspace)
            expected = allowed_one_by_one(
                platform, caller, [m for m in made if home_name(m, made) == workspace]
            )

            assert seen is None or seen == expected, caller.name


@pytest.mark.slow
@pytest.mark.parametrize("condition", CONDITIONS)
def test_objects_that_agree_in_what_a_rule_reads_get_one_decision(
    light_platform: OwnPlatform, condition: str
) -> None:
    dice = random.Random(7)
    caller = light_platform.join("ann", Role.VIEWER)
    made = scattered(light_platform, [caller], dice, count=40)
    text = f"forbid (principal, action, resource is Blob) when {{ {filled(condition, made[3])} }};"
    light_platform.policies.publish("rule", text=text)

    with light_platform.database.read() as tx:
        state = light_platform.parts.gate.authorizer.state(tx)
        verdicts: dict[object, set[bool]] = {}
        for each in made:
            key = state.engine.profile(caller.id, SEE, each)
            verdicts.setdefault(key, set()).add(decided(light_platform, tx, caller, each))

    assert all(len(found) == 1 for found in verdicts.values())


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("permit (principal, action, resource);", set()),
        ("permit (principal, action, resource) when { resource.owner == principal.owner };", {OWN}),
        ('permit (principal, action, resource) when { resource.owner == "x" };', {"owner"}),
        ("permit (principal, action, resource) when { resource.owner == resource.owner };", {"owner"}),
        ('permit (principal, action, resource in Workspace::"w");', set()),
        ('permit (principal, action, resource == Blob::"b");', {IDENTITY}),
        ('permit (principal, action, resource is Blob in Workspace::"w");', set()),
        ("permit (principal, action, resource) when { principal in resource.workspace.viewer };", set()),
        ("permit (principal, action, resource) when { principal in resource };", {IDENTITY}),
        ("permit (principal, action, resource) when { context.x == resource };", {IDENTITY}),
        ('permit (principal, action, resource) when { {"has": resource.name}["has"] == "x" };', {"name"}),
        ('permit (principal, action, resource) when { resource is Blob in Group::"g" };', {IDENTITY}),
    ],
)
def test_what_a_rule_reads_of_its_resource(text: str, read: set[str]) -> None:
    (rule,) = parsed_rules(text).values()

    assert attributes_read(rule) == read


def test_a_rule_without_look_at_objects_takes_one_decision_for_all(
    light_platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = light_platform.join("ann", Role.VIEWER)
    scattered(light_platform, [light_platform.join("ben")], random.Random(1), count=300)
    decisions = count_decisions(light_platform.parts.gate.authorizer, monkeypatch)

    with acting_as(caller):
        names = [each.name for page in pages(light_platform, limit=50) for each in page]

    assert len(names) == 150
    assert len(decisions) <= 4  # the operation itself, and objects of the caller and of others


@pytest.mark.slow
def test_hidden_groups_are_left_out_by_the_query(
    light_platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = light_platform.join("ann", Role.VIEWER)
    made = scattered(light_platform, [caller], random.Random(1), count=400)
    rule = 'forbid (principal, action == Action::"objects.show", resource is Blob) when '
    light_platform.policies.publish("hide", text=f'{rule} {{ resource.classes.contains("health") }};')
    read: list[int] = []
    listed = objects.listed

    def counted(*args: object, **options: object) -> list[StoredObject]:
        found = listed(*args, **options)  # type: ignore[arg-type]
        read.append(len(found))
        return found

    monkeypatch.setattr(objects, "listed", counted)
    with acting_as(caller):
        seen = [each.id for page in pages(light_platform, limit=20) for each in page]

    assert seen == allowed_one_by_one(
        light_platform, caller, [m for m in made if home_name(m, made) == "default"]
    )
    assert sum(read) < 2 * len(seen)


# --------------------------------------------------------------------------------------------- cursors


def test_pages_stay_whole_while_objects_come_and_go(platform: OwnPlatform) -> None:
    caller = platform.join("ann", Role.VIEWER)
    made = scattered(platform, [caller], random.Random(2), count=60)
    there = [each.id for each in made if home_name(each, made) == "default"]

    seen: list[str] = []
    with acting_as(caller):
        for number, page in enumerate(pages(platform, limit=7)):
            seen += [each.id for each in page]
            with platform.database.write() as tx:
                objects.delete(tx, page[-1].id, at=utc_now())
                objects.create(tx, new_blob(platform, tx, caller, f"new-{number}"))

    assert [each for each in seen if each in there] == there
    assert len(seen) == len(set(seen))


def test_a_cursor_is_good_for_its_caller_and_its_list_only(platform: OwnPlatform) -> None:
    ann, ben = platform.join("ann", Role.VIEWER), platform.join("ben", Role.VIEWER)
    platform.workspaces.create("other")
    platform.workspaces.grant("other", "ann", role=Role.VIEWER)
    made = scattered(platform, [ann], random.Random(3), count=20)
    with acting_as(ann):
        cursor = platform.objects.list("blob", limit=3).next
    assert cursor is not None
    assert not any(each.id in cursor or each.name in cursor for each in made)

    refused = {
        "another caller": (ben, {"kind": "blob", "after": cursor}),
        "another workspace": (ann, {"kind": "blob", "workspace": "other", "after": cursor}),
        "another kind": (ann, {"kind": "run", "after": cursor}),
        "changed": (ann, {"kind": "blob", "after": cursor[:-1] + ("A" if cursor[-1] != "A" else "B")}),
        "cut": (ann, {"kind": "blob", "after": cursor[:10]}),
        "an id": (ann, {"kind": "blob", "after": made[0].id}),
    }
    for why, (caller, given) in refused.items():
        with acting_as(caller), pytest.raises(InvalidInput, match="after") as error:
            platform.objects.list(**given)  # type: ignore[arg-type]
        assert error.value.faults[0].fix, why

    again = platform.again()
    with acting_as(ann):
        here, there = (each.objects.list("blob", limit=2, after=cursor) for each in (platform, again))
    assert here == there


def test_what_is_hidden_shows_neither_in_the_size_of_pages_nor_in_cursors(platform: OwnPlatform) -> None:
    """Two lists that differ in hidden objects alone are the same, page by page and cursor by cursor."""
    caller = platform.join("ann", Role.VIEWER)
    made = scattered(platform, [caller], random.Random(4), count=60)
    rule = 'forbid (principal, action == Action::"objects.show", resource is Blob) when '
    platform.policies.publish("hide", text=f'{rule} {{ resource.name like "*1" }};')

    def walk() -> list[tuple[list[str], str | None]]:
        found, after = [], ""
        with acting_as(caller):
            while after is not None:
                page = platform.objects.list("blob", after=after, limit=5)
                found.append(([each.id for each in page.items], page.next))
                after = page.next
        return found

    before = walk()
    hidden = [each.id for each in made if each.name.endswith("1")]
    with platform.database.write() as tx:
        tx.execute(update(objects_table).where(objects_table.c.id.in_(hidden)).values(deleted_at=utc_now()))

    assert walk() == before
    assert all(len(items) == 5 for items, _ in before[:-1])


# --------------------------------------------------------------------------------------------- helpers


def scattered(
    platform: OwnPlatform, owners: list[Caller], dice: random.Random, *, count: int = 60
) -> list[StoredObject]:
    """Make blobs of several owners, zones and labels, in turn in two workspaces, without bytes."""
    with platform.database.read() as tx:
        homes = [
            objects.by_name(tx, workspace=ROOT, kind="workspace", name=name) for name in ("default", "other")
        ]
    places = [home for home in homes if home is not None]
    if len(places) == 1:
        platform.workspaces.create("other")
        return scattered(platform, owners, dice, count=count)
    made = []
    with platform.database.write() as tx:
        for number in range(count):
            classes = dice.sample(["health", "money"], dice.randint(0, 2))
            only = dice.choice([None, frozenset({"AE"}), frozenset({"AE", "DE"})])
            new = StoredObject(
                id=new_id("blob"),
                workspace=places[number % 2].id,
                kind="blob",
                name=f"blob-{number}",
                owner=PrincipalId(dice.choice([*(each.id for each in owners), ROOT])),
                zone=dice.choice([None, "local", "frankfurt"]),
                label=Label(only=only, classes=frozenset(classes)),
                created_at=utc_now() + timedelta(microseconds=number),
            )
            objects.create(tx, new)
            made.append(new)
    return sorted(made, key=lambda each: each.id)


def new_blob(platform: OwnPlatform, tx: Transaction, owner: Caller, name: str) -> StoredObject:
    home = objects.by_name(tx, workspace=ROOT, kind="workspace", name="default")
    assert home is not None
    return StoredObject(
        id=new_id("blob"), workspace=home.id, kind="blob", name=name, owner=owner.id, created_at=utc_now()
    )


def home_name(found: StoredObject, made: list[StoredObject]) -> str:
    """Return the name of the workspace of one of `made`: the first lies in default."""
    first = min(made, key=lambda each: int(each.name.partition("-")[2]))
    return "default" if found.workspace == first.workspace else "other"


def filled(condition: str, found: StoredObject) -> str:
    return condition.format(owner=found.owner, workspace=found.workspace, ident=found.id)


def random_rule(dice: random.Random, made: list[StoredObject]) -> str:
    effect = dice.choice(["permit", "forbid", "forbid"])
    action = dice.choice(
        [
            "action",
            'action == Action::"objects.show"',
            'action in [Action::"objects.show"]',
            'action in Action::"viewer"',
        ]
    )
    scope = dice.choice(["resource", "resource is Blob", f'resource == Blob::"{dice.choice(made).id}"'])
    when = filled(dice.choice(CONDITIONS), dice.choice(made))
    if "resource is Blob" not in scope and "Blob::" in when:
        scope = "resource is Blob"
    return f"{effect} (principal, {action}, {scope}) {dice.choice(['when', 'unless'])} {{ {when} }};"


def publish(platform: OwnPlatform, name: str, text: str, dice: random.Random) -> None:
    platform.policies.publish(name, text=text, workspace=dice.choice(["default", "other", ROOT]))


def may_list(platform: OwnPlatform, caller: Caller, workspace: str) -> list[str] | None:
    """Return the ids of all pages; none where the caller may not list that workspace at all."""
    from falaj.errors import Denied, NotFound

    try:
        with acting_as(caller):
            found = [each.id for page in pages(platform, limit=4, workspace=workspace) for each in page]
    except (Denied, NotFound):
        return None
    return [str(each) for each in found]


def pages(
    platform: OwnPlatform, *, limit: int, workspace: str | None = None
) -> Iterator[tuple[StoredObject, ...]]:
    after: str | None = ""
    while after is not None:
        page = platform.objects.list("blob", workspace=workspace, after=after, limit=limit)
        assert len(page.items) == limit or page.next is None
        yield page.items
        after = page.next


def allowed_one_by_one(platform: OwnPlatform, caller: Caller, made: list[StoredObject]) -> list[str]:
    with platform.database.read() as tx:
        return [str(each.id) for each in made if decided(platform, tx, caller, each)]


def decided(platform: OwnPlatform, tx: Transaction, caller: Caller, found: StoredObject) -> bool:
    """Decide on one object by Cedar, past every cache."""
    authorizer = platform.parts.gate.authorizer
    if authorizer._outside_scope(replace(caller, actions=None), SEE, found) is not None:
        return False
    principal = objects.by_id(tx, caller.id)
    assert principal is not None
    facts = authorizer.roles(tx, principal)
    home = objects.by_id(tx, found.workspace)
    origin = caller.origin.partition(":")[0]
    return authorizer.engine(tx).decide(facts, SEE, found, home=home, origin=origin).allowed


def count_decisions(authorizer: Authorizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from falaj.governance.policy.engine import PolicyEngine

    made: list[str] = []
    decide = PolicyEngine.decide

    def counted(
        self: PolicyEngine, principal: object, action: str, *args: object, **options: object
    ) -> object:
        made.append(action)
        return decide(self, principal, action, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(PolicyEngine, "decide", counted)
    return made
