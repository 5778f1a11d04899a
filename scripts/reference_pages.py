"""Write the generated pages of docs/reference from the code; `--check` only compares, and names what is stale."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from reference.configuration_page import with_settings
from reference.errors_page import errors_page
from reference.fit_page import fit_page
from reference.markdown import generated
from reference.python_page import python_page
from reference.rest_page import rest_page

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
CONFIGURATION = FOLDER / "configuration.md"

PAGES: dict[Path, Callable[[], str]] = {
    FOLDER / "errors.md": lambda: generated(errors_page()),
    FOLDER / "fit.md": lambda: generated(fit_page()),
    FOLDER / "python.md": lambda: generated(python_page()),
    FOLDER / "rest.md": lambda: generated(rest_page()),
    CONFIGURATION: lambda: with_settings(CONFIGURATION.read_text()),
}
"""Each page, and the function that returns its text."""


def main() -> int:
    stale = {path: text for path, page in PAGES.items() if (text := page()) != read(path)}
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.name} is stale; run: python scripts/reference_pages.py", file=sys.stderr)
        return int(bool(stale))
    for path, text in stale.items():
        path.write_text(text)
        print(f"wrote {path.name}")
    return 0


def read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
