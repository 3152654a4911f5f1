"""The nightly tier: new seeds each time, and a slice of it that takes so many minutes.

    make nightly                                    all of it
    make nightly MINUTES=15                         a slice, other tests at each commit
    NIGHTLY_SEEDS=81726354 make nightly ARGS=…      the seeds of an earlier run, which its first lines name

A slice starts with other files at each commit (`--order`), starts no test after its time (`--minutes`), and ends loops over new
seeds after `SLICE_S` each. It leaves out tests that may take longer than `LONGEST_S`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

Draw = Callable[[int], Iterator[int]]
"""yields at most so many new seeds"""
SEEDS = "NIGHTLY_SEEDS"
SLICE_S = 30.0
"""how long a loop over new seeds goes on in a slice"""
DRAWN = pytest.StashKey[int]()
LONGEST_S = 1200.0
"""longest time-out of a test in a slice, unless it loops over new seeds"""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nightly tier")
    group.addoption("--minutes", type=float, help="a slice: start no test after so many minutes")
    group.addoption("--order", help="a slice: text that decides with which files it starts, such as a commit")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(SEEDS, str(random.SystemRandom().randrange(2**48)))  # processes of xdist inherit it
    if config.getoption("minutes") is not None:
        config.pluginmanager.register(Slice(config), "nightly slice")


def pytest_report_header() -> str:
    return f"seeds of the nightly tier: {SEEDS}={os.environ[SEEDS]}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[pytest.TestReport]:
    report = yield
    if report.failed and DRAWN in item.stash:
        report.sections.append(("the newest seed", f"{item.stash[DRAWN]}: make it a case of the default tier"))
    return report


class Slice:
    """Runs a part of the tests that were selected."""

    def __init__(self, config: pytest.Config) -> None:
        self.minutes, self.order = config.getoption("minutes"), config.getoption("order") or ""
        self.ends = time.monotonic() + 60 * self.minutes
        self.ran = self.selected = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if takes_long(item)]
        items[:] = sorted((item for item in items if not takes_long(item)), key=self.place)
        config.hook.pytest_deselected(items=left_out)
        self.selected = len(items)

    def place(self, item: pytest.Item) -> float:
        """Return the key that sorts files; tests of a file stay together, and share its fixtures."""
        return random.Random(f"{self.order}/{item.path.name}").random()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        if time.monotonic() > self.ends:
            return True  # it counts as run, and has no result
        self.ran += 1
        return None

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["ran"] = self.ran, self.selected

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        ran, self.selected = getattr(node, "workeroutput", {}).get("ran", (0, self.selected))
        self.ran += ran

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(
            f"a slice of {self.minutes:g} minutes, order {self.order[:12]!r}: {self.ran} of {self.selected} tests, "
            f"{SEEDS}={os.environ[SEEDS]}"
        )


def takes_long(item: pytest.Item) -> bool:
    """Return whether a test may take longer than a slice can wait for it."""
    mark = item.get_closest_marker("timeout")
    return mark is not None and mark.args[0] > LONGEST_S and "new_seeds" not in getattr(item, "fixturenames", ())


def seeds_of(nodeid: str) -> Iterator[int]:
    """Yield the new seeds of a test, without end: the same ones for the same `NIGHTLY_SEEDS`, whatever else runs."""
    first = random.Random(f"{os.environ[SEEDS]}/{nodeid}").getrandbits(48)
    while True:
        yield first
        first += 1


@pytest.fixture
def new_seeds(request: pytest.FixtureRequest) -> Draw:
    """A function that yields so many new seeds, fewer in a slice."""
    in_slice = request.config.getoption("minutes") is not None

    def draw(most: int) -> Iterator[int]:
        started = time.monotonic()
        for seed in islice(seeds_of(request.node.nodeid), most):
            if in_slice and time.monotonic() > started + SLICE_S:
                return
            request.node.stash[DRAWN] = seed
            yield seed

    return draw


@pytest.fixture
def new_seed(request: pytest.FixtureRequest) -> int:
    """One new seed."""
    request.node.stash[DRAWN] = next(seeds_of(request.node.nodeid))
    return request.node.stash[DRAWN]
