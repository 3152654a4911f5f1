"""RL rollout generation service: the names that a trainer imports."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.client import (
        AsyncHandle,
        AsyncRefreshHandle,
        AsyncRolloutClient,
        Change,
        ClientConfig,
        Handle,
        LinkTiming,
        Receipt,
        RefreshHandle,
        Reproduced,
        RolloutClient,
        SampleStream,
        Verified,
    )
    from rollout.engine.values import Group, Limits, PartialSample, Refreshed, Sample, Sampling, TokenChunk, TokenColumns
    from rollout.transport.errors import (
        Busy,
        ClientClosed,
        Forbidden,
        GroupFailed,
        IdConflict,
        InvalidRequest,
        KeyRefused,
        LimitExceeded,
        NotBelieved,
        NoTokenizer,
        ProtocolError,
        RequestTimeout,
        RolloutError,
        ServiceLost,
        ServiceRestarted,
        SourceUnreachable,
        StaleWeights,
        VersionMismatch,
        WeightsRefused,
        WrongBase,
    )
    from rollout.transport.messages import Welcome

__version__ = "0.1.0"

if not (Path(__file__).parent / "engine").is_dir():
    # a copy of the sources without its links: engine/, transport/ and recipes/ lie next to this folder
    __path__.append(str(Path(__file__).parent.parent))

__all__ = [
    "AsyncHandle",
    "AsyncRefreshHandle",
    "AsyncRolloutClient",
    "Busy",
    "Change",
    "ClientClosed",
    "ClientConfig",
    "Forbidden",
    "Group",
    "GroupFailed",
    "Handle",
    "IdConflict",
    "InvalidRequest",
    "KeyRefused",
    "LimitExceeded",
    "Limits",
    "LinkTiming",
    "NoTokenizer",
    "NotBelieved",
    "PartialSample",
    "ProtocolError",
    "Receipt",
    "RefreshHandle",
    "Refreshed",
    "Reproduced",
    "RequestTimeout",
    "RolloutClient",
    "RolloutError",
    "Sample",
    "SampleStream",
    "Sampling",
    "ServiceLost",
    "ServiceRestarted",
    "SourceUnreachable",
    "StaleWeights",
    "TokenChunk",
    "TokenColumns",
    "Verified",
    "VersionMismatch",
    "WeightsRefused",
    "Welcome",
    "WrongBase",
    "__version__",
]
HOMES = ("rollout.engine.values", "rollout.transport.errors", "rollout.transport.messages", "rollout.client")
"""modules that have these names, in the order of their imports"""


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for (PEP 562): `rollout --help` waits for no socket library."""
    for home in HOMES if name in __all__ else ():
        if hasattr(module := import_module(home), name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names too, which are not imported yet."""
    return sorted({*globals(), *__all__})
