"""The machines that share one MLX model: their addresses, their connections, and the pipe to each
machine's process.

mlx.launch could start the processes too, but it forwards output ten times a second and keeps a core
busy. Both are unsuitable for a stream of tokens. The hostfile and the environment for MLX are the
same as mlx.launch's.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from localllm_backends.contract import OtherMachineError

Frame = dict[str, Any]
HINT = (
    "`ssh` must reach each machine without a password, and each machine needs the same releases "
    "and files: see docs/many-machines.md"
)
# A machine that is cut off sends no data. ssh notices that within 20 seconds and exits, which ends
# the pipe.
_ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *_ALIVE)
_LOCAL = ("127.0.0.1", "localhost", "::1")
# First port of mlx.launch.
_FIRST_PORT = 32323


@dataclass(frozen=True, slots=True)
class Machine:
    """One of the machines.

    `ssh`: its SSH destination ("": this machine). `addresses`: its own addresses, one per cable.
    `rdma`: its device toward each machine (None: itself), if it has Thunderbolt 5.
    """

    ssh: str
    addresses: tuple[str, ...]
    rdma: tuple[str | None, ...] = ()

    @property
    def name(self) -> str:
        return self.ssh or "this machine"


@dataclass(frozen=True, slots=True)
class MachineRing:
    """All machines, this one first, and the type of connection in mlx.launch's terms.

    The types are "ring", "jaccl" and "jaccl-ring".
    """

    machines: tuple[Machine, ...]
    kind: str = "ring"
    environment: tuple[str, ...] = ()

    @property
    def backend(self) -> str:
        """Name of the connection type in mx.distributed."""
        return self.kind.partition("-")[0]

    def files(self, ports: Sequence[int]) -> dict[str, str]:
        """Return the contents of files for MLX, by the environment variable that names the file.

        `ports`: one for each address of each machine.
        """
        if self.backend == "jaccl":
            return {"MLX_IBV_DEVICES": json.dumps([m.rdma for m in self.machines])}
        numbers = iter(ports)
        at = []
        for machine in self.machines:
            at.append([f"{address}:{next(numbers)}" for address in machine.addresses])
        return {"MLX_HOSTFILE": json.dumps(at)}

    def variables(self, ports: Sequence[int]) -> dict[str, str]:
        """Return MLX's environment variables for every machine, apart from the files and
        MLX_RANK."""
        found = {}
        for setting in self.environment:
            name, _, value = setting.partition("=")
            found[name] = value
        if self.kind == "jaccl-ring":
            found["MLX_JACCL_RING"] = "1"
        if self.backend == "jaccl":
            found["MLX_JACCL_COORDINATOR"] = f"{self.machines[0].addresses[0]}:{ports[0]}"
        return found


def ring_of(named: Sequence[str]) -> MachineRing:
    """Return this machine and the named ones.

    `named` are SSH destinations, or one hostfile in the format of `mlx.distributed_config`. Raises
    OtherMachineError if they are invalid.
    """
    if len(named) == 1 and named[0].endswith(".json"):
        return _of_hostfile(Path(named[0]))
    others = []
    for destination in named:
        ssh = "" if _is_local(destination) else destination
        others.append(Machine(ssh, (_address_of(destination),)))
    own = Machine("", (_own_address(others[0].addresses[0]),))
    return MachineRing((own, *others))


def _of_hostfile(path: Path) -> MachineRing:
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a file")
        read = json.loads(path.read_text(encoding="utf-8"))
        hostfile = read if isinstance(read, dict) else {"hosts": read}
        machines = tuple(
            _machine_of(host, first=i == 0) for i, host in enumerate(hostfile["hosts"])
        )
        kind = str(hostfile.get("backend") or "ring")
        environment = tuple(str(e) for e in hostfile.get("envs") or ())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise OtherMachineError(
            f"{path.name!r} is not a valid MLX hostfile ({type(e).__name__}: {e})", HINT
        ) from e
    fault = _fault(machines, kind)
    if fault:
        raise OtherMachineError(f"{path.name!r} {fault}", HINT)
    return MachineRing(machines, kind, environment)


def _fault(machines: Sequence[Machine], kind: str) -> str:
    """Return what is wrong with a hostfile; "" if it is valid."""
    if len(machines) < 2 or not all(machine.addresses for machine in machines):
        return "must name at least two machines, this one first, each with its addresses"
    if kind == "ring":
        return ""
    if kind not in ("jaccl", "jaccl-ring"):
        return f"asks for {kind!r}, but only MLX's ring and JACCL are supported"
    if any(len(machine.rdma) != len(machines) for machine in machines):
        return "lacks RDMA devices: JACCL needs one from each machine to each other"
    return ""


def _machine_of(host: dict[str, Any], *, first: bool) -> Machine:
    """Read a machine from a hostfile. The first one is this machine."""
    ssh = ""
    if not first and not _is_local(str(host["ssh"])):
        ssh = _destination(str(host["ssh"]))
    addresses = tuple(str(ipaddress.ip_address(ip)) for ip in host["ips"])
    return Machine(ssh, addresses, tuple(host.get("rdma") or ()))


def _is_local(destination: str) -> bool:
    return destination.rpartition("@")[2] in _LOCAL


def _destination(text: str) -> str:
    """Return `text` if it is an SSH destination and not an option of ssh."""
    if not text or text.startswith("-") or any(c.isspace() for c in text):
        raise OtherMachineError(
            f"{text!r} is not an SSH destination; examples: 10.0.0.8 or anna@studio.local", HINT
        )
    return text


def _address_of(destination: str) -> str:
    """Return the address of an SSH destination, including names in ~/.ssh/config."""
    host = _destination(destination).rpartition("@")[2]
    if _is_local(host):
        return "127.0.0.1"
    asked = subprocess.run(["ssh", "-G", destination], capture_output=True, text=True, check=False)
    for line in asked.stdout.splitlines():
        if line.startswith("hostname "):
            host = line.split()[1]
            break
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])
    except OSError as e:
        raise OtherMachineError(f"{host!r} has no address ({e.strerror or e})", HINT) from e


def _own_address(other: str) -> str:
    """Return this machine's address toward `other`, without sending data."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect((other, 9))
        except OSError as e:
            raise OtherMachineError(
                f"there is no network route to {other} ({e.strerror or e})", HINT
            ) from e
        return str(s.getsockname()[0])


