"""Usage as CSV with the columns of FOCUS 1.2, the FinOps Open Cost and Usage Specification."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple

from falaj.records.scheduling.snapshot import WHOLE_GPU
from falaj.scheduling.accounting.charges import hours, kwh
from falaj.scheduling.accounting.periods import by_months, month_at
from falaj.scheduling.explanation.formatting import count_of

NO_CURRENCY = "XXX"
"""ISO 4217 code for no currency: no prices are configured."""

COLUMNS = (
    "BilledCost",
    "BillingAccountId",
    "BillingAccountName",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargeFrequency",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "ConsumedQuantity",
    "ConsumedUnit",
    "ContractedCost",
    "ContractedUnitPrice",
    "EffectiveCost",
    "InvoiceIssuerName",
    "ListCost",
    "ListUnitPrice",
    "PricingCategory",
    "PricingQuantity",
    "PricingUnit",
    "ProviderName",
    "PublisherName",
    "ResourceId",
    "ResourceName",
    "ResourceType",
    "ServiceCategory",
    "ServiceName",
    "ServiceSubcategory",
    "SkuId",
    "SubAccountId",
    "SubAccountName",
    "Tags",
    "x_Attempt",
    "x_Queue",
    "x_UserId",
    "x_UserName",
    "x_Verdict",
)
"""All mandatory columns of FOCUS 1.2, optional ones that have data, and custom `x_` columns."""

_FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")
"""First characters by which a spreadsheet recognises a formula."""

_SAME = {
    "ChargeCategory": "Usage",
    "ChargeClass": "",
    "ChargeFrequency": "Usage-Based",
    "InvoiceIssuerName": "Falaj",
    "PricingCategory": "Standard",
    "ProviderName": "Falaj",
    "PublisherName": "Falaj",
    "ResourceType": "Job",
    "ServiceCategory": "AI and Machine Learning",
    "ServiceName": "Jobs",
    "ServiceSubcategory": "Machine Learning",
}


class BillingAccount(NamedTuple):
    """The billed account: the platform."""

    id: str
    name: str


class Charge(NamedTuple):
    """One charge of an attempt, over all of its time."""

    sku: str
    words: str
    unit: str
    quantity: float
    cost: float


def header() -> bytes:
    return _csv([COLUMNS])


def lines(
    rows: Iterable[Any],
    names: Mapping[str, str],
    *,
    account: BillingAccount,
    since: datetime,
    until: datetime,
    now: datetime,
) -> bytes:
    """Return the charges of attempts in the time range as CSV, one line for each month."""
    made = []
    for row in rows:
        whole = hours(row["started_at"], row["ended_at"] or now)
        common = _of_attempt(row, names, account)
        start, end = max(row["started_at"], since), min(row["ended_at"] or now, until)
        for piece_start, piece_end in by_months(start, max(start, end)):
            part = hours(piece_start, piece_end) / whole if whole else 1.0
            for charge in _charges(row, whole):
                cells = common | _of_period(piece_start, piece_end) | _of_charge(charge, part)
                made.append([cells[column] for column in COLUMNS])
    return _csv(made)


def guarded(value: str) -> str:
    """Return `value`, quoted if a spreadsheet would read it as a formula."""
    return f"'{value}" if value.startswith(_FORMULA_PREFIXES) else value


def _charges(row: Any, lasted_h: float) -> Iterator[Charge]:
    gpus = row["gpus_milli"] / WHOLE_GPU
    if gpus:
        models = ", ".join(sorted(set(row["gpu_models"]))) or "unknown model"
        words = f"{_plain(gpus)} GPUs ({models})"
        yield Charge(f"gpu:{models}", words, "GPU-Hours", gpus * lasted_h, row["gpu_rate"] * lasted_h)
    words = count_of(row["cpus"], "CPU")
    yield Charge("cpu", words, "CPU-Hours", row["cpus"] * lasted_h, row["cpu_rate"] * lasted_h)
    known = [joules for joules in (row["cpu_energy_j"], row["gpu_energy_j"]) if joules is not None]
    if known:
        yield Charge("energy", "energy", "Kilowatt-Hours", kwh(sum(known)), row["energy_cost"] or 0.0)


def _of_attempt(row: Any, names: Mapping[str, str], account: BillingAccount) -> dict[str, str]:
    tags = {"falaj.queue": row["queue"], "falaj.user": names.get(row["user_id"], row["user_id"])}
    return _SAME | {
        "BillingAccountId": account.id,
        "BillingAccountName": account.name,
        "BillingCurrency": row["currency"] or NO_CURRENCY,
        "ResourceId": row["job"],
        "ResourceName": names.get(row["job"], row["job"]),
        "SubAccountId": row["workspace"],
        "SubAccountName": names.get(row["workspace"], row["workspace"]),
        "Tags": json.dumps(tags, sort_keys=True),
        "x_Attempt": str(row["attempt"]),
        "x_Queue": row["queue"],
        "x_UserId": row["user_id"],
        "x_UserName": names.get(row["user_id"], row["user_id"]),
        "x_Verdict": row["verdict"] or "",
    }


def _of_period(start: datetime, end: datetime) -> dict[str, str]:
    first, following = month_at(start)
    return {
        "BillingPeriodStart": _moment(first),
        "BillingPeriodEnd": _moment(following),
        "ChargePeriodStart": _moment(start),
        "ChargePeriodEnd": _moment(end),
    }


def _of_charge(charge: Charge, part: float) -> dict[str, str]:
    quantity, cost = _plain(charge.quantity * part), _plain(charge.cost * part)
    price = _plain(charge.cost / charge.quantity) if charge.quantity else ""
    return {
        "ChargeDescription": charge.words,
        "ConsumedQuantity": quantity,
        "ConsumedUnit": charge.unit,
        "PricingQuantity": quantity,
        "PricingUnit": charge.unit,
        "SkuId": charge.sku,
        **dict.fromkeys(("ListUnitPrice", "ContractedUnitPrice"), price),
        **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost),
    }


def _moment(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _plain(number: float) -> str:
    """Return the shortest decimal form without an exponent."""
    text = format(Decimal(repr(round(number, 12))), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _csv(rows: Iterable[Iterable[str]]) -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([guarded(cell) for cell in row] for row in rows)
    return out.getvalue().encode()
