"""All errors that clients of the service raise, one class per kind.

RolloutError                       kind on the wire
├── ProtocolError                  protocol_error
│   └── NotBelieved                not_believed
├── VersionMismatch                version_mismatch
├── NoSession                      no_session
├── InvalidRequest (ValueError)    invalid_request
├── LimitExceeded (ValueError)     limit_exceeded
├── IdConflict (ValueError)        id_conflict
├── Busy                           busy
├── WeightsRefused (ValueError)    weights_refused
│   └── WrongBase                  wrong_base
├── SourceUnreachable              source_unreachable
├── StaleWeights                   stale_weights
├── KeyRefused                     key_refused
├── Forbidden                      forbidden
├── GroupFailed                    group_failed
├── ServiceLost (ConnectionError)  service_lost
│   └── ServiceRestarted           service_restarted
├── NoTokenizer                    no_tokenizer
├── RequestTimeout (TimeoutError)  request_timeout
└── ClientClosed                   client_closed
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
    """Bytes are not a message of this protocol."""

    kind = "protocol_error"


class NotBelieved(ProtocolError):
    """The other end sent an impossible value, e.g. an unrequested sample. Raised where the message arrives; services do not
    send it."""

    kind = "not_believed"


class VersionMismatch(RolloutError):
    """The two ends speak different protocol versions."""

    kind = "version_mismatch"


class NoSession(RolloutError):
    """The service does not know the session; the client sends Hello again."""

    kind = "no_session"


class InvalidRequest(RolloutError, ValueError):
    """A field has a value that is not accepted; the message names the field."""

    kind = "invalid_request"


class LimitExceeded(RolloutError, ValueError):
    """A field exceeds one of `Limits`; the message names it."""

    kind = "limit_exceeded"


class IdConflict(RolloutError, ValueError):
    """A live group of this client has this id and other content."""

    kind = "id_conflict"


class Busy(RolloutError):
    """The service has no capacity now, or another refresh is staged; the same request may succeed later."""

    kind = "busy"


class WeightsRefused(RolloutError, ValueError):
    """A refresh cannot be applied; the message names the tensor, and the old weights stay live."""

    kind = "weights_refused"


class WrongBase(WeightsRefused):
    """A refresh is a change of other weights than the live ones."""

    kind = "wrong_base"


class SourceUnreachable(RolloutError):
    """The service cannot read the memory or folder that a refresh offers."""

    kind = "source_unreachable"


class StaleWeights(RolloutError):
    """The service's weights are older than `require_version`, or others with that version."""

    kind = "stale_weights"


class KeyRefused(RolloutError):
    """The service refuses this client: its key is unknown, wrong or revoked, or it lacks the secret of the address."""

    kind = "key_refused"


class Forbidden(RolloutError):
    """The key has no role for this request."""

    kind = "forbidden"


class GroupFailed(RolloutError):
    """The service failed while it served this request; the group has ended."""

    kind = "group_failed"


class ServiceLost(RolloutError, ConnectionError):
    """The service is dead, unreachable, stopping or stalled."""

    kind = "service_lost"


class ServiceRestarted(ServiceLost):
    """The service was restarted without the open groups, or with other weights under the same version."""

    kind = "service_restarted"


class NoTokenizer(RolloutError):
    """A prompt is text, or a sample's text is wanted, and the client has no tokenizer. Services do not send it."""

    kind = "no_tokenizer"


class RequestTimeout(RolloutError, TimeoutError):
    """The caller's timeout expired; the group is still live."""

    kind = "request_timeout"


class ClientClosed(RolloutError):
    """The client was closed while the request was open."""

    kind = "client_closed"


def from_wire(kind: str, message: str, group_id: str | None = None) -> RolloutError:
    """Return the typed error of a `Refused`. An unknown kind, of a newer service, gives a plain RolloutError."""
    known = KINDS.get(kind)
    return known(message, group_id) if known else RolloutError(f"{kind}: {message}", group_id)
