"""One MLX model on several machines (mlx-lm's tensor parallelism).

Each machine has a share of every layer and runs every operation after the first machine. Partial
sums of a step go over mx.distributed. A pipe to each machine tells it the operations.

As a program it is the process on another machine, which serves requests on its input until that
ends:

    python -m localllm_backends.mlx.tensor_parallel
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from localllm_backends.contract import (
    BackendFailure,
    Chunk,
    LoadSpec,
    OtherMachineError,
    Placement,
    SequenceId,
)
from localllm_backends.draft_head_state import join_blocks, split_blocks
from localllm_backends.mlx.backend import Loaded, MlxBackend
from localllm_backends.mlx.files import check_folder, fingerprint
from localllm_backends.mlx.load import read_checkpoint
from localllm_backends.mlx.machines import (
    HINT,
    Follower,
    Frame,
    MachineRing,
    ports_for,
    read_frame,
    ring_of,
    write_frame,
)
from localllm_backends.mlx.results import MlxStepResult
from localllm_backends.mlx.sequence_cache import SequenceCache
from localllm_backends.shared_behaviour import owner_only

_PROGRAM = ("localllm_backends.mlx.tensor_parallel",)
# Operations that other machines answer.
_ANSWERED = ("export_range", "import_range")


class TensorParallelBackend(MlxBackend):
    """This machine's share of the model; the `others` repeat its operations.

    If another machine's process ends, this process ends too, since it can't compute without it.
    """

    def __init__(self, loaded: Loaded, others: Sequence[Follower]) -> None:
        # Empty at first, because the other machines warm up by themselves.
        self._other_machines: Sequence[Follower] = ()
        super().__init__(loaded)
        self._other_machines = others
        for other in others:
            other.on_exit(self._abort)

    def new_sequence(self) -> SequenceId:
        return self._with_others("new_sequence")  # type: ignore[no-any-return]

    def fork(self, source: SequenceId, n_tokens: int) -> SequenceId:
        return self._with_others("fork", source, n_tokens)  # type: ignore[no-any-return]

    def truncate(self, sequence: SequenceId, n_tokens: int) -> None:
        self._with_others("truncate", sequence, n_tokens)

    def drop(self, sequence: SequenceId) -> None:
        self._with_others("drop", sequence)

    def _with_others(self, operation: str, *arguments: int) -> Any:
        """Run the operation here, then on the other machines."""
        done = getattr(super(), operation)(*arguments)
        self._broadcast(operation, *arguments)
        return done

    def _run_step(self, chunks: Sequence[Chunk], seqs: list[SequenceCache]) -> MlxStepResult:
        self._broadcast("step", *([c.sequence, list(c.tokens), c.outputs] for c in chunks))
        try:
            return super()._run_step(chunks, seqs)
        except BackendFailure:
            # The others have finished this step or hang in it, so their memory no longer matches.
            self._abort("one of the machines")
            raise

    @owner_only
    def export_range(self, sequence: SequenceId, start: int, stop: int) -> bytes:
        """Return the shares of all machines."""
        self._broadcast("export_range", sequence, start, stop)
        try:
            own = super().export_range(sequence, start, stop)
        finally:
            others = self._replies()
        return join_blocks(own, *others)

    @owner_only
    def import_range(
        self, sequence: SequenceId, data: bytes | memoryview, start: int, stop: int
    ) -> None:
        parts = split_blocks(data, 1 + len(self._other_machines))
        super().import_range(sequence, parts[0], start, stop)
        for other, part in zip(self._other_machines, parts[1:], strict=True):
            other.send({"do": "import_range", "with": [sequence, start, stop]}, part)
        try:
            self._replies()
        except BackendFailure:
            self.truncate(sequence, start)
            raise

    def _replies(self) -> list[bytes]:
        """Return the others' answers.

        Raises BackendFailure if one of them reports an error, after all have answered.
        """
        replies = [(other.machine.name, *other.receive()) for other in self._other_machines]
        for name, frame, _ in replies:
            if "refused" in frame:
                raise BackendFailure(f"{name}: {frame['refused']}")
        return [body for _, _, body in replies]

    def close(self) -> None:
        others = self._other_machines
        self._other_machines = ()
        for other in others:
            other.stop()
        super().close()

    def _broadcast(self, operation: str, *arguments: Any) -> None:
        for other in self._other_machines:
            other.send({"do": operation, "with": arguments})

    def _abort(self, name: str) -> None:
        """End this process: it can't compute without that machine, and the running step may never
        end."""
        if self._other_machines:
            print(
                f"{name} is no longer connected, and it held a share of the model",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)


def load_tensor_parallel(
    spec: LoadSpec, on_progress: Callable[[float], None] | None = None
) -> TensorParallelBackend:
    """Load `spec` on this machine and the workers of its placement.

    Raises OtherMachineError, with the machine's name, if a machine fails.
    """
    folder = check_folder(spec.path)
    ring = ring_of(spec.placement.workers)
    followers: list[Follower] = []
    try:
        for machine in ring.machines[1:]:
            followers.append(Follower(machine, _PROGRAM))
        group = _form_group(spec, ring, followers, _identity(folder))
        # All machines load at once, each from its own disk.
        loaded = read_checkpoint(spec, on_progress, group)
        for follower in followers:
            follower.receive()
            follower.send({"do": "begin"})
        return TensorParallelBackend(loaded, followers)
    except BaseException:
        for follower in followers:
            follower.stop()
        raise


def _form_group(
    spec: LoadSpec, ring: MachineRing, followers: Sequence[Follower], ours: Mapping[str, str]
) -> Any:
    """Form the group of all machines, after checking that their files and versions equal ours."""
    ports = ports_for(ring)
    path = Path(spec.path).absolute()
    home = Path.home()
    portable = str(path)
    if path.is_relative_to(home):
        portable = f"~/{path.relative_to(home).as_posix()}"
    alone = Placement(gpu_layers=spec.n_gpu_layers)
    order: Frame = {
        "spec": asdict(replace(spec, placement=alone, path=portable)),
        "files": ring.files(ports),
        "variables": ring.variables(ports),
        "backend": ring.backend,
    }
    for rank, follower in enumerate(followers, 1):
        follower.send({**order, "rank": rank})
    for follower in followers:
        _check_same(follower, ours)
    for follower in followers:
        follower.send({"do": "join"})
    met: list[Any] = []

    def join() -> None:
        met.append(_join({**order, "rank": 0}))

    # In a separate thread, because joining hangs without an error if another machine fails to join.
    joining = threading.Thread(target=join, name="join", daemon=True)
    joining.start()
    for follower in followers:
        follower.receive()
    joining.join()
    if not met:
        raise OtherMachineError(
            f"the machines can't connect to each other with MLX's {ring.backend}", HINT
        )
    return met[0]


def _identity(folder: Path) -> dict[str, str]:
    """Return the facts that must be equal on all machines."""
    return {
        "the model's files": fingerprint(folder),
        **{name: version(name) for name in ("localllm", "mlx", "mlx-lm")},
    }


def _check_same(follower: Follower, ours: Mapping[str, str]) -> None:
    theirs = follower.receive()[0]["is"]
    for name, value in ours.items():
        if theirs.get(name) != value:
            other = ""
            if name != "the model's files":
                other = f" ({theirs.get(name)} there, {value} here)"
            raise OtherMachineError(
                f"{follower.machine.name} differs in {name}{other}: it must "
                "be equal on all machines",
                HINT,
            )


def _join(order: Frame) -> Any:
    """Join the group of machines. MLX reads the settings from the environment and files.

    Raises OtherMachineError if the machines can't connect.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, text in order["files"].items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
            os.environ[name] = str(Path(folder) / name)
        os.environ.update(order["variables"])
        os.environ["MLX_RANK"] = str(order["rank"])
        try:
            return mx.distributed.init(strict=True, backend=order["backend"])
        except RuntimeError as e:
            raise OtherMachineError(
                f"this machine can't connect to the others with MLX's {order['backend']}: {e}", HINT
            ) from e


