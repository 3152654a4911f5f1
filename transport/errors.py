"""Every error that a user of the service can meet.

RolloutError                    kind on the wire
├── ProtocolError               protocol_error      bytes that are no message of this protocol
│   └── NotBelieved             not_believed        the other end sent what cannot be: a sample that nobody can have asked for
├── VersionMismatch             version_mismatch    the two ends speak different protocol versions
├── NoSession                   no_session          the service does not (or no longer) know the session; Hello again
├── InvalidRequest  (ValueError)   invalid_request     a field has a value that cannot be served
├── LimitExceeded   (ValueError)   limit_exceeded      a field is over one of `Limits`
├── IdConflict      (ValueError)   id_conflict         this group id is live with other content
├── Busy                        busy                no room now; the same request may succeed later
├── WeightsRefused  (ValueError)   weights_refused     this refresh cannot be applied; the old weights serve on
│   └── WrongBase               wrong_base          it says how weights change, and these here are others
├── SourceUnreachable           source_unreachable  the service does not see the memory or folder that a refresh offers
├── StaleWeights                stale_weights       the service's weights are older than the client accepts, or others
├── KeyRefused                  key_refused         the service does not let this client in: its key is unknown,
│                                                   wrong or revoked, or it has not the secret of the address
├── Forbidden                   forbidden           the key has no role for this request
├── GroupFailed                 group_failed        the service itself failed on this request
├── ServiceLost  (ConnectionError) service_lost        the service is dead, unreachable, stopping or stalled
│   └── ServiceRestarted        service_restarted   another incarnation answers, or the same with other weights under one
│                                                   version: what ran before is gone
├── RequestTimeout (TimeoutError)  request_timeout     the caller's own time ran out; the group is still live
└── ClientClosed                client_closed       the client was closed while the request was open
"""

from __future__ import annotations

from typing import ClassVar


def shown(text: str) -> str:
    """Escape text that came from a peer, for a terminal or a log: what would not print (control characters, escape sequences,
    marks that turn the direction of text) is written as Python writes it, e.g. \\x1b."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class RolloutError(Exception):
    """Base of all errors here. `kind` is stable and travels; `group_id` names the group it is about, if there is one."""

    kind: ClassVar[str] = "error"

    def __init__(self, message: str, group_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.group_id = group_id

    def __str__(self) -> str:
        """Format for people; `message` is as it came."""
        return shown(self.message if self.group_id is None else f"group {self.group_id!r}: {self.message}")


def copy_of(error: RolloutError, group_id: str | None = None) -> RolloutError:
    """Copy an error that several callers get, or that is kept: one that was raised holds the frames that it came through, and
    with these, most likely, what keeps it."""
    return type(error)(error.message, group_id)


class ProtocolError(RolloutError):
    kind = "protocol_error"


class NotBelieved(ProtocolError):
    """Raised where the message arrives; no service sends it."""

    kind = "not_believed"


class VersionMismatch(RolloutError):
    kind = "version_mismatch"


class NoSession(RolloutError):
    kind = "no_session"


class InvalidRequest(RolloutError, ValueError):
    kind = "invalid_request"


class LimitExceeded(RolloutError, ValueError):
    kind = "limit_exceeded"


class IdConflict(RolloutError, ValueError):
    kind = "id_conflict"


class Busy(RolloutError):
    kind = "busy"


class WeightsRefused(RolloutError, ValueError):
    kind = "weights_refused"


class WrongBase(WeightsRefused):
    kind = "wrong_base"


class SourceUnreachable(RolloutError):
    kind = "source_unreachable"


class StaleWeights(RolloutError):
    kind = "stale_weights"


class KeyRefused(RolloutError):
    kind = "key_refused"


class Forbidden(RolloutError):
    kind = "forbidden"


class GroupFailed(RolloutError):
    kind = "group_failed"


class ServiceLost(RolloutError, ConnectionError):
    kind = "service_lost"


class ServiceRestarted(ServiceLost):
    kind = "service_restarted"


class RequestTimeout(RolloutError, TimeoutError):
    kind = "request_timeout"


class ClientClosed(RolloutError):
    kind = "client_closed"


KINDS: dict[str, type[RolloutError]] = {
    error.kind: error
    for error in (
        RolloutError,
        ProtocolError,
        NotBelieved,
        VersionMismatch,
        NoSession,
        InvalidRequest,
        LimitExceeded,
        IdConflict,
        Busy,
        WeightsRefused,
        WrongBase,
        SourceUnreachable,
        StaleWeights,
        KeyRefused,
        Forbidden,
        GroupFailed,
        ServiceLost,
        ServiceRestarted,
        RequestTimeout,
        ClientClosed,
    )
}


def from_wire(kind: str, message: str, group_id: str | None = None) -> RolloutError:
    """Make the typed error of a `Refused`. A kind that this end does not know (a newer service) gives a plain RolloutError."""
    known = KINDS.get(kind)
    return known(message, group_id) if known else RolloutError(f"{kind}: {message}", group_id)
