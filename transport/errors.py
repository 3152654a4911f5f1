"""All errors that a user of the service can meet.

RolloutError                    kind on the wire
├── ProtocolError               protocol_error      bytes that are not a message of this protocol
│   └── NotBelieved             not_believed        the other end sent an impossible value, e.g. an unrequested sample
├── VersionMismatch             version_mismatch    the two ends speak different protocol versions
├── NoSession                   no_session          the service does not know the session; the client sends Hello again
├── InvalidRequest  (ValueError)   invalid_request     a field has an invalid value
├── LimitExceeded   (ValueError)   limit_exceeded      a field exceeds one of `Limits`
├── IdConflict      (ValueError)   id_conflict         a live group has this id and other content
├── Busy                        busy                no capacity now; the same request may succeed later
├── WeightsRefused  (ValueError)   weights_refused     this refresh cannot be applied; the old weights stay live
│   └── WrongBase               wrong_base          it is a change of other weights than the live ones
├── SourceUnreachable           source_unreachable  the service cannot read the memory or folder that a refresh offers
├── StaleWeights                stale_weights       the service's weights are older than the client accepts, or others
├── KeyRefused                  key_refused         the service refuses this client: its key is unknown, wrong or revoked, or
│                                                   it lacks the secret of the address
├── Forbidden                   forbidden           the key has no role for this request
├── GroupFailed                 group_failed        the service failed while it served this request
├── ServiceLost  (ConnectionError) service_lost        the service is dead, unreachable, stopping or stalled
│   └── ServiceRestarted        service_restarted   the service was restarted without the open groups, or with other weights
│                                                   under the same version
├── RequestTimeout (TimeoutError)  request_timeout     the caller's timeout expired; the group is still live
└── ClientClosed                client_closed       the client was closed while the request was open
"""

from __future__ import annotations

from typing import ClassVar


def shown(text: str) -> str:
    """Escape unprintable characters of a peer's text for terminals and logs (control characters, escape sequences, marks of
    text direction) as Python does, e.g. \\x1b."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


KINDS: dict[str, type[RolloutError]] = {}
"""each class of error by its kind"""


class RolloutError(Exception):
    """Base of all errors of the service. `kind` is its stable name on the wire; `group_id` the group it concerns, if any."""

    kind: ClassVar[str] = "error"

    def __init_subclass__(cls) -> None:
        assert cls.kind not in KINDS, f"two errors of kind {cls.kind!r}"
        KINDS[cls.kind] = cls

    def __init__(self, message: str, group_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.group_id = group_id

    def __str__(self) -> str:
        """Return the escaped message; `message` is the original."""
        return shown(self.message if self.group_id is None else f"group {self.group_id!r}: {self.message}")


KINDS[RolloutError.kind] = RolloutError


def copy_of(error: RolloutError, group_id: str | None = None) -> RolloutError:
    """Copy an error for another caller, or to store it: a raised error refers to its stack frames, and these often to the place
    that stores it."""
    return type(error)(error.message, group_id)


class ProtocolError(RolloutError):
    kind = "protocol_error"


class NotBelieved(ProtocolError):
    """Raised where the message arrives; services do not send it."""

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


def from_wire(kind: str, message: str, group_id: str | None = None) -> RolloutError:
    """Return the typed error of a `Refused`. An unknown kind, of a newer service, gives a plain RolloutError."""
    known = KINDS.get(kind)
    return known(message, group_id) if known else RolloutError(f"{kind}: {message}", group_id)