def _do(backend: MlxBackend, frame: Frame, body: bytes, sink: BinaryIO) -> None:
    """Run one operation on another machine.

    Operations that the first machine rejected are not sent.
    """
    operation = frame["do"]
    arguments = frame["with"]
    if operation == "step":
        arguments = [[Chunk(*chunk) for chunk in arguments]]
    elif operation == "import_range":
        arguments.insert(1, body)
    try:
        found = getattr(backend, operation)(*arguments)
    except BackendFailure as e:
        if operation not in _ANSWERED:
            raise
        write_frame(sink, {"refused": str(e)})
    else:
        if operation in _ANSWERED:
            write_frame(sink, {}, found or b"")


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Load the share of the model, join the group, and repeat the first machine's operations until
    it exits."""
    inbox: queue.SimpleQueue[tuple[Frame, bytes]] = queue.SimpleQueue()

    def read() -> None:
        received = read_frame(source)
        while received is not None:
            inbox.put(received)
            received = read_frame(source)
        # The first machine has exited, so end this process in any state.
        os._exit(0)

    threading.Thread(target=read, name="reader", daemon=True).start()
    try:
        order, _ = inbox.get()
        spec = LoadSpec.from_json(order["spec"])
        spec = replace(spec, path=str(Path(spec.path).expanduser()))
        write_frame(sink, {"is": _identity(check_folder(spec.path))})
        inbox.get()
        group = _join(order)
        write_frame(sink, {"joined": True})
        loaded = read_checkpoint(spec, None, group)
        write_frame(sink, {"loaded": True})
        inbox.get()
        backend = MlxBackend(loaded)
    except BackendFailure as e:
        write_frame(sink, {"failed": str(e)})
        raise SystemExit(1) from e
    while True:
        _do(backend, *inbox.get(), sink)


def _main() -> None:
    # Ctrl-C and a service's SIGTERM reach the process group. The first machine decides, and closes
    # our input.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    # Native code sometimes prints to standard output.
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        _serve(source, sink)
    except BackendFailure as e:
        print(f"this machine's share of the model failed: {e}", file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    _main()
