"""Bounds the received bytes that wait at the service, which libzmq cannot: per connection and in total.

    waiting = bytes that the kernel has received on a connection - bytes that the service has taken from it

Without a receive mark (`rollout.transport.sockets` says why there is none) libzmq reads everything that arrives while the
service computes, and a mark would count complete messages only, so one endless message would grow for ever. The kernel counts
the bytes of a TCP connection (tcpi_bytes_received, Linux 4.1). A thread checks them every TICK_MS and shuts down a connection
over its bound; libzmq then frees its incomplete message.

Messages of an ended connection stay in libzmq until they are taken, and the kernel gives its descriptor's number to the next
connection. So the bytes that were taken are counted by the peer that libzmq names in each message, which is another one for
each connection; while ended connections have left too much behind, no new one is let in (`is_full`).

The thread needs the interpreter lock for some microseconds per tick; while another thread holds it, only the network bounds the
bytes. Bytes on the wire are counted, not memory: libzmq uses 64 bytes for each frame, however short.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

WAITING_BYTES = 16 << 20
"""of one connection, besides one message of maximum size"""
TOTAL_BYTES = 256 << 20
"""of all connections, ended ones included"""
SMALL_BYTES = 1 << 16
"""a connection with less is never shut down because of the total"""
TICK_MS = 20
UNCOUNTED_BYTES, UNCOUNTED_BYTES_PER_S = 4096, 64
"""of ZMTP's handshake and pings, which libzmq consumes itself"""
TCP_INFO_BYTES_RECEIVED = 128
"""offset of the u64 in struct tcp_info"""
FRAME_OVERHEAD = {True: 9, False: 2}
"""ZMTP's flags and length before a frame, by whether it is longer than 255 bytes"""

log = logging.getLogger(__name__)


class ReceiveQueue:
    """One accepted connection. It has its own descriptor: libzmq may close its one, and the number may be reused."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket_of(os.dup(descriptor))
        self.since = time.monotonic()
        self.peer: bytes | None = None
        """of its messages; None: none has been taken"""
        self.taken = 0
        self.left = 0
        """bytes that waited when it ended, less those that the service has taken since"""
        self.cut = False
        self.over = False
        """libzmq has ended it"""

    def waits(self) -> int:
        """Count the received bytes that still wait in the socket. Raises OSError."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES_RECEIVED + 8)
        received = int.from_bytes(info[TCP_INFO_BYTES_RECEIVED : TCP_INFO_BYTES_RECEIVED + 8], sys.byteorder)
        age = time.monotonic() - self.since
        return max(0, received - self.taken - UNCOUNTED_BYTES - int(age * UNCOUNTED_BYTES_PER_S))

    def shut(self) -> None:
        """Shut the connection down and reset it: otherwise a blocked peer would wait for minutes."""
        self.cut = True
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already


def socket_of(descriptor: int) -> socket.socket:
    """Wrap a descriptor in a socket; close it if it is not a socket. Raises OSError."""
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise


