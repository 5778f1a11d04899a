"""The documentation of the console: every part has a picture, and every picture a page."""

from __future__ import annotations

import re

from console_pictures import IMAGES, ROOT, WITHOUT_PAGE, documented_pictures, page_name
from falaj.apps.console.application import find_pages
from falaj.apps.console.navigation import ENTRIES

REFERENCE = ROOT / "docs" / "reference" / "console.md"
MOST_PICTURES, MOST_BYTES = 25, 150_000


def test_the_pictures_of_the_documentation_are_there_and_small() -> None:
    files = {file.stem: file.stat().st_size for file in IMAGES.iterdir()}

    assert documented_pictures() == {*files}, "make pictures writes them; delete those that no page shows"
    assert len(files) <= MOST_PICTURES
    assert {name: size for name, size in files.items() if size > MOST_BYTES} == {}


def test_every_picture_is_of_a_page() -> None:
    pages = {page_name(page.title) for page in find_pages()} | {*WITHOUT_PAGE}

    strange = {
        name
        for name in documented_pictures()
        if name not in pages and not any(name.startswith(f"{page}-") for page in pages)
    }

    assert strange == set()


def test_every_entry_of_the_navigation_has_a_section_with_a_picture_of_one_of_its_pages() -> None:
    sections = dict(
        re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", REFERENCE.read_text(), re.DOTALL | re.MULTILINE)
    )

    for entry in ENTRIES:
        shown = re.findall(r"images/console/([\w-]+)\.png", sections[entry.label])
        own = {page_name(page.title) for page in find_pages() if page.entry == entry.key}
        assert any(name.startswith(page) for name in shown for page in own), entry.label


def test_every_page_belongs_to_an_entry_whose_address_is_a_page() -> None:
    pages = find_pages()
    keys = {entry.key for entry in ENTRIES}
    addresses = {"/w/{workspace}" if key == "overview" else f"/w/{{workspace}}/{key}" for key in keys}

    assert [page.path for page in pages if page.entry not in keys] == []
    assert addresses <= {page.path for page in pages}
