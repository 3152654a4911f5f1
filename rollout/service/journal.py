"""The journal: open groups with their seeds and unacknowledged samples in an SQLite file, so that they survive a restart.

    one iteration of the loop: opened, accepted, ended, acked, dropped, … → one transaction, before its samples are sent

The file uses a write-ahead log (WAL). It holds everything that clients know of, so a service that starts with the file of a
killed one continues from there. A group without a seed gets one when it is accepted, so that a child that runs again gives the
same sample. The journal also stores the newest version of the weights that was live, and its digest: versions continue from
there, and groups do not continue under a version that means other weights by now.

`synchronous=NORMAL`: a commit writes to the log without fsync, in some 50 µs. It survives the end of the process, even by
SIGKILL, because the page cache belongs to the kernel. If the machine crashes, the last commits may be lost, but the file is
consistent, and clients that survive submit the missing groups again. FULL would make the loop wait for an fsync in each
iteration, for the one case in which a trainer on the same machine crashed as well. A thread of the journal does the remaining
fsyncs, which checkpoint the log.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from rollout.config import InputError
from rollout.engine.values import FinishReason, Served
from rollout.logs import logger
from rollout.private_files import check_if_there, open_private
from rollout.service.persistence import Persistence, SessionIdentity
from rollout.transport.errors import RolloutError
from rollout.transport.frames import Frame

FILE_VERSION = 3
SQLITE_FILES = ("-wal", "-shm", "-journal")
"""endings of the files that SQLite makes beside a database, with its mode"""

TABLES = """
CREATE TABLE meta(name TEXT PRIMARY KEY, value);
CREATE TABLE sessions(key TEXT, id TEXT, name TEXT, number INTEGER, PRIMARY KEY(key, id));
CREATE TABLE groups(engine_id TEXT PRIMARY KEY, key TEXT, session TEXT, submit BLOB, seed INTEGER, version INTEGER,
 digest TEXT, at REAL);
