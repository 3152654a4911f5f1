"""The two key files: a service's, which lists its clients, and a client's connection file.

Both are JSON, hold a secret, and are refused if others than their owner can read them. Both say of which kind and version they
are, so that one is never taken for the other.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
import zmq

from rollout.transport import own_files

FILE_VERSION = 1
DEFAULT_FILE = "rollout-keys/service.json"
SERVICE_TAG, CLIENT_TAG = "rollout service keys", "rollout connection"

Role = Literal["rollout", "weights", "admin", "read", "replica"]
"""rollout: groups. weights: refreshes. admin: pause, drain, sleep, the end of all groups. read: status and metrics. replica:
joins a router, and receives what the router's clients send"""
ROLES: tuple[Role, ...] = get_args(Role)
Key = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z")]
"""32 bytes in Z85"""
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}\Z")]


class BadKeys(ValueError):
    """A key file or a name in it is invalid; the message says why, and how to fix it."""


class ClientKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client in the service's file."""

    name: Name
    public: Key
    roles: tuple[Role, ...]


class ServiceKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=SERVICE_TAG):
    """The service's file."""

    version: int
    address: str
    """of the service, for clients"""
    public: Key
    secret: Key
    clients: tuple[ClientKey, ...] = ()
    revoked: tuple[ClientKey, ...] = ()


class ClientKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=CLIENT_TAG):
    """A client's connection file."""

    version: int
    address: str
    server: Key
    """public key of the service"""
    name: Name
    public: Key
    secret: Key


def read_service(path: str | Path) -> ServiceKeys:
    """Read a service's file. Raises BadKeys."""
    keys = _read(Path(path))
    if not isinstance(keys, ServiceKeys):
        raise BadKeys(f"{path} is the connection file of a client: the service needs the file that `rollout keys init` made")
    return keys


def read_client(path: str | Path) -> ClientKeys:
    """Read a client's connection file. Raises BadKeys."""
    keys = _read(Path(path))
    if not isinstance(keys, ClientKeys):
        raise BadKeys(f"{path} is the service's own file: a client needs one that `rollout keys add NAME` made")
    return keys


def read_private(path: str | Path, what: str) -> bytes:
    """Read a file with a secret, at most 16 MiB. what: name of the file in messages. Raises BadKeys for a file that other users
    can read or own."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "rb") as file:
            about = os.fstat(file.fileno())
            data = file.read(1 << 24)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise BadKeys(f"{what} {path}: {getattr(error, 'strerror', None) or error}") from None
    if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadKeys(f"{what} {path}: others can read it (mode {about.st_mode & 0o777:o}); chmod 600 {path}")
    if about.st_uid not in (os.geteuid(), 0):
        raise BadKeys(f"{what} {path}: it belongs to user {about.st_uid}; it must belong to the user of this process")
    return data


def _read(path: Path) -> ServiceKeys | ClientKeys:
    data = read_private(path, "key file")
    try:
        found = msgspec.json.decode(data, type=dict[str, object]).get("version")
        if found != FILE_VERSION:
            raise BadKeys(f"key file {path} has version {found!r}: this rollout reads version {FILE_VERSION}")
        return msgspec.json.decode(data, type=ServiceKeys | ClientKeys)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadKeys(f"key file {path}: {error}") from None


def _write(path: Path, keys: ServiceKeys | ClientKeys, replace: bool) -> None:
    """Write a file atomically, readable only by its owner from the first byte on. replace: it is there, and was read as a key
    file; a link to it stays a link. Raises BadKeys."""
    path = Path(os.path.realpath(path)) if replace else path
    temporary = own_files.beside(path)
    try:
        held = own_files.open_new(temporary)
    except OSError as error:
        raise BadKeys(f"key file {path}: {error.strerror}") from None
    try:
        with open(held, "wb", closefd=False) as file:
            file.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")
            file.flush()
            os.fsync(held)
        if replace:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)  # fails if it exists
    except OSError as error:
        raise BadKeys(f"key file {path}: {error.strerror}") from None
    finally:
        own_files.remove_if_same(temporary, held)
        os.close(held)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder's key files against other commands that change them. Raises BadKeys."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise BadKeys(f"folder {folder} of the key file: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def create(path: Path, address: str, clients: tuple[ClientKey, ...] = ()) -> ServiceKeys:
    """Create a service's file. Raises BadKeys if it exists: its clients would lose their service."""
    public, secret = _pair()
    keys = ServiceKeys(FILE_VERSION, address, public, secret, clients)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(path, keys, replace=False)
    return keys


def add(path: Path, name: str, roles: tuple[Role, ...], out: Path, address: str = "") -> ClientKeys:
    """Create a client's key: the connection file at `out`, and its public half in the service's file. address: for this client;
    "" = the service's own. Raises BadKeys."""
    if not roles:
        raise BadKeys(f"{name}: give --role with at least one of {', '.join(ROLES)}")
    with _alone(path.parent):
        keys = read_service(path)
        if any(client.name == name for client in keys.clients):
            raise BadKeys(f"{name!r} has a key: revoke it first, or add another name")
        public, secret = _pair()
        try:
            client = msgspec.convert({"name": name, "public": public, "roles": sorted(set(roles), key=ROLES.index)}, ClientKey)
        except msgspec.ValidationError:
            raise BadKeys(f"name {name!r}: must be 1 to 64 of A-Z, a-z, 0-9, and after the first character . _ -") from None
        mine = ClientKeys(FILE_VERSION, address or keys.address, keys.public, name, public, secret)
        _write(out, mine, replace=False)
        _write(path, msgspec.structs.replace(keys, clients=(*keys.clients, client)), replace=True)
    return mine


def revoke(path: Path, name: str) -> None:
    """Revoke a client's key. A running service notices within a second. Raises BadKeys."""
    with _alone(path.parent):
        keys = read_service(path)
        gone = tuple(client for client in keys.clients if client.name == name)
        if not gone:
            raise BadKeys(f"no key of {name!r} in {path}; there are: {', '.join(c.name for c in keys.clients) or 'none'}")
        left = tuple(client for client in keys.clients if client.name != name)
        _write(path, msgspec.structs.replace(keys, clients=left, revoked=(*keys.revoked, *gone)), replace=True)


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()
