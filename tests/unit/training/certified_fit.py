"""Runs over several processes, as spread_fit.py has them, which log the loss of each step at once.

So there is something to compare when a step is computed again; other runs log once a second.
"""

from __future__ import annotations

from spread_fit import main

from falaj.training.runtime import report

if __name__ == "__main__":
    report.TELL_EVERY_S = 0.0
    main()