def ports_for(ring: MachineRing) -> list[int]:
    """Return a port for every address.

    They are free ports if all machines are this one, else mlx.launch's ports.
    """
    n = sum(len(m.addresses) for m in ring.machines)
    if any(m.ssh for m in ring.machines):
        return list(range(_FIRST_PORT, _FIRST_PORT + n))
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    found = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return found


class Follower:
    """A process on another machine that repeats this machine's operations.

    A frame is one line of JSON, then as many bytes as its field "bytes" gives.
    """

    def __init__(self, machine: Machine, program: Sequence[str]) -> None:
        self.machine = machine
        self._process = subprocess.Popen(
            _command(machine, program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=-1
        )

    def send(self, frame: Frame, body: bytes | memoryview = b"") -> None:
        """Send a frame. Raises OtherMachineError if the process has ended."""
        try:
            write_frame(self._process.stdin, frame, body)
        except (OSError, ValueError) as e:
            raise OtherMachineError(
                f"{self.machine.name} is no longer connected ({self._exit_reason()})", HINT
            ) from e

    def receive(self) -> tuple[Frame, bytes]:
        """Return the next frame.

        Raises OtherMachineError if the process has ended or reports a failure.
        """
        received = read_frame(self._process.stdout)
        if received is None:
            raise OtherMachineError(
                f"{self.machine.name} does not answer ({self._exit_reason()})", HINT
            )
        if "failed" in received[0]:
            raise OtherMachineError(f"{self.machine.name}: {received[0]['failed']}", HINT)
        return received

    def stop(self) -> None:
        """Close its input, which tells it to exit."""
        try:
            self._process.communicate(timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def on_exit(self, call: Callable[[str], None]) -> None:
        """Call `call` with the machine's name after its process ends, in a separate thread."""

        def wait() -> None:
            self._process.wait()
            call(self.machine.name)

        threading.Thread(target=wait, name=f"watch {self.machine.name}", daemon=True).start()

    def _exit_reason(self) -> str:
        try:
            code = self._process.wait(2)
        except subprocess.TimeoutExpired:
            return "it said nothing"
        # ssh's own failures (ssh(1)).
        if self.machine.ssh and code == 255:
            return "ssh could not reach it"
        return f"its process ended with {code}"


def _command(machine: Machine, program: Sequence[str]) -> list[str]:
    """Return the command that starts `program` there (a module for our Python, and its arguments).

    It uses the Python at the same path, also relative to a different home folder.
    """
    if not machine.ssh:
        return [sys.executable, "-m", *program]
    python = sys.executable
    home = str(Path.home())
    inside = "''"
    if python.startswith(home + os.sep):
        inside = f'"$HOME"{shlex.quote(python.removeprefix(home))}'
    there = (
        f'p={inside}; [ -x "$p" ] || p={shlex.quote(python)}; '
        f'[ -x "$p" ] || {{ echo "localllm is not installed there at $p" >&2; exit 3; }}; '
        f'exec "$p" -m {shlex.join(program)}'
    )
    return [*_SSH, machine.ssh, "--", f"sh -c {shlex.quote(there)}"]


def write_frame(stream: BinaryIO | Any, frame: Frame, body: bytes | memoryview = b"") -> None:
    head = json.dumps({**frame, "bytes": len(body)}, separators=(",", ":"))
    stream.write(head.encode() + b"\n")
    stream.write(body)
    stream.flush()


def read_frame(stream: BinaryIO | Any) -> tuple[Frame, bytes] | None:
    """Read a frame; None at the end, or if it is incomplete."""
    try:
        frame = json.loads(stream.readline())
        body = stream.read(frame["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if len(body) != frame["bytes"]:
        return None
    return frame, body
