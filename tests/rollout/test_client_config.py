"""The settings of a client, as one value and as keywords."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_type_hints

import pytest

from rollout import AsyncRolloutClient, ClientConfig, RolloutClient
from rollout.client.base import BaseClient
from rollout.client.config import ClientFields
from rollout.client.connection import LinkTiming
from rollout.transport.loopback import LoopbackService


def opened(*given: Any, **fields: Any) -> ClientConfig:
    """The settings that a client made of its arguments."""
    client = BaseClient(None, *given, **fields)
    client._close()
    return client._config


def test_keywords_are_the_fields() -> None:
    assert get_type_hints(ClientFields) == get_type_hints(ClientConfig)
    end = LoopbackService().connect()
    assert opened(transport=end, name="a", budget=9) == ClientConfig(transport=end, name="a", budget=9)


def test_keywords_replace_those_of_the_value() -> None:
    given = ClientConfig(name="a", transport=LoopbackService().connect(), resubmit=True)
    made = opened(given, name="b")
    assert (made.name, made.resubmit, made.transport) == ("b", True, given.transport) and given.name == "a"


def test_timeouts_replace_those_of_the_intervals() -> None:
    made = ClientConfig(link_timeout_s=9.0, timing=LinkTiming(link_s=1.0, poll_s=0.1)).intervals
    assert (made.link_s, made.poll_s) == (9.0, 0.1)


@pytest.mark.parametrize("kind", [RolloutClient, AsyncRolloutClient])
@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("nam", "did you mean name?"),
        ("adress", "did you mean address?"),
        ("link_timeout", "did you mean link_timeout_s?"),
        ("xyz", "it has address, name"),
    ],
)
def test_an_unknown_keyword_names_the_nearest(kind: Any, field: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"no argument '{field}'.*{hint.replace('?', '.')}"):
        kind(**{field: 1})


def test_the_settings_alone_name_the_nearest_too() -> None:
    with pytest.raises(TypeError, match=r"ClientConfig has no field 'nam'; did you mean name\?"):
        ClientConfig(**{"nam": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [0, -5])
def test_a_budget_below_one_is_refused_before_anything_opens(budget: int) -> None:
    with pytest.raises(ValueError, match=f"budget={budget}: must be None"):
        ClientConfig(budget=budget)
    with pytest.raises(ValueError, match="budget"):
        opened(ClientConfig(), budget=budget)


PARTS = ("refresh", "lora", "proofs", "replaying", "verification", "receipts", "memo", "memo_offline", "token_text", "aio")
USES = """
import sys
from rollout import RolloutClient, Sampling
from rollout.client.base import BaseClient
from rollout.transport.loopback import LoopbackService

client = BaseClient(transport=LoopbackService().connect())
loaded = sorted(name for name in sys.modules if name.startswith(("rollout.client.", "rollout.transport.weights.")))
client._parts.close()
print(*loaded)
{more}
"""


def modules(more: str = "") -> set[str]:
    command = [sys.executable, "-c", USES.format(more=more)]
    return set(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split())


def test_a_client_reads_no_part_that_it_does_not_use() -> None:
    loaded = modules()
    assert not {f"rollout.client.{name}" for name in PARTS} & loaded and "rollout.client.parts" in loaded
    assert {name for name in loaded if name.startswith("rollout.transport.weights.")} == {"rollout.transport.weights.offers"}
    used = modules("client._parts._sending(); client._parts.close(); print(*sys.modules)")
    assert {"rollout.client.refresh", "rollout.transport.weights.sending"} <= used, "the control"
