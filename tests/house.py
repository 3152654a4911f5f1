"""`python -m tests.house [--run] [--json]`: what one must read to follow the core, beside a table of budgets.

    closure of a module    lines of Python that importing it reads inside the project: text alone, without imports under
                           TYPE_CHECKING and inside functions. `make check` holds it
    group, step, refresh   files and functions that one action of an engine enters, with a tiny Llama on the CPU and all options
                           off: with --run. tests/test_house.py holds it

Ends with status 1 if a figure is above its budget. A change that needs more raises the number in its own commit, which says
why. A feature that is a part (a kind of cache, a policy, a device, a column) is imported where it is chosen, and raises none.
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.support.house import ROOT, actions, lines_of, modules_of

BUDGETS = {
    "rollout.engine.scheduling.scheduler": 5_850,
    "rollout.engine.engine": 10_850,
    "rollout.client.api": 7_900,
    "rollout.service.loop": 8_600,
    "rollout.exact.module": 9_200,
}
"""lines of each closure, in hundreds"""
ENTERED = {
    "group: files": 47, "group: functions": 380,
    "step: files": 40, "step: functions": 201,
    "refresh: files": 18, "refresh: functions": 90,
}  # fmt: skip


def table(figures: dict[str, int], budgets: dict[str, int]) -> list[str]:
    """List a line for each figure; those above their budget say so."""
    return [
        f"{name:40}{figures[name]:8,}{budget:8,}{'  above its budget' if figures[name] > budget else ''}"
        for name, budget in budgets.items()
    ]


def main(words: list[str] | None = None) -> int:
    """Print the figures; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.house")
    parser.add_argument("--run", action="store_true", help="also what one group, one decode step and one refresh enter")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    options = parser.parse_args(words)
    known = modules_of(ROOT)
    budgets = BUDGETS | (ENTERED if options.run else {})
    figures = {name: lines_of(name, known) for name in BUDGETS} | (actions() if options.run else {})
    if options.json:
        print(json.dumps({name: {"figure": figures[name], "budget": budget} for name, budget in budgets.items()}))
    else:
        print(f"{'':40}{'figure':>8}{'budget':>8}", *table(figures, budgets), sep="\n")
    return int(any(figures[name] > budget for name, budget in budgets.items()))


if __name__ == "__main__":
    sys.exit(main())