CREATE TABLE samples(engine_id TEXT, child INTEGER, reason TEXT, frames BLOB, PRIMARY KEY(engine_id, child)) WITHOUT ROWID;
CREATE INDEX groups_of ON groups(key, session);
"""
BANS = "CREATE TABLE IF NOT EXISTS bans(owner TEXT PRIMARY KEY, name TEXT, why TEXT, at REAL)"
"""not in `TABLES`: files of this version that were written before have no such table"""

GROUPS = "SELECT engine_id, key, session, submit, seed, version, digest, at FROM groups ORDER BY rowid"
WAY_OUT = (
    "move the file away to start without it: clients of open groups get service_restarted, and those with resubmit=True submit "
    "them again"
)

log = logger(__name__)


class Meta(msgspec.Struct, frozen=True):
    """The rows of the table `meta`."""

    version: int
    model: str
    incarnation: str
    weights: int
    digest: str
    starts: int
    computes: str = "{}"
    """JSON: how the service computes, by the names of Welcome; {}: unknown, of a file that was written before there was this"""


class GroupRow(NamedTuple):
    engine_id: str
    key: str
    session: str
    submit: bytes
    seed: int | None
    version: int
    digest: str
    at: float


class SampleRow(NamedTuple):
    child: int
    reason: FinishReason
    frames: bytes | None


class BanRow(NamedTuple):
    """An owner whose replicas a router refuses, as `rollout.fleet.owners.Ban`."""

    owner: str
    name: str
    why: str
    at: float


class JournaledGroup(NamedTuple):
    key: str
    session: str
    engine_id: str
    submit: list[Frame]
    seed: int | None
    live: Served
    """the live weights when it was accepted"""
    age_s: float
    """seconds since it was accepted, including the time without a service"""
    ended: dict[int, tuple[FinishReason, list[Frame] | None]]
    """finished children by index: the reason, and the frames of SamplesDone, None if it was acknowledged"""


class Journal(Persistence):
    """The journal of one service, which holds a lock on it.

    Args:
        path: the SQLite file, created if it does not exist.
        model: name of the served model.
        checkpoint_s: seconds between two checkpoints of the log.
        clock: seconds since 1970, for the age of groups.

    Raises InputError for a file that is no journal, is damaged, has another version or model, or is in use, or is not this
    user's alone."""

    lasting = True

    def __init__(self, path: str, model: str, checkpoint_s: float = 1.0, clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._path = path
        self._checkpoint_s = checkpoint_s
        self._clock = clock
        self._writes: list[tuple[str, tuple[Any, ...]]] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock: int | None = _locked(path)
        try:
            os.close(open_private(path, "journal"))  # prompts are private to this user
            for beside in SQLITE_FILES:
                check_if_there(path + beside, "journal")
            self._db = _connect(path)
            self._open(model)
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise InputError(f"journal {path}: {error}") from None
        except InputError:
            self.close()
            raise
        self._thread = threading.Thread(target=self._checkpoint, name="rollout-journal", daemon=True)
        self._thread.start()

    def _open(self, model: str) -> None:
        db = self._db
        if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            db.executescript(f"BEGIN; {TABLES} COMMIT;")
            new = Meta(FILE_VERSION, model, secrets.token_hex(8), 0, "", 0)
            db.executemany("INSERT INTO meta VALUES(?, ?)", msgspec.structs.asdict(new).items())
        rows = dict(db.execute("SELECT name, value FROM meta"))
        if rows.get("version") != FILE_VERSION:
            raise InputError(
                f"journal {self._path} has version {rows.get('version')}: this rollout writes {FILE_VERSION}; {WAY_OUT}"
            )
        with self.reading("table meta"):
            meta = msgspec.convert(rows, Meta)
        if meta.model != model:
            raise InputError(f"journal {self._path} is for the model {meta.model}, the service has {model}: name another file")
        self.incarnation = meta.incarnation
        self.starts = meta.starts + 1
        self._computes = meta.computes
        self.weights = Served(meta.weights, meta.digest)
        """the newest weights that were live"""
        db.execute("UPDATE meta SET value = ? WHERE name = 'starts'", (self.starts,))
        db.execute(BANS)

    def continued_by(self, computes: dict[str, str | int]) -> None:
        """Note how the service computes, by the names of Welcome. Raises InputError if groups are open that began otherwise:
        some of their samples would be of another function than the others."""
        before = msgspec.json.decode(self._computes, type=dict[str, str | int])
        other = next((name for name, value in computes.items() if before.get(name, value) != value), None)
        if other is not None and self._db.execute("SELECT count(*) FROM groups").fetchone()[0]:
            raise InputError(
                f"journal {self._path} has groups of a service with {other} {before[other]}, this one has {computes[other]}: "
                f"start it as before, or {WAY_OUT}"
            )
        text = msgspec.json.encode(computes).decode()
        self._db.execute("INSERT OR REPLACE INTO meta VALUES('computes', ?)", (text,))

    # write

    def opened(self, session: SessionIdentity) -> None:
        self._writes.append(("INSERT OR REPLACE INTO sessions VALUES(?, ?, ?, ?)", tuple(session)))

    def closed(self, key: str, session: str) -> None:
        whose = "(SELECT engine_id FROM groups WHERE key = ? AND session = ?)"
        self._writes.append((f"DELETE FROM samples WHERE engine_id IN {whose}", (key, session)))
        self._writes.append(("DELETE FROM groups WHERE key = ? AND session = ?", (key, session)))
        self._writes.append(("DELETE FROM sessions WHERE key = ? AND id = ?", (key, session)))

    def accepted(self, key: str, session: str, engine_id: str, submit: Sequence[Frame], seed: int | None, live: Served) -> None:
        row = engine_id, key, session, _packed(submit), seed, *live, self._clock()
        self._writes.append(("INSERT INTO groups VALUES(?, ?, ?, ?, ?, ?, ?, ?)", row))

    def ended(self, engine_id: str, index: int, reason: FinishReason, sample: Sequence[Frame]) -> None:
        self._writes.append(("INSERT OR REPLACE INTO samples VALUES(?, ?, ?, ?)", (engine_id, index, reason, _packed(sample))))

    def acked(self, engine_id: str, index: int) -> None:
        self._writes.append(("UPDATE samples SET frames = NULL WHERE engine_id = ? AND child = ?", (engine_id, index)))

    def dropped(self, engine_id: str) -> None:
        self._writes.append(("DELETE FROM samples WHERE engine_id = ?", (engine_id,)))
        self._writes.append(("DELETE FROM groups WHERE engine_id = ?", (engine_id,)))

    def banned(self, ban: BanRow) -> None:
        """Store an owner whose replicas a router refuses."""
        self._writes.append(("INSERT OR REPLACE INTO bans VALUES(?, ?, ?, ?)", ban))

    def served(self, live: Served) -> None:
        if self._newest(live):
            self.commit(live)

    def commit(self, live: Served) -> None:
        """Write everything since the last commit, atomically. Raises sqlite3.Error: a service that cannot write must stop."""
        if self._newest(live):
            self.weights = live
            self._writes.append(("UPDATE meta SET value = ? WHERE name = 'weights'", (live.version,)))
            self._writes.append(("UPDATE meta SET value = ? WHERE name = 'digest'", (live.digest,)))
        if not self._writes:
            return
        writes, self._writes = self._writes, []
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for statement, values in writes:
                self._db.execute(statement, values)
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _newest(self, live: Served) -> bool:
        """Whether these weights are newer than the stored ones. The weights of a restarted service, which it read from the
        model's folder, are not: versions continue from the newest."""
        return live != self.weights and live.version >= self.weights.version

    # read after a restart

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Turn errors while reading a part of the file into an InputError that names it."""
        try:
            yield
        except (msgspec.MsgspecError, sqlite3.Error, RolloutError, ValueError) as error:
            why = error.message if isinstance(error, RolloutError) else str(error)
            raise InputError(f"journal {self._path}: {what} is damaged ({why}): {WAY_OUT}") from None

    def sessions(self) -> Iterator[SessionIdentity]:
        """Yield the open sessions, ordered by number. Raises InputError."""
        with self.reading("table sessions"):
            rows = self._db.execute("SELECT key, id, name, number FROM sessions ORDER BY number").fetchall()
        for row in rows:
            with self.reading(f"table sessions, row {row[:2]}"):
                session = msgspec.convert(row, SessionIdentity)
            yield session

    def bans(self) -> list[BanRow]:
        """Return the owners that are banned. Raises InputError."""
        with self.reading("table bans"):
            rows = self._db.execute("SELECT owner, name, why, at FROM bans ORDER BY at").fetchall()
            return msgspec.convert(rows, list[BanRow])

    def groups(self) -> Iterator[JournaledGroup]:
        """Yield the groups of these sessions, ordered by acceptance. Raises InputError."""
        with self.reading("table groups"):
            rows = self._db.execute(GROUPS).fetchall()
        for row in rows:
            with self.reading(f"table groups, row {row[0]!r}"):
                group = msgspec.convert(row, GroupRow)
                submit = _unpacked(group.submit)
            ended = self._ended(group.engine_id)
            live, age_s = Served(group.version, group.digest), max(0.0, self._clock() - group.at)
            yield JournaledGroup(group.key, group.session, group.engine_id, submit, group.seed, live, age_s, ended)

    def _ended(self, engine_id: str) -> dict[int, tuple[FinishReason, list[Frame] | None]]:
        """Read the finished children of a group."""
        query = "SELECT child, reason, frames FROM samples WHERE engine_id = ?"
        ended: dict[int, tuple[FinishReason, list[Frame] | None]] = {}
        with self.reading(f"table samples, group {engine_id!r}"):
            for row in self._db.execute(query, (engine_id,)).fetchall():
                sample = msgspec.convert(row, SampleRow)
                ended[sample.child] = sample.reason, None if sample.frames is None else _unpacked(sample.frames)
        return ended

    def close(self, live: Served | None = None) -> None:
        if live is not None and not self._closed.is_set():
            try:
                self.commit(live)
            except sqlite3.Error as error:  # probably the reason why the service ended
                log.error("journal not written path=%s reason=%s", self._path, error)
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if hasattr(self, "_db"):
            self._db.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _checkpoint(self) -> None:
        """Checkpoint the log regularly until the journal is closed, in a thread, so that the loop does not wait. Failed
        connections and checkpoints are repeated."""
        db: sqlite3.Connection | None = None
        while not self._closed.wait(self._checkpoint_s):
            try:
                db = db or _connect(self._path)
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            except sqlite3.Error as error:
                log.warning("journal checkpoint failed path=%s reason=%s", self._path, error)
        if db is not None:
            db.close()


def _connect(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "wal_autocheckpoint=0"):
        db.execute(f"PRAGMA {pragma}").fetchall()
    return db


def _locked(path: str) -> int:
    """Lock the journal until this process ends. The lock is on a second file, because a process that closes any descriptor of a
    file loses SQLite's locks on that file. Raises InputError."""
    try:
        descriptor = open_private(f"{path}.lock", "journal")
    except OSError as error:
        raise InputError(f"journal {path}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise InputError(f"journal {path}: another service uses it; end that one, or name another file") from None
    return descriptor


def _packed(frames: Sequence[Frame]) -> bytes:
    return msgspec.msgpack.encode([bytes(frame) for frame in frames])


def _unpacked(data: bytes) -> list[Frame]:
    return list(msgspec.msgpack.decode(data, type=list[bytes]))
