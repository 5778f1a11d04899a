"""Changes of queues and machines as they are typed: risk.gpus=8, research=2, like=NODE,count=2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from falaj.errors import Fault, InvalidInput
from falaj.records import sizes

RESOURCES = {"cpus": "cpus", "gpus": "gpus", "memory": "memory_bytes"}
NODE_PARTS = {"like": "like", "count": "count", "gpus": "gpus", "gpu": "gpu_model"}


def read_changes(
    quotas: Sequence[str],
    limits: Sequence[str],
    weights: Sequence[str],
    nodes: Sequence[str],
    removed: Sequence[str],
    *,
    command: str,
) -> dict[str, Any]:
    """All that is wrong with any of them at once."""
    faults: list[Fault] = []
    read: dict[str, list[Any]] = {"quotas": [], "limits": [], "weights": [], "add_nodes": []}
    readers: list[tuple[str, Sequence[str], Callable[[str], dict[str, Any]]]] = [
        ("quotas", quotas, lambda text: _bound(text, "--quota")),
        ("limits", limits, lambda text: _bound(text, "--limit")),
        ("weights", weights, _weight),
        ("add_nodes", nodes, _node),
    ]
    for part, texts, reader in readers:
        for text in texts:
            try:
                read[part].append(reader(text))
            except InvalidInput as error:
                faults += error.faults
    if faults:
        what = f"{faults[0].where} is" if len(faults) == 1 else f"{len(faults)} things are"
        raise InvalidInput(f"falaj {command}: {what} not valid", faults=faults)
    names = [name for text in removed for name in text.split(",") if name]
    return {part: tuple(items) for part, items in read.items()} | {"remove_nodes": tuple(names)}


def _bound(text: str, option: str) -> dict[str, Any]:
    where, equals, amount = text.partition("=")
    queue, _, resource = where.rpartition(".")
    if not equals or not queue or resource not in RESOURCES:
        raise InvalidInput.at(
            option,
            given=text,
            allowed="QUEUE.cpus=N, QUEUE.gpus=N or QUEUE.memory=SIZE",
            fix=f"{option} risk.gpus=8",
        )
    return {
        "queue": queue,
        "resource": RESOURCES[resource],
        "amount": _amount(amount, resource, option, text),
    }


def _amount(amount: str, resource: str, option: str, text: str) -> int | None:
    if amount == "none":
        return None
    if resource == "memory":
        found = sizes.read_size(amount)
        if found is None:
            raise InvalidInput.at(option, given=text, allowed=f"none, or {sizes.RULE}")
        return found
    return _count(amount, option, text, allowed="a whole number, or none")


def _count(amount: str, option: str, text: str, *, allowed: str) -> int:
    if not (amount.isascii() and amount.isdecimal() and len(amount) <= 15):
        raise InvalidInput.at(option, given=text, allowed=allowed)
    return int(amount)


def _weight(text: str) -> dict[str, Any]:
    queue, _, weight = text.rpartition("=")
    try:
        number = float(weight)
    except ValueError:
        number = 0.0
    if not queue or not 0 < number <= 1_000_000:
        raise InvalidInput.at(
            "--weight", given=text, allowed="QUEUE=NUMBER, a number above 0", fix="--weight research=2"
        )
    return {"queue": queue, "weight": number}


def _node(text: str) -> dict[str, Any]:
    parts = [part.partition("=") for part in text.split(",")]
    wrong = [name for name, equals, value in parts if name not in NODE_PARTS or not equals or not value]
    if wrong or "like" not in {name for name, _, _ in parts}:
        raise InvalidInput.at(
            "--node",
            given=text,
            allowed="like=NAME, and with commas count=N, gpus=N, gpu=MODEL",
            fix="--node like=NAME,count=2",
        )
    found: dict[str, Any] = {NODE_PARTS[name]: value for name, _, value in parts}
    for name in {"count", "gpus"} & set(found):
        found[name] = _count(found[name], "--node", text, allowed=f"a whole number as {name}")
    return found
