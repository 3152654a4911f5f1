"""The secret of an address without keys, in a file that only its user can read: the service writes it, clients read it.

    service: bind ──→ Cookie.publish ──→ the file, mode 0600 ──→ ClientCookie.show ──→ PLAIN ──→ KeyAuthenticator

Every process that can read the files of the service's user is accepted. Web pages in that user's browser, other users and
programs of other protocols are not: libzmq requires the handshake of ZMTP 3 before it reads a message.

A secret is valid as long as its service runs. A refused client reads the file again and sends the new secret, so a program that
listens at the address between two services learns only an old one.

A service locks its file. A secret without a lock belongs to a service that was killed; the next service removes it. The folder
may hold other files: only a file of this user whose name and content are those of a secret is ever removed or replaced.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import zmq

from rollout.transport import own_files
from rollout.transport.keys.authenticator import DOMAIN
from rollout.transport.keys.files import BadKeys

FOLDER_VARIABLE = "ROLLOUT_COOKIES"
USER = b"rollout"
NOTHING = "-"
"""sent by a client that found no secret: libzmq accepts no empty one"""
SECRET = re.compile(rb"[0-9a-f]{64}")
NAME = re.compile(r"[^/]*:[0-9]+-(0|[0-9a-f]{16})")
"""of a file in `folder`: host, port and loopback, see `cookie_file`"""

log = logging.getLogger(__name__)


def folder() -> Path:
    """Return the folder for tcp:// addresses. Raises BadKeys for a user without a home."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "rollout" / "cookies"
    except RuntimeError as error:
        raise BadKeys(f"{error}: set {FOLDER_VARIABLE} to a folder for secrets of this user's services") from None


def cookie_file(address: str) -> Path:
    """Return the file with the secret of an address: beside the socket of ipc://PATH; for tcp:// in `folder`, with the
    loopback in its name, since hosts may share a home. Raises BadKeys."""
    _, _, rest = address.partition("://")
    if _beside(address):
        return Path(os.path.abspath(f"{rest}.cookie"))
    host, colon, port = rest.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    with suppress(ValueError):
        host, port = str(ipaddress.ip_address(host)), str(int(port))
    return folder() / f"{quote(host + colon + port, safe='.:')}-{_loopback()}"


def _beside(address: str) -> bool:
    """Return whether the file is beside a socket, in a folder of the user; an abstract socket (ipc://@NAME) has none."""
    return address.startswith("ipc://") and not address.startswith("ipc://@")


def _loopback() -> str:
    """Identify the loopback of this process: by the boot of its kernel and its network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return "0"
    return hashlib.blake2b(f"{boot}:{namespace}".encode(), digest_size=8).hexdigest()


# the service's end


def require(sock: zmq.Socket[bytes]) -> None:
    """Accept only connections that the authenticator of this context accepts; without one, none."""
    sock.setsockopt(zmq.PLAIN_SERVER, 1)
    sock.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


class Cookie:
    """The secret of a service. After `publish`, `reload` and `check` are for the authenticator's thread."""

    refusal_reason = "without the secret of this address"

    def __init__(self) -> None:
        self._secret = secrets.token_hex(32)
        self._path: Path | None = None
        self._held = -1
        """descriptor of the file, with the lock"""
        self._makes_folder = False
        self._trouble = ""

    def publish(self, endpoint: str) -> None:
        """Write the file of a bound endpoint; from then on connections are accepted. Raises BadKeys."""
        path = cookie_file(endpoint)
        self._makes_folder = not _beside(endpoint)
        try:
            self._write(path)
            self._path = path
            if self._makes_folder:
                if _not_alone(os.stat(path.parent)):
                    raise BadKeys(f"folder {path.parent} of secrets: others can use it; chmod 700, or set {FOLDER_VARIABLE}")
                remove_dead(path.parent)
        except OSError as error:
            raise BadKeys(
                f"cannot write the secret of {endpoint} to {path} ({error.strerror}): set {FOLDER_VARIABLE} to a folder that "
                "clients of this user see as well, or give keys (docs/security.md)"
            ) from None

    def reload(self) -> None:
        """Write the file again if it was removed. Another file that has its name now stays."""
        if self._path is None or own_files.is_same(self._path, self._held):
            return
        try:
            if own_files.is_there(self._path):
                raise BadKeys("something else has its name: move that away, and the file is written again")
            self._write(self._path)
            log.warning("the file with the secret was gone, written again path=%s", self._path)
            self._trouble = ""
        except (OSError, BadKeys) as error:
            trouble = getattr(error, "strerror", "") or str(error)
            if trouble != self._trouble:  # once, however often it is tried again
                log.error("the file with the secret is gone, new clients are refused path=%s reason=%s", self._path, trouble)
            self._trouble = trouble

    def check(self, mechanism: bytes, credentials: list[bytes]) -> tuple[bytes, bytes, bytes]:
        """Return status, text and user of the ZAP answer."""
        if self._path is None:
            return b"300", b"not yet", b""
        known = mechanism == b"PLAIN" and len(credentials) == 2 and hmac.compare_digest(credentials[1], self._secret.encode())
        return (b"200", b"OK", USER) if known else (b"400", b"not the secret", b"")

    def close(self) -> None:
        """Remove the file, unless it is another service's by now. May be repeated."""
        if self._path is not None:
            own_files.remove_if_same(self._path, self._held)
            os.close(self._held)
            self._path = None

    def _write(self, path: Path) -> None:
        """Write the file atomically, locked, readable only by its owner from the first byte on. Raises OSError, BadKeys where
        something else has its name."""
        if self._makes_folder:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if own_files.is_there(path) and not own_files.is_own(path, SECRET):
            raise BadKeys(
                f"{path} is to hold the secret of this address, and is something else, which stays: move it, or name another "
                f"address, or set {FOLDER_VARIABLE}"
            )
        temporary = own_files.beside(path)
        held = own_files.open_new(temporary)
        try:
            with suppress(OSError):  # a file system without locks: a file that was removed as dead is written again
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(held, self._secret.encode())
            os.replace(temporary, path)
        except OSError:
            own_files.remove_if_same(temporary, held)
            os.close(held)
            raise
        if self._held >= 0:
            os.close(self._held)
        self._held = held


