"""A TCP proxy that breaks connections: between frames, in the middle of one, or by letting nothing through."""

from __future__ import annotations

import random
import socket
import threading
from types import TracebackType

from rollout.transport.keys.cookie import Cookie, cookie_file, read


class LentCookie:
    """The secret of a service, where clients look for that of a relay in front of it; nothing for one with keys."""

    def __init__(self, upstream: str, address: str) -> None:
        self._upstream, self._address = upstream, address
        self._cookie = Cookie()
        self._secret = ""
        self.follow()

    def follow(self) -> None:
        """Lend that of the service that is there now."""
        secret, _ = read(cookie_file(self._upstream))
        if secret not in ("", self._secret):
            self._secret = self._cookie._secret = secret
            self._cookie.publish(self._address)

    def close(self) -> None:
        self._cookie.close()


class Proxy:
    """Forwards `address` to `upstream` (tcp://127.0.0.1:PORT). `cut` closes every connection; with `cut_after` each new one
    breaks by itself after that many bytes of either direction."""

    def __init__(self, upstream: str, seed: int = 0) -> None:
        self._upstream = ("127.0.0.1", int(upstream.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        self.cut_after: tuple[int, int] | None = None
        self.mute = False
        """new connections end at once"""
        self.recorded = bytearray()
        """what went through, both ways"""
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._cookie = LentCookie(upstream, self.address)
        self._start(self._accept)

    def cut(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
            self.cuts += len(pairs)
        for pair in pairs:
            for end in pair:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # that side was quicker

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        self._cookie.close()

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                if self.mute:
                    raise ConnectionRefusedError
                service = socket.create_connection(self._upstream)
                self._cookie.follow()
            except OSError:
                client.close()
                continue
            with self._lock:
                self._pairs.append((client, service))
            left = [self._rng.randint(*self.cut_after)] if self.cut_after else [1 << 60]
            users = [2]
            self._start(self._pump, client, service, left, users)
            self._start(self._pump, service, client, left, users)

    def _pump(self, source: socket.socket, sink: socket.socket, left: list[int], users: list[int]) -> None:
        try:
            while data := source.recv(65536):
                self.recorded += data
                sink.sendall(data[: max(0, left[0])])
                left[0] -= len(data)
                if left[0] <= 0:
                    break
        except OSError:
            pass
        with self._lock:
            if left[0] <= 0 and any(source in pair for pair in self._pairs):
                self.cuts += 1
            self._pairs = [pair for pair in self._pairs if source not in pair]
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        with self._lock:
            users[0] -= 1
            last = not users[0]
        if last:
            source.close()
            sink.close()
