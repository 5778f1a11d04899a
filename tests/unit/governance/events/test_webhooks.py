"""Events are delivered to webhooks in order, at least once, signed; and to nobody who may not have them."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from cloudevents.v1.http import from_http
from standardwebhooks import Webhook as Verifier
from standardwebhooks import WebhookVerificationError

from falaj.control.events.delivery import WebhookDelivery
from falaj.errors import Denied, FalajError, InvalidInput, NotFound
from falaj.governance.events import store
from falaj.governance.operations.caller import acting_as
from falaj.governance.tables import events
from falaj.records.governance.events import WebhookState
from falaj.records.governance.identity import Role
from platforms import OwnPlatform, make_platform
from webhook_receivers import ALLOWED, Deliveries, Receiver


def types_of(receiver: Receiver) -> list[str]:
    return [json.loads(body)["type"] for _, body in receiver.got]


def subjects_of(receiver: Receiver) -> list[str]:
    return [json.loads(body)["data"]["name"] for _, body in receiver.got]


def test_an_event_arrives_as_a_signed_cloud_event(
    sending: OwnPlatform, receiver: Receiver, deliveries: Deliveries
) -> None:
    hook = sending.webhooks.create("deploys", receiver.url, types=("secrets.*",))
    sending.secrets.set("pin", "the pin 4711")

    deliveries.run()

    ((headers, body),) = receiver.got
    Verifier(hook.secret or "").verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Verifier(hook.secret or "").verify(body.replace(b"pin", b"pan"), headers)
    event = from_http(headers, body)
    (stored,) = sending.events.list(types=("secrets.*",)).items
    assert (event["type"], event["subject"], event["id"]) == ("falaj.secrets.set", stored.subject, stored.id)
    assert event.data["name"] == "pin"
    assert event.data["audit_entry"] == stored.seq
    assert sending.entries()[stored.seq]["action"] == "secrets.set"
    assert b"the pin 4711" not in body


@pytest.mark.slow
def test_events_arrive_once_and_in_order(
    sending: OwnPlatform, receiver: Receiver, deliveries: Deliveries
) -> None:
    sending.webhooks.create("all", receiver.url, types=("secrets.set",))
    names = [f"s{number:03}" for number in range(120)]
    for name in names:
        sending.secrets.set(name, "x")

    for _ in range(4):
        deliveries.run()

    assert subjects_of(receiver) == names
    shown = sending.webhooks.show("all")
    assert (shown.delivered, shown.waiting, shown.state) == (120, 0, WebhookState.DELIVERING)


def test_only_the_wanted_types_of_the_own_workspace_arrive(
    sending: OwnPlatform, receiver: Receiver, deliveries: Deliveries
) -> None:
    sending.workspaces.create("other")
    sending.webhooks.create("removals", receiver.url, types=("secrets.remove",))
    sending.secrets.set("here", "x")
    sending.secrets.set("there", "x", workspace="other")
    sending.secrets.remove("other/there")
    sending.secrets.remove("here")

    deliveries.run()

    assert (types_of(receiver), subjects_of(receiver)) == (["falaj.secrets.remove"], ["here"])


def test_a_receiver_that_fails_gets_the_event_again_before_the_next(
    sending: OwnPlatform, receiver: Receiver, deliveries: Deliveries
) -> None:
    sending.webhooks.create("all", receiver.url, types=("secrets.set",))
    sending.secrets.set("first", "x")
    sending.secrets.set("second", "x")
    receiver.answers = [500, 429]

    deliveries.run()
    deliveries.run()  # too early
    waiting = sending.webhooks.show("all")
    sending.clock.advance(store.PAUSES[0])
    deliveries.run()
    sending.clock.advance(store.PAUSES[1])
    deliveries.run()

    assert subjects_of(receiver) == ["first", "first", "first", "second"]
    assert (waiting.state, waiting.error) == (WebhookState.FAILING, "the receiver answered 500")
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 2
    assert sending.webhooks.show("all").state is WebhookState.DELIVERING


def test_an_event_that_is_refused_is_given_up_and_can_be_sent_again(
    sending: OwnPlatform, receiver: Receiver, deliveries: Deliveries
) -> None:
    sending.webhooks.create("all", receiver.url, types=("secrets.set",))
    sending.secrets.set("poison", "x")
    sending.secrets.set("next", "x")
    receiver.answers = [400] * store.REFUSALS

    for _ in range(store.REFUSALS + 1):
        deliveries.run()
        sending.clock.advance(store.PAUSES[-1])

    assert subjects_of(receiver) == ["poison"] * store.REFUSALS + ["next"]
    (lost,) = sending.webhooks.undelivered("all").items
    assert (lost.type, lost.attempts, lost.error) == (
        "falaj.secrets.set",
        store.REFUSALS,
        "the receiver answered 400",
    )
    sending.webhooks.redeliver("all", event=lost.event)
    deliveries.run()
    assert subjects_of(receiver)[-1] == "poison"
    assert sending.webhooks.undelivered("all").items == ()
    with pytest.raises(NotFound):
        sending.webhooks.redeliver("all", event=lost.event)


def test_a_receiver_that_is_down_for_a_day_costs_one_event_not_all(
    sending: OwnPlatform, receiver: Receiver, deliveries: Deliveries
) -> None:
    sending.webhooks.create("all", receiver.url, types=("secrets.set",))
    sending.secrets.set("first", "x")
    sending.secrets.set("second", "x")
    receiver.answers = [503] * 30

    for _ in range(29):
        deliveries.run()
        sending.clock.advance(timedelta(hours=1))
    receiver.answers = []
    deliveries.run()

    assert subjects_of(receiver)[-1] == "second"
    assert len(sending.webhooks.undelivered("all").items) == 1


def test_a_redirect_is_not_followed(sending: OwnPlatform, receiver: Receiver, deliveries: Deliveries) -> None:
    sending.webhooks.create("all", receiver.url, types=("secrets.set",))
    sending.secrets.set("first", "x")
    receiver.answers = [307]

    deliveries.run()

    assert len(receiver.got) == 1
    assert sending.webhooks.show("all").error == "the receiver answered 307"


def test_a_receiver_that_is_gone_pauses_its_webhook(
    sending: OwnPlatform, receiver: Receiver, deliveries: Deliveries
) -> None:
    sending.webhooks.create("all", receiver.url, types=("secrets.set",))
    sending.secrets.set("first", "x")
    receiver.answers = [410]

    deliveries.run()
    sending.clock.advance(timedelta(days=1))
    deliveries.run()
    paused = sending.webhooks.show("all")
    sending.webhooks.resume("all")
    deliveries.run()

    assert paused.state is WebhookState.PAUSED
    assert subjects_of(receiver) == ["first", "first"]


def test_a_controller_that_ends_before_it_records_sends_again_under_the_same_id(
    sending: OwnPlatform, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending.webhooks.create("all", receiver.url, types=("secrets.set",))
    sending.secrets.set("first", "x")
    for killed in (True, False):
        with monkeypatch.context() as patch:
            if killed:
                patch.setattr(WebhookDelivery, "_record", lambda *_: None)
            controller = Deliveries.of(sending)
            controller.run()
            controller.delivery.close()

    first, second = (headers["webhook-id"] for headers, _ in receiver.got)
    assert first == second


def test_a_deliverys_record_makes_no_event_of_its_own(
    sending: OwnPlatform, receiver: Receiver, deliveries: Deliveries
) -> None:
    sending.webhooks.create("all", receiver.url)

    deliveries.run()
    stored = sending.count(events)
    for _ in range(3):
        deliveries.run()

    assert types_of(receiver) == ["falaj.webhooks.create"]
    assert sending.count(events) == stored
    recorded = [entry for entry in sending.entries() if entry["action"] == "webhooks.record"]
    assert len(recorded) == 1
    assert recorded[0]["delivered"]


def test_a_test_event_reaches_its_webhook_whatever_types_it_wants(
    sending: OwnPlatform, receiver: Receiver, deliveries: Deliveries
) -> None:
    sending.webhooks.create("one", receiver.url, types=("models.promote",))
    sending.webhooks.create("two", receiver.url, types=("models.promote",))

    sending.webhooks.test("one")
    deliveries.run()

    assert types_of(receiver) == ["falaj.webhooks.test"]
    assert sending.webhooks.show("two").delivered == 0


def test_a_paused_webhook_gets_what_waited_when_it_is_resumed(
    sending: OwnPlatform, receiver: Receiver, deliveries: Deliveries
) -> None:
    sending.webhooks.create("all", receiver.url, types=("secrets.set",))
    sending.webhooks.pause("all")
    sending.secrets.set("first", "x")
    deliveries.run()
    assert receiver.got == []

    resumed = sending.webhooks.resume("all")
    deliveries.run()

    assert resumed.waiting == 1
    assert subjects_of(receiver) == ["first"]


def test_a_new_secret_signs_from_then_on(
    sending: OwnPlatform, receiver: Receiver, deliveries: Deliveries
) -> None:
    first = sending.webhooks.create("all", receiver.url, types=("secrets.set",))
    second = sending.webhooks.rotate_secret("all")
    sending.secrets.set("first", "x")

    deliveries.run()

    ((headers, body),) = receiver.got
    Verifier(second.secret or "").verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Verifier(first.secret or "").verify(body, headers)
    assert sending.webhooks.show("all").secret is None


def test_an_object_whose_label_forbids_the_zone_of_the_receiver_is_not_told_of(
    receiver: Receiver, tmp_path: Path
) -> None:
    toml = ALLOWED.replace('zone = "local"', 'zone = "frankfurt"').replace(
        '"DE"', '"DE"\nnetworks = ["10.0.0.0/8"]'
    )
    with make_platform(tmp_path, toml=toml) as platform:
        platform.webhooks.create("all", receiver.url, types=("blobs.commit",))
        platform.put("ours", b"patients", only=("AE",))
        told = platform.put("anybodys", b"weather")
        deliveries = Deliveries.of(platform)

        deliveries.run()

        deliveries.delivery.close()
        assert [json.loads(body)["subject"] for _, body in receiver.got] == [told.id]
        (withheld,) = platform.webhooks.undelivered("all").items
        assert "does not permit the zone" in withheld.error


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://elsewhere.example/hook", "a host in egress.allow"),
        ("https://10.0.0.1/hook", "a host in egress.allow"),
        ("https://user:pw@127.0.0.1/hook", "without a user"),
        ("ftp://127.0.0.1/hook", "https://HOST"),
        ("https://127.0.0.1:99999/hook", "Port out of range"),
        ("https:///hook", "https://HOST"),
        ("https://127.0.0.1/a b", "https://HOST"),
        ("https://127.0.0.1/a\r\nx: y", "https://HOST"),
    ],
)
def test_a_url_that_is_not_allowed_is_refused(light_platform: OwnPlatform, url: str, allowed: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        light_platform.webhooks.create("all", url)

    assert allowed in str(refused.value.faults)
    assert "pw" not in str(refused.value.faults)


def test_an_unknown_type_names_those_that_there_are(sending: OwnPlatform, receiver: Receiver) -> None:
    with pytest.raises(InvalidInput) as refused:
        sending.webhooks.create("all", receiver.url, types=("models.promoted",))

    assert "models.promote" in str(refused.value.faults)


def test_only_admins_make_webhooks_and_see_their_urls(sending: OwnPlatform, receiver: Receiver) -> None:
    made = sending.webhooks.create("all", receiver.url + "?key=hidden")
    developer = sending.join("dana", Role.DEVELOPER)

    for attempt in (
        lambda: sending.webhooks.create("mine", receiver.url),
        lambda: sending.webhooks.list(),
        lambda: sending.webhooks.show(made.id),
        lambda: sending.webhooks.rotate_secret(made.id),
        lambda: sending.webhooks.undelivered(made.id),
    ):
        with acting_as(developer), pytest.raises(FalajError) as refused:
            attempt()
        assert isinstance(refused.value, Denied | NotFound)


@pytest.mark.slow
def test_events_of_objects_that_a_caller_may_not_see_are_not_listed(sending: OwnPlatform) -> None:
    hidden = 'forbid (principal == User::"dana", action, resource) when { resource.name == "hidden" };'
    sending.secrets.set("hidden", "x")
    sending.secrets.set("open", "x")
    sending.secrets.set("later", "x")
    dana = sending.join("dana", Role.VIEWER)
    sending.policies.publish("hide", text=hidden.replace('User::"dana"', f'User::"{dana.id}"'))

    with acting_as(dana):
        seen = sending.events.list(types=("secrets.*",))
        paged = sending.events.list(types=("secrets.*",), limit=1)
        rest = sending.events.list(types=("secrets.*",), limit=1, after=paged.next or "")

    assert [event.name for event in seen.items] == ["open", "later"]
    assert [event.name for event in (*paged.items, *rest.items)] == ["open", "later"]
    assert rest.next is None