def remove_dead(where: Path) -> None:
    """Remove the secrets of services that were killed: they have no lock. Every other file stays."""
    for path in where.iterdir():
        if not NAME.fullmatch(path.name):
            continue
        try:
            found = own_files.open_own(path)
        except OSError:
            continue
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if own_files.holds(found, SECRET) and not _not_alone(os.fstat(found)):
                own_files.remove_if_same(path, found)
        except OSError:
            pass  # its service lives
        finally:
            os.close(found)


def _not_alone(about: os.stat_result) -> bool:
    """Return whether other users own a file or may use it."""
    return about.st_uid != os.geteuid() or bool(about.st_mode & (stat.S_IRWXG | stat.S_IRWXO))


# the client's end


class ClientCookie:
    """The secret that a client sends to an address without keys. Raises BadKeys."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._path = cookie_file(address)
        self._shown = ""
        self._why = ""
        self._refused = 0
        """refusals since this secret was first sent, or accepted"""

    def show(self, sock: zmq.Socket[bytes]) -> None:
        """Make the next connection of a socket send the secret that is in the file now."""
        before = self._shown
        self._shown, self._why = read(self._path)
        if self._shown != before:
            self._refused = 0
        sock.setsockopt(zmq.PLAIN_USERNAME, USER)
        sock.setsockopt(zmq.PLAIN_PASSWORD, (self._shown or NOTHING).encode())

    def accepted(self) -> None:
        """Note that the service has accepted this client."""
        self._refused = 0

    def refused(self) -> bool:
        """Note a refusal. Returns whether it is final: libzmq reports refusals late, so the first one may concern an older
        secret."""
        self._refused += not self.is_old
        return self._refused > 1

    @property
    def is_old(self) -> bool:
        """Return whether the file has another secret than was sent."""
        return read(self._path)[0] not in ("", self._shown)

    @property
    def refusal(self) -> str:
        """Say why the service refuses the secret, and how to fix it."""
        why = self._why or "that is not its secret"
        return (
            f"{self._address} accepts only clients with its secret, looked for in {self._path}: {why}. The service runs as "
            f"another user, in a container or with another home: give both ends one {FOLDER_VARIABLE} of one user, or give the "
            "service keys and its clients connection files (`rollout keys`, docs/security.md)"
        )


def read(path: Path) -> tuple[str, str]:
    """Read a secret. Returns it and "", or "" and why it cannot be used."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            about = os.fstat(file.fileno())
            data = file.read(1000)
    except FileNotFoundError:
        return "", "there is no such file"
    except OSError as error:
        return "", f"it cannot be read: {error.strerror}"
    if _not_alone(about):
        return "", f"it is not this user's alone (user {about.st_uid}, mode {about.st_mode & 0o777:o})"
    return (data.decode(), "") if SECRET.fullmatch(data) else ("", "it holds no secret")