class Inflow:
    """Watches the connections of a bound TCP socket. `taken` and `drained` are for the receiving thread.

    Args:
        sock: bound to a TCP address.
        message_bytes: maximum size of a message.
        waiting_bytes, total_bytes: bounds of one connection and of all."""

    def __init__(
        self,
        sock: zmq.Socket[bytes],
        message_bytes: int,
        waiting_bytes: int = WAITING_BYTES,
        total_bytes: int = TOTAL_BYTES,
    ) -> None:
        self.expected = 0
        """further bytes that a connection may send ahead; written by the receiving thread"""
        self._bound, self._total_bound = waiting_bytes + message_bytes, total_bytes
        self._sock = sock
        self._connections: dict[int, ReceiveQueue] = {}
        """by number of libzmq's descriptor; of the watching thread"""
        self._early: dict[int, int] = {}
        """bytes taken from connections that the watching thread does not know yet"""
        self._ended_queues: dict[int, list[ReceiveQueue]] = {}
        """connections that have left bytes behind, oldest first, by number of libzmq's descriptor"""
        self._lock = threading.Lock()
        self._closed = False
        address = f"inproc://inflow-{id(self)}"
        sock.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor = sock.context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # libzmq's I/O thread would wait for us
        self._monitor.connect(address)
        self._poller = zmq.Poller()  # kept: the socket's own `poll` makes one each time
        self._poller.register(self._monitor, zmq.POLLIN)
        self._thread = threading.Thread(target=self._watch, name="rollout-inflow", daemon=True)
        self._thread.start()

    def taken(self, descriptor: int, peer: bytes, size: int) -> None:
        """Note that the service has taken a message of `size` bytes. peer: by which libzmq names its connection."""
        with self._lock:
            ended, live = self._ended_queues.get(descriptor, []), self._connections.get(descriptor)
            queues = ended if live is None else [*ended, live]
            queue = next((each for each in queues if each.peer == peer), None)
            queue = queue or next((each for each in queues if each.peer is None), None)
            if queue is None:
                self._early[descriptor] = self._early.get(descriptor, 0) + size
                return
            queue.peer = peer
            queue.taken += size
            if queue is not live:
                queue.left = max(0, queue.left - size)
                if not queue.left:
                    ended.remove(queue)

    @property
    def is_full(self) -> bool:
        """Return whether ended connections alone have left as much behind as may wait. For any thread."""
        return self._left() > self._total_bound + self.expected

    def _left(self) -> int:
        return sum(queue.left for queues in list(self._ended_queues.values()) for queue in queues)

    def connection(self, descriptor: int) -> ReceiveQueue | None:
        """Find the connection of libzmq's descriptor. For any thread."""
        with self._lock:
            return self._connections.get(descriptor)

    def drained(self) -> None:
        """Note that no complete message waits: nothing of ended connections is left."""
        with self._lock:
            self._ended_queues.clear()

    def close(self) -> None:
        """End the watch, before the socket is closed. May be repeated."""
        if self._closed:
            return
        self._closed = True
        self._thread.join()
        self._sock.disable_monitor()
        self._monitor.close(linger=0)
        for connection in self._connections.values():
            connection.socket.close()
        self._connections.clear()

    def _watch(self) -> None:
        while not self._closed:
            if self._poller.poll(TICK_MS):
                event = recv_monitor_message(self._monitor)
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._accepted(int(event["value"]))
                elif event["event"] == zmq.EVENT_DISCONNECTED:
                    self._ended(int(event["value"]))
            else:
                self._enforce()

    def _accepted(self, descriptor: int) -> None:
        try:
            connection = ReceiveQueue(descriptor)
        except OSError:
            return  # it has ended, or its number was reused
        try:
            waits = connection.waits()
        except OSError:
            connection.socket.close()
            return
        with self._lock:
            connection.taken = min(self._early.pop(descriptor, 0), waits)
            self._connections[descriptor] = connection

    def _ended(self, descriptor: int) -> None:
        with self._lock:
            connection = self._connections.pop(descriptor, None)
            if connection is not None:
                connection.over = True
                connection.left = connection.waits()
                if connection.left:
                    self._ended_queues.setdefault(descriptor, []).append(connection)
        if connection is not None:
            connection.socket.close()

    def _enforce(self) -> None:
        waits = {connection: connection.waits() for connection in self._connections.values() if not connection.cut}
        over = [connection for connection, size in waits.items() if size > self._bound + self.expected]
        total = self._left() + sum(waits.values())
        largest = sorted((connection for connection in waits if waits[connection] > SMALL_BYTES), key=waits.__getitem__)
        while total > self._total_bound + self.expected and largest:
            total -= waits[largest[-1]]
            over.append(largest.pop())
        for connection in over:
            if not connection.cut:
                log.warning(
                    "connection ended waiting_bytes=%d allowed_bytes=%d", waits[connection], self._bound + self.expected
                )
                connection.shut()
