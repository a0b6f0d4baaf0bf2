"""A program that reads damaged copies of a real header under a memory limit and prints the results
as JSON.

It is a process of its own because the operating system enforces the limit: 256 MB above the memory
that Python itself needs.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from pathlib import Path

from localllm_catalog import gguf
from localllm_catalog.errors import CatalogError
from localllm_catalog.from_gguf import model_from_gguf

EXTREMES = [
    0,
    1,
    8,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
]
HEADROOM_BYTES = 256_000_000


def main(real: Path, work: Path, count: int, seed: int) -> None:
    header = gguf.read(real)
    original = real.open("rb").read(header.data_start)
    size = real.stat().st_size
    mutant = work / real.name
    rng = random.Random(seed)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM_BYTES, used + HEADROOM_BYTES))
    refused = accepted = 0
    slowest_s = 0.0
    crashes: list[str] = []
    with mutant.open("wb+") as file:
        file.write(original)
        for index in range(count):
            length = size
            # The vocabulary is 99 % of the bytes but rarely causes errors, so most of the damage
            # goes to the structure.
            zone = rng.choice(
                [(0, 2_000), (0, 64), (len(original) - 20_000, len(original)), (0, len(original))]
            )
            changed = set()
            for _ in range(rng.choice([1, 1, 1, 2, 8])):
                at = rng.randrange(*zone)
                kind = rng.randrange(4)
                if kind == 0:
                    new = bytes([original[at] ^ (1 << rng.randrange(8))])
                elif kind == 1:
                    new = bytes([rng.randrange(256)])
                elif kind == 2:
                    new = rng.choice(EXTREMES).to_bytes(8, "little")
                else:
                    new = rng.choice(EXTREMES[:7]).to_bytes(4, "little")
                new = new[: len(original) - at]
                file.seek(at)
                file.write(new)
                changed.add((at, len(new)))
            if rng.random() < 0.1:
                length = rng.choice(
                    [rng.randrange(64), rng.randrange(len(original)), rng.randrange(size)]
                )
            file.flush()
            file.truncate(length)
            start = time.process_time()
            try:
                model_from_gguf(gguf.read(mutant))
                accepted += 1
            except CatalogError:
                refused += 1
            except BaseException as error:  # this program searches for any other exception
                crashes.append(f"mutant {index}: {error!r}")
            slowest_s = max(slowest_s, time.process_time() - start)
            if length < len(original):
                file.seek(0)
                file.write(original)
            for at, n_bytes in changed:
                file.seek(at)
                file.write(original[at : at + n_bytes])
            file.truncate(size)
    print(
        json.dumps(
            {"refused": refused, "accepted": accepted, "slowest_s": slowest_s, "crashes": crashes}
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
