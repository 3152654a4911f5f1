"""What waits at the service to be received: a bound in bytes, for each connection and for all.

    waits = bytes that the kernel has received on a connection - bytes that the service has taken from it

libzmq has no such bound: without a receive mark (`transport.sockets` says why there is none) it takes in whatever comes while
the service computes, and the mark counts whole messages only, so that one message without an end would grow for ever. The
kernel counts the bytes of a TCP connection (tcpi_bytes_received, Linux 4.1). A thread looks at them every TICK_MS; a connection
over its bound is shut down, which libzmq sees as its end: what is incomplete of it is freed.

The thread needs the interpreter lock for some microseconds a tick: as long as something holds the lock, nothing is bounded but
by the network. Bytes on the wire are counted, not memory: libzmq keeps 64 bytes for each frame, however short.
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
"""that may wait of one connection, besides one message of the longest frames"""
TOTAL_BYTES = 256 << 20
"""that may wait of all connections, those that have ended included"""
SMALL_BYTES = 1 << 16
"""a connection with less than this is never ended for what others send"""
TICK_MS = 20
UNCOUNTED_BYTES, UNCOUNTED_BYTES_PER_S = 4096, 64
"""ZMTP's handshake and pings, which libzmq takes itself"""
TCP_INFO_BYTES_RECEIVED = 128
"""offset of the u64 in struct tcp_info"""
FRAME_OVERHEAD = {True: 9, False: 2}
"""ZMTP's flags and length before a frame, by whether it is longer than 255 bytes"""

log = logging.getLogger("rollout.transport.inflow")


class ReceiveQueue:
    """One accepted connection, held by a descriptor of its own: libzmq's may be closed, and its number given to another."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket_of(os.dup(descriptor))
        self.since = time.monotonic()
        self.taken = 0
        self.cut = False
        self.over = False
        """libzmq has ended it"""

    def waits(self) -> int:
        """Count the bytes that have come and were not taken. Raises OSError."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES_RECEIVED + 8)
        received = int.from_bytes(info[TCP_INFO_BYTES_RECEIVED : TCP_INFO_BYTES_RECEIVED + 8], sys.byteorder)
        age = time.monotonic() - self.since
        return max(0, received - self.taken - UNCOUNTED_BYTES - int(age * UNCOUNTED_BYTES_PER_S))

    def shut(self) -> None:
        """Shut the connection down: libzmq reads its end and closes it. It is reset then: a peer that waits for room to send
        would wait for minutes otherwise."""
        self.cut = True
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already


def socket_of(descriptor: int) -> socket.socket:
    """Make a descriptor a socket's own, and close it if it is none. Raises OSError."""
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise


class Inflow:
    """Watches the connections of a bound TCP socket. `taken` and `emptied` are for the thread that receives."""

    def __init__(self, sock: zmq.Socket[bytes], message_bytes: int) -> None:
        self.expected = 0
        """bytes that a connection may send ahead by agreement; written by the thread that receives"""
        self._bound = WAITING_BYTES + message_bytes
        self._sock = sock
        self._connections: dict[int, ReceiveQueue] = {}
        """by the number of libzmq's descriptor; the watching thread's"""
        self._early: dict[int, int] = {}
        """bytes taken from a connection that the watching thread has not heard of"""
        self._left = 0
        """bytes that ended connections have left"""
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

    def taken(self, descriptor: int, size: int) -> None:
        """Note that the service has received `size` bytes of the connection."""
        with self._lock:
            connection = self._connections.get(descriptor)
            if connection is not None:
                connection.taken += size
            else:
                self._early[descriptor] = self._early.get(descriptor, 0) + size
                self._left = max(0, self._left - size)

    def connection(self, descriptor: int) -> ReceiveQueue | None:
        """Find the connection of libzmq's descriptor. For any thread."""
        with self._lock:
            return self._connections.get(descriptor)

    def emptied(self) -> None:
        """Note that no whole message waits: what ended connections had left is taken or gone."""
        with self._lock:
            self._left = 0

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
                self._judge()

    def _accepted(self, descriptor: int) -> None:
        try:
            connection = ReceiveQueue(descriptor)
        except OSError:
            return  # it has ended; or its number is of something else by now
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
                self._left += connection.waits()
        if connection is not None:
            connection.socket.close()

    def _judge(self) -> None:
        waits = {connection: connection.waits() for connection in self._connections.values() if not connection.cut}
        over = [connection for connection, size in waits.items() if size > self._bound + self.expected]
        total = self._left + sum(waits.values())
        largest = sorted((connection for connection in waits if waits[connection] > SMALL_BYTES), key=waits.__getitem__)
        while total > TOTAL_BYTES + self.expected and largest:
            total -= waits[largest[-1]]
            over.append(largest.pop())
        for connection in over:
            if not connection.cut:
                log.warning(
                    "connection ended waiting_bytes=%d allowed_bytes=%d", waits[connection], self._bound + self.expected
                )
                connection.shut()
