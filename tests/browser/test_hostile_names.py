"""Texts of strangers in every field that takes them, on every page: nothing runs, nothing is asked of other hosts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import pytest

import falaj as fj
from console_data import HOSTILE_CARD, make_features, make_pipeline, make_version
from console_pictures import IS_DRAWN, OVER_PX, WIDTHS, window_size
from consoles import RunningConsole
from falaj.apps.console.application import find_pages
from falaj.errors import FalajError
from falaj.records.tracking import DatasetInput, MetricPoint

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow
IMAGE = "<img src=x onerror=window.harmed=1>"
HOSTILE = (
    IMAGE,
    "<script>window.harmed=1</script>",
    "{{constructor.constructor('window.harmed=1')()}}",
    "${window.harmed=1}",
    "javascript:window.harmed=1",
    "\"'><svg onload=window.harmed=1>",
    "' onmouseover=window.harmed=1 x='",
    "\u202e\u2066gnp.exe\u200f",
    "w" * 240,
)
KEYS = (":onclick", "v-html", "__proto__", "constructor", ":innerHTML", *HOSTILE[:3])
"""Names that the framework, Vue or the browser would take for something else."""
DOCUMENT = (
    f"# {IMAGE}\n\n[link](javascript:window.harmed=1) ![picture](http://evil.example/spy.png)\n\n"
    f"<iframe src='http://evil.example'></iframe>\n\n| a | b |\n|---|---|\n| {IMAGE} | {{{{7*7}}}} |\n"
)


class Fields:
    """Puts hostile texts into fields, and counts those that the platform takes and refuses."""

    def __init__(self) -> None:
        self.taken, self.refused = 0, 0

    def put(self, call: Callable[[str], Any], *texts: str) -> Any:
        """Call with each of these texts; return the last answer."""
        answer = None
        for text in texts or HOSTILE:
            try:
                answer = call(text)
                self.taken += 1
            except (FalajError, ValueError):  # the records refuse some before they are sent
                self.refused += 1
        return answer


def fill(console: RunningConsole) -> dict[str, str]:
    """Put hostile texts wherever the platform takes them; return the ids that addresses name."""
    p, fields = console.platform, Fields()
    fields.put(lambda text: p.experiments.create(text))
    params = dict(zip(KEYS[:5], HOSTILE, strict=False))
    run = fields.put(lambda text: p.runs.start(text, name=text, params=params, tags=params, user=text[:60]))
    run = run or p.runs.start("vision", name=IMAGE)
    for key in KEYS:
        fields.put(lambda text: p.runs.log_params(run.id, {text: text}), key)
        fields.put(lambda text: p.runs.set_tags(run.id, {text: text}), key)
        fields.put(lambda text: p.runs.log_metrics(run.id, (MetricPoint(key=text, value=0.5, step=1),)), key)
    fields.put(
        lambda text: p.runs.log_inputs(run.id, datasets=(DatasetInput(name=text, digest="d", source=text),))
    )
    fields.put(
        lambda text: p.runs.upload_artifact(
            run.id, f"{text[:60]}.txt".replace("/", ""), iter([text.encode()])
        )
    )
    rows = ",".join(f'"{text}"' for text in KEYS) + "\n" + ",".join('"x"' for _ in KEYS)
    for name, text in (
        ("notes.md", DOCUMENT),
        ("rows.csv", rows),
        ("page.html", f"<h1>{IMAGE}</h1>"),
        ("x.json", rows),
    ):
        p.runs.upload_artifact(run.id, name, iter([text.encode()]))
    other = p.runs.start("vision", name=HOSTILE[5], params=params)
    make_features(p, "hostile")
    make_version(p, "hostile", auc=0.9, card=HOSTILE_CARD + DOCUMENT)
    make_version(p, "hostile", auc=0.8, card=DOCUMENT)
    make_pipeline(p, "hostile", model="hostile", view="hostile-calls")
    fields.put(lambda text: p.models.update("hostile", description=text))
    fields.put(lambda text: p.models.update("hostile", description=text), DOCUMENT)
    with fj.connect(console.api, token=console.person("hostile-approver", "approver")) as approver:
        fields.put(
            lambda text: approver.models.approve("hostile@1", alias="champion", comment=text),
            *HOSTILE,
            DOCUMENT,
        )
    assert p.models.approvals("hostile@1", alias="champion").items
    for make in (p.queues.set, p.groups.create, p.users.create, p.workspaces.create):
        fields.put(lambda text, make=make: make(text), IMAGE, "__proto__", "constructor")  # type: ignore[misc]
    fields.put(lambda text: p.webhooks.create("hostile", f"https://evil.example/{text}"))
    fields.put(lambda text: p.tokens.issue(purpose=text))
    fields.put(
        lambda text: p.policies.publish("hostile", text=f"// {text}\npermit (principal, action, resource);")
    )
    assert fields.taken > 40, (fields.taken, fields.refused)
    return {
        "run": run.id,
        "other": other.id,
        "view": "hostile-calls",
        "set": "hostile-training",
        "model": "hostile",
        "version": "1",
        "endpoint": "hostile-endpoint",
        "pipeline": "hostile-weekly",
    }


def addresses(ids: dict[str, str]) -> list[str]:
    """Return an address for every page that these objects fill; a page of another object shows that there is none."""
    known = {"workspace": "default", "run": ids["run"], "object": ids["run"], **ids}
    found = [
        re.sub(r"{(\w+)(?::\w+)?}", lambda part: quote(known.get(part[1], IMAGE), safe=""), page.path)
        for page in find_pages()
    ]
    both = f"{ids['run']},{ids['other']}"
    return [
        *found,
        f"/w/default/compare?runs={both}&all=1",
        f"/w/default/runs?filter={quote(IMAGE)}&metrics={quote(','.join(KEYS[:2]))}",
        *(
            f"/w/default/runs/{ids['run']}?artifact={name}"
            for name in ("notes.md", "rows.csv", "page.html", "x.json")
        ),
        f"/w/{quote(IMAGE, safe='')}",
    ]


def test_nothing_of_strangers_runs_on_any_page(console: RunningConsole, page: Page) -> None:
    ids = fill(console)
    own, asked, dialogs = urlsplit(console.url).netloc, set[str](), list[str]()
    page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    wide = []

    for address in addresses(ids):
        page.goto(address)
        page.wait_for_function("window.did_handshake")
        page.locator("main *").first.wait_for()
        assert page.evaluate("window.harmed") is None, address
        assert page.evaluate("Object.keys(Object.prototype)") == [], address
        for width in WIDTHS:
            page.set_viewport_size(window_size(width))
            page.wait_for_function(IS_DRAWN)
            over = page.evaluate(OVER_PX)
            wide += [f"{address}: {over} ({width})"] if over > 0 else []

    assert {each for each in asked if each} == {own}
    assert (dialogs, wide) == ([], [])
    assert page.evaluate("({}).harmed === undefined && ({}).constructor === Object")
