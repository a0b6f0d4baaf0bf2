"""When the images of running prompts are read: each in steps of its own, every other one, once it is encoded.

A step has tokens or embeddings, not both (llama.cpp's batch). Beside streams an image is read in chunks like any prompt;
one whose tokens see each other goes whole, and the streams wait for it once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from localllm.engine.request import RunningRequest
from localllm.engine.scheduler import Grant
from localllm.engine.tokens import Placed
from localllm.engine.vision.encoder import Embeddings, Encoder
from localllm_backends.contract import BackendFailure

# So many images of a prompt are encoded ahead of their turn, the one that is due included.
_AHEAD = 2


@dataclass
class ImageSteps:
    """Plans them. `whole`: the tokens of an image can't be parted. `waiting`: somebody could go on if only an image were
    encoded. `failed`: whose image could not be, and why. `chosen`: the embeddings of the image that was planned last."""

    encoder: Encoder
    whole: bool
    waiting: bool = False
    failed: list[tuple[RunningRequest, str]] = field(default_factory=list)
    chosen: Embeddings | None = None
    _last: bool = False

    def unreadable(self, images: Seq[Placed], n_batch: int) -> str:
        """Why these can't be read, "" if they can."""
        largest = max((i.run.n_tokens for i in images), default=0)
        if self.whole and largest > n_batch:
            return f"an image comes to {largest} tokens that this model must read at once; {n_batch} are the most here"
        return ""

    def plan(self, ready: Seq[RunningRequest], most: int) -> Grant | None:
        """The image to read in this step, at most `most` tokens of it; None where text is read."""
        due: dict[str, tuple[RunningRequest, Embeddings]] = {}
        self.waiting, self.failed = False, []
        for job in ready:
            if not job.prefilling or not job.images:
                continue
            for placed in [i for i in job.images if i.stop > job.n_kv][:_AHEAD]:
                self.encoder.want(placed.run)
            if job.image is None:
                continue
            try:
                found = self.encoder.embeddings(job.image.run)
                if found is None:
                    self.waiting = True
                else:
                    due[job.id] = job, found
            except BackendFailure as e:
                self.failed.append((job, str(e)))
        others = any(not (job.prefilling and job.image) for job in ready)
        self._last = bool(due) and not (self._last and others)
        if not self._last:
            return None
        job, self.chosen = min(due.values(), key=lambda found: found[0].arrived_s)
        assert job.image is not None
        left = job.image.stop - job.n_kv
        return Grant(job.id, left if self.whole else min(left, most), prefill=True)
