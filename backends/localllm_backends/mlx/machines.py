"""The machines that share one MLX model: who they are, how they reach each other, and the pipe to
each of their processes.

mlx.launch would start them too, but hands output on ten times a second and keeps a core busy; a
stream of tokens wants neither. The hostfile is the same one, the environment that MLX reads as
well.
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
    "`ssh` must reach each machine without a password, and find the same releases and files "
    "there: docs/many-machines.md"
)
# A machine that is cut off says nothing: ssh notices within 20 seconds, and its end is what we
# hear.
_ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *_ALIVE)
_LOCAL = ("127.0.0.1", "localhost", "::1")
# Where mlx.launch begins to count ports.
_FIRST_PORT = 32323


@dataclass(frozen=True, slots=True)
class Machine:
    """One of them. `ssh`: how it is reached by SSH ("": this one). `addresses`: its own, one for
    each cable. `rdma`: its device toward each of the machines (None: itself), where it has
    Thunderbolt 5's."""

    ssh: str
    addresses: tuple[str, ...]
    rdma: tuple[str | None, ...] = ()

    @property
    def name(self) -> str:
        return self.ssh or "this machine"


@dataclass(frozen=True, slots=True)
class MachineRing:
    """All machines, this one first, and what they speak as mlx.launch calls it: "ring", "jaccl" or
    "jaccl-ring"."""

    machines: tuple[Machine, ...]
    kind: str = "ring"
    environment: tuple[str, ...] = ()

    @property
    def backend(self) -> str:
        """Its name in mx.distributed."""
        return self.kind.partition("-")[0]

    def files(self, ports: Sequence[int]) -> dict[str, str]:
        """What MLX wants in a file, by the variable that names it; `ports`: one for each address of
        each machine."""
        if self.backend == "jaccl":
            return {"MLX_IBV_DEVICES": json.dumps([m.rdma for m in self.machines])}
        numbers = iter(ports)
        at = []
        for machine in self.machines:
            at.append([f"{address}:{next(numbers)}" for address in machine.addresses])
        return {"MLX_HOSTFILE": json.dumps(at)}

    def variables(self, ports: Sequence[int]) -> dict[str, str]:
        """What MLX wants in the environment of every machine, its files and MLX_RANK aside."""
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
    """The machines named: SSH destinations beside this machine, or one hostfile as
    `mlx.distributed_config` writes it. OtherMachineError where that can't be."""
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
        read = json.loads(path.read_text(encoding="utf-8"))
        given = read if isinstance(read, dict) else {"hosts": read}
        machines = tuple(_machine_of(host, first=i == 0) for i, host in enumerate(given["hosts"]))
        kind = str(given.get("backend") or "ring")
        environment = tuple(str(e) for e in given.get("envs") or ())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise OtherMachineError(
            f"{path.name!r} is no hostfile of MLX ({type(e).__name__}: {e})", HINT
        ) from e
    fault = _fault(machines, kind)
    if fault:
        raise OtherMachineError(f"{path.name!r} {fault}", HINT)
    return MachineRing(machines, kind, environment)


def _fault(machines: Sequence[Machine], kind: str) -> str:
    """Return what is wrong with a hostfile; "" if nothing is."""
    if len(machines) < 2 or not all(machine.addresses for machine in machines):
        return "must name at least two machines, this one first, each with its addresses"
    if kind == "ring":
        return ""
    if kind not in ("jaccl", "jaccl-ring"):
        return f"asks for {kind!r}: MLX's ring and JACCL are what is spoken here"
    if any(len(machine.rdma) != len(machines) for machine in machines):
        return "lacks RDMA devices: JACCL needs one from each machine to each other"
    return ""


def _machine_of(host: dict[str, Any], *, first: bool) -> Machine:
    """A machine as a hostfile describes it; the first one is this one."""
    ssh = ""
    if not first and not _is_local(str(host["ssh"])):
        ssh = _destination(str(host["ssh"]))
    addresses = tuple(str(ipaddress.ip_address(ip)) for ip in host["ips"])
    return Machine(ssh, addresses, tuple(host.get("rdma") or ()))


def _is_local(destination: str) -> bool:
    return destination.rpartition("@")[2] in _LOCAL


def _destination(text: str) -> str:
    """An SSH destination that is no option of ssh's."""
    if not text or text.startswith("-") or any(c.isspace() for c in text):
        raise OtherMachineError(
            f"{text!r} is no SSH destination, such as 10.0.0.8 or anna@studio.local", HINT
        )
    return text


def _address_of(destination: str) -> str:
    """The address behind an SSH destination; names of ~/.ssh/config count."""
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
    """This machine's address on the way to `other`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect((other, 9))
        except OSError as e:
            raise OtherMachineError(
                f"there is no way from here to {other} ({e.strerror or e})", HINT
            ) from e
        return str(s.getsockname()[0])


def ports_for(ring: MachineRing) -> list[int]:
    """A port for every address: such as are free here where all of them are ours, else those that
    mlx.launch takes."""
    n = sum(len(m.addresses) for m in ring.machines)
    if any(m.ssh for m in ring.machines):
        return list(range(_FIRST_PORT, _FIRST_PORT + n))
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    found = [int(s.getsockname()[1]) for s in held]
    for s in held:
        s.close()
    return found


class Follower:
    """A process on another machine that does what this one does. Frames: one line of JSON, then as
    many bytes as its "bytes" says."""

    def __init__(self, machine: Machine, program: Sequence[str]) -> None:
        self.machine = machine
        self._process = subprocess.Popen(
            _command(machine, program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=-1
        )

    def send(self, frame: Frame, body: bytes | memoryview = b"") -> None:
        """OtherMachineError where it has gone."""
        try:
            write_frame(self._process.stdin, frame, body)
        except (OSError, ValueError) as e:
            raise OtherMachineError(
                f"{self.machine.name} is gone ({self._exit_reason()})", HINT
            ) from e

    def receive(self) -> tuple[Frame, bytes]:
        """Its next frame. OtherMachineError where it has gone, or says that it can't."""
        received = read_frame(self._process.stdout)
        if received is None:
            raise OtherMachineError(
                f"{self.machine.name} does not answer ({self._exit_reason()})", HINT
            )
        if "failed" in received[0]:
            raise OtherMachineError(f"{self.machine.name}: {received[0]['failed']}", HINT)
        return received

    def stop(self) -> None:
        """The end of its input is its order to end."""
        try:
            self._process.communicate(timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def on_exit(self, call: Callable[[str], None]) -> None:
        """`call` with its name once its process has ended, in a thread of its own."""

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
    """How `program` (a module and its arguments, for our Python) is started there: with the Python
    at the same place, also below another home folder."""
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
    """Read one; None at the end, or where it is cut off."""
    try:
        frame = json.loads(stream.readline())
        body = stream.read(frame["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if len(body) != frame["bytes"]:
        return None
    return frame, body
