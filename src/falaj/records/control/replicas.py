"""Replicas of the model server: how many are allowed, and what each does."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from falaj.records.durations import read_duration
from falaj.records.record import Record

MOST_REPLICAS = 64


def _length(given: object) -> object:
    """A length of time as people write it: 20ms, 5s, 10m; or as TOML knows it, in seconds."""
    found = re.fullmatch(r"(\d{1,9})ms", given, re.ASCII) if isinstance(given, str) else None
    return timedelta(milliseconds=int(found[1])) if found else read_duration(given) or given


class ReplicaConfig(Record):
    """The number of model server processes, between `min` and `max`, and what decides about it."""

    min: Annotated[int, Field(ge=0, le=MOST_REPLICAS)] = 1
    """Smallest number of replicas; 0 stops the last one after `idle`, and the next request starts one."""
    max: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] | Literal["auto"] = 1
    """Largest number of replicas; auto is the number of cores."""
    concurrency: Annotated[int, Field(ge=1, le=100_000)] = 32
    """Requests that one replica should answer at the same time; more of them start another replica."""
    p99: (
        Annotated[
            timedelta,
            BeforeValidator(_length),
            Field(ge=timedelta(milliseconds=1), le=timedelta(minutes=1)),
        ]
        | None
    ) = None
    """Latency that 99 of 100 requests should stay below, like "20ms"; a higher one starts another replica."""
    idle: Annotated[
        timedelta, BeforeValidator(_length), Field(ge=timedelta(seconds=1), le=timedelta(days=7))
    ] = timedelta(minutes=5)
    """Time without a request after which the last replica stops, if `min` is 0."""

    @property
    def most(self) -> int:
        """Return the largest number of replicas on this machine."""
        if self.max == "auto":
            return max(1, self.min, min(len(os.sched_getaffinity(0)), MOST_REPLICAS))
        return self.max

    @model_validator(mode="after")
    def _ordered(self) -> ReplicaConfig:
        if self.max != "auto" and self.min > self.max:
            raise ValueError(f"max must be at least min, which is {self.min}")
        return self


class ReplicaState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    ENDED = "ended"


class RecentLoad(Record):
    """The load of a replica in its last second."""

    in_flight: float = 0.0
    """Requests that were being answered at the same time, on average or now, whichever is more."""
    requests_per_s: float = 0.0
    refused_per_s: float = 0.0
    """Requests that were refused because of overload (429 and 503)."""
    p50_ms: float | None = None
    p99_ms: float | None = None
    rss_bytes: int = 0


class Replica(Record):
    """A replica as its driver sees it."""

    name: str
    """A small number, unique among the replicas that have not been forgotten; used again later."""
    state: ReplicaState
    age_s: float
    """Seconds since it was started."""
    load: RecentLoad | None = None
    """Its last report; none before the first."""
    pid: int | None = None
    was_stopped: bool = False
    """Whether it was told to stop: its end is no failure."""
    exit: str | None = None
    """How it ended, like "code 1" or "signal 9"."""
    problem: str | None = None
    """What it said keeps it from serving."""


class ServerReplicas(Record):
    """The model server of this platform: how many replicas are ready and why, and what each does."""

    status: str | None
    """None if it does not run."""
    replicas: tuple[Replica, ...] = ()
