"""Finds the user at the other end of a loopback connection.

Every account of a machine can connect to a port on loopback. Linux reports the owner of a TCP
socket through netlink (sock_diag(7)). /proc/net/tcp has the same data, but reading it takes
milliseconds, because the kernel then looks at every socket."""

from __future__ import annotations

import functools
import os
import socket
import struct
import sys

_ROOT = 0
# Numbers from linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h.
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_ANY = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_QUESTION = struct.Struct("=BBxxI")  # family, protocol, states
_ENDS = struct.Struct("!HH16s16s")  # ports, then addresses
_INTERFACE_AND_COOKIE = struct.pack("=III", 0, _ANY, _ANY)
# In the answer after the header: state, both ends, expiry and queues, then uid and inode.
_OWNER = struct.Struct("=64xII")
_ANSWER_BYTES = 4096
_LONGEST_S = 1.0


@functools.cache
def reports_users() -> bool:
    """Return whether this system reports the user of a loopback connection. It is tried once, with
    a connection to itself."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), _LONGEST_S),
        ):
            accepted, _ = listener.accept()
            with accepted:
                return is_own_user(accepted)
    except OSError:
        return False


def is_own_user(sock: socket.socket) -> bool:
    """Return whether the client of `sock`, a connection on loopback, runs as this process's user
    or as root. Raises OSError if the system does not report it."""
    uid, inode = _owner(sock.family, sock.getpeername(), sock.getsockname())
    # A socket that its process has closed has no inode. On some systems its uid is then 0.
    return inode != 0 and uid in (os.geteuid(), _ROOT)


def _owner(family: int, own: tuple[object, ...], peer: tuple[object, ...]) -> tuple[int, int]:
    """Return the uid and the inode of the TCP socket `own` that is connected to `peer`. Raises
    OSError."""
    if sys.platform != "linux":
        raise OSError("this system does not report the owner of a socket")
    ends = _ENDS.pack(own[1], peer[1], _packed(family, own), _packed(family, peer))
    question = _QUESTION.pack(family, socket.IPPROTO_TCP, _ANY) + ends + _INTERFACE_AND_COOKIE
    length = _HEADER.size + len(question)
    header = _HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_LONGEST_S)
        kernel.send(header + question)
        answer = kernel.recv(_ANSWER_BYTES)
    kind = _HEADER.unpack_from(answer)[1]
    if kind != _SOCK_DIAG_BY_FAMILY:
        raise OSError("the system does not report the owner of this socket")
    uid, inode = _OWNER.unpack_from(answer, _HEADER.size)
    return uid, inode


def _packed(family: int, address: tuple[object, ...]) -> bytes:
    return socket.inet_pton(family, str(address[0])).ljust(16, b"\0")
