"""Train an EAGLE-3 head for SmolLM2-135M with NumPy, in minutes: a drafter that is often right.

python -m benchmarks.train_eagle3 HEAD.gguf [--kinds story,copy] [--texts 32] [--tokens 100]
[--words 1024] [--minutes 20]

The training data are texts of that model itself. The head starts as the model's own last layer,
with the features as input. It learns to predict one token ahead, and then another from its own
hidden row (training-time test, arXiv 2503.01840). Its vocabulary is the tokens that the model chose
most (d2t), and its output matrix is the model's, unchanged. It is not part of the product, and is
of no use for other models.

"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from numpy.typing import NDArray

from benchmarks.models import smollm2
from benchmarks.speculation import prompt
from localllm_backends.contract import LoadSpec
from localllm_backends.llamacpp.batch import floats
from localllm_backends.llamacpp.native import start_native
from localllm_backends.llamacpp.weights import load_model

Floats = NDArray[np.float32]
# The layers whose inputs are features: an early one, a middle one, and the last one.
LAYERS = (2, 15, 29)
# Benchmarks use the seeds from 0 on, so training contains none of their texts.
FIRST_SEED = 50_000
HELD_OUT, AT_ONCE, BATCH, RATE = 5, 32, 512, 6e-4


# --- what the model says, and what its layers made of it ------------------------------------------


class Speaker:
    """SmolLM2 in a context of many sequences, which returns its layers' inputs."""

    def __init__(self, path: Path) -> None:
        self._model = load_model(path, LoadSpec(str(path)), None)[0]
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = (
            32_768,
            BATCH,
            BATCH,
            AT_ONCE,
        )
        params.n_threads = params.n_threads_batch = 2
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._llama = start_native()
        assert not self._llama.missing("drafters")
        for layer in LAYERS:
            self._llama.llama_set_embeddings_layer_inp(self._context, layer, True)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of `text`, with markers of turns parsed."""
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 8))()
        n = llama_cpp.llama_tokenize(self._vocab, data, len(data), ids, len(ids), True, True)
        return list(ids[:n])

    def step(self, entries: list[tuple[int, int, int]]) -> tuple[NDArray[np.float16], Floats]:
        """Return features and logits of (token, position, sequence)."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, 1
            batch.seq_id[i][0] = sequence
        assert llama_cpp.llama_decode(self._context, batch) == 0
        n, width = len(entries), 576
        given = [
            floats(self._llama.llama_get_embeddings_layer_inp(self._context, layer), n, width)
            for layer in LAYERS
        ]
        logits = llama_cpp.llama_get_logits(self._context)
        return np.concatenate(given, axis=1).astype(np.float16), floats(logits, n, self.n_vocab)

    def texts(
        self, prompts: list[str], n_tokens: int, rng: np.random.Generator
    ) -> Iterator[dict[str, Any]]:
        """Yield each prompt with `n_tokens` more tokens, half of them greedy, the others at a
        temperature of 0.8."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        lines: list[list[int]] = []
        rows: list[list[NDArray[np.float16]]] = []
        best: list[list[int]] = []
        for sequence, text in enumerate(prompts):
            line = self.tokens(text)[:900]
            parts = []
            for begin in range(0, len(line), BATCH):
                part = line[begin : begin + BATCH]
                features, logits = self.step(
                    [(token, begin + i, sequence) for i, token in enumerate(part)]
                )
                parts.append((features, logits.argmax(axis=1)))
            best.append([int(token) for _, said in parts for token in said])
            rows.append([features for features, _ in parts])
            lines.append([*line, best[-1][-1]])
        for _ in range(n_tokens):
            features, logits = self.step(
                [(line[-1], len(line) - 1, s) for s, line in enumerate(lines)]
            )
            for s, line in enumerate(lines):
                best[s].append(int(logits[s].argmax()))
                rows[s].append(features[s : s + 1])
                noise = rng.gumbel(size=self.n_vocab).astype(np.float32) if s % 4 == 3 else 0.0
                line.append(int((logits[s] / 0.8 + noise).argmax()))
        for line, given, said in zip(lines, rows, best, strict=True):
            yield {
                "tokens": np.array(line[:-1]),
                "rows": np.concatenate(given),
                "best": np.array(said),
            }


def collect(path: Path, kinds: list[str], n_texts: int, n_tokens: int) -> list[dict[str, Any]]:
    """Return texts of these kinds in turn, with the model's features at each token and its choice
    after it."""
    speaker, rng, kept = Speaker(path), np.random.default_rng(1), []
    for begin in range(0, n_texts, AT_ONCE):
        numbers = range(begin, min(begin + AT_ONCE, n_texts))
        prompts = [prompt(kinds[i % len(kinds)], FIRST_SEED + i) for i in numbers]
        kept += list(speaker.texts(prompts, n_tokens, rng))
        print(f"{len(kept)} texts, {sum(len(t['tokens']) for t in kept):,} tokens", flush=True)
    return kept


# --- the head, forwards and backwards -------------------------------------------------------------


class Node:
    """A matrix of the computation, and the gradient of the loss for it."""

    def __init__(self, value: Floats) -> None:
        self.value, self.grad = value, np.zeros((), dtype=np.float32)


class Tape:
    """The recorded computation, for the backward pass."""

    def __init__(self) -> None:
        self._back: list[Callable[[], None]] = []

    def node(self, value: Floats, back: Callable[[Node], None]) -> Node:
        """Add a value. `back` passes its gradient on to its inputs."""
        out = Node(value)
        self._back.append(lambda: back(out))
        return out

    def backwards(self) -> None:
        """Run the backward pass from the last value to the first."""
        for back in reversed(self._back):
            back()

    def times(self, x: Node, weight: Node, *, frozen: bool = False, given: bool = False) -> Node:
        """x · weightᵀ. `frozen`: the weight does not learn. `given`: `x` has no inputs."""

        def back(out: Node) -> None:
            if not given:
                x.grad = x.grad + out.grad @ weight.value
            if not frozen:
                weight.grad = weight.grad + out.grad.T @ x.value

        return self.node(x.value @ weight.value.T, back)

    def norm(self, x: Node, weight: Node) -> Node:
        """RMS norm."""
        scale = 1.0 / np.sqrt((x.value**2).mean(axis=1, keepdims=True) + 1e-5)
        plain = x.value * scale

        def back(out: Node) -> None:
            weight.grad = weight.grad + (out.grad * plain).sum(axis=0)
            g = out.grad * weight.value
            x.grad = x.grad + scale * (g - plain * (g * plain).mean(axis=1, keepdims=True))

        return self.node(plain * weight.value, back)

    def sum(self, a: Node, b: Node) -> Node:
        """a + b."""

        def back(out: Node) -> None:
            a.grad, b.grad = a.grad + out.grad, b.grad + out.grad

        return self.node(a.value + b.value, back)

    def beside(self, a: Node, b: Node) -> Node:
        """a and b, concatenated by columns."""
        n = a.value.shape[1]

        def back(out: Node) -> None:
            a.grad, b.grad = a.grad + out.grad[:, :n], b.grad + out.grad[:, n:]

        return self.node(np.concatenate([a.value, b.value], axis=1), back)

    def gated(self, gate: Node, up: Node) -> Node:
        """silu(gate) × up."""
        sigmoid = 1.0 / (1.0 + np.exp(-gate.value))
        silu = gate.value * sigmoid

        def back(out: Node) -> None:
            up.grad = up.grad + out.grad * silu
            gate.grad = gate.grad + out.grad * up.value * (sigmoid + silu * (1.0 - sigmoid))

        return self.node(silu * up.value, back)

    def later(self, x: Node) -> Node:
        """Each row one position further down, with zeros in the first."""

        def back(out: Node) -> None:
            x.grad = x.grad + np.concatenate([out.grad[1:], np.zeros_like(out.grad[:1])])

        return self.node(np.concatenate([np.zeros_like(x.value[:1]), x.value[:-1]]), back)

    def rotated(self, x: Node, n_heads: int) -> Node:
        """Rotary positions (pairs of neighbours, as in a GGUF), [n, heads × 64]."""
        n, width = len(x.value), x.value.shape[1] // n_heads
        angles = np.arange(n)[:, None] / 100_000 ** (np.arange(width // 2) * 2 / width)
        cos, sin = (f(angles).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))

        def turn(values: Floats, by: Floats) -> Floats:
            pairs = values.reshape(n, n_heads, -1, 2)
            a, b = pairs[..., 0], pairs[..., 1]
            return np.stack([a * cos - b * by, a * by + b * cos], axis=-1).reshape(values.shape)

        def back(out: Node) -> None:
            x.grad = x.grad + turn(out.grad, -sin)

        return self.node(turn(x.value, sin), back)

    def attention(self, q: Node, k: Node, v: Node, own: tuple[Node, Node] | None) -> Node:
        """Causal attention. With `own`, a position attends to itself by `own`, and to earlier
        positions by `k` and `v`."""
        n, d = len(q.value), 64
        groups = k.value.shape[1] // d

        def split(values: Floats) -> Floats:
            return values.reshape(n, groups, -1, d).transpose(1, 2, 0, 3)

        def joined(values: Floats) -> Floats:
            return values.transpose(2, 0, 1, 3).reshape(n, -1)

        qs, ks, vs = split(q.value), split(k.value), split(v.value)
        scores = qs @ ks.swapaxes(-1, -2) / np.float32(np.sqrt(d))
        diagonal = np.arange(n)
        if own is not None:
            ko, vo = split(own[0].value), split(own[1].value)
            scores[..., diagonal, diagonal] = (qs * ko).sum(axis=-1) / np.float32(np.sqrt(d))
        scores += np.triu(np.full((n, n), -np.inf, dtype=np.float32), 1)
        scores -= scores.max(axis=-1, keepdims=True)
        shares = np.exp(scores)
        shares /= shares.sum(axis=-1, keepdims=True)
        past = shares
        if own is not None:
            mine = shares[..., diagonal, diagonal][..., None]
            past = shares.copy()
            past[..., diagonal, diagonal] = 0.0
        seen = past @ vs + (mine * vo if own is not None else 0.0)

        def back(out: Node) -> None:
            g = split(out.grad)
            to_shares = g @ vs.swapaxes(-1, -2)
            if own is not None:
                to_shares[..., diagonal, diagonal] = (g * vo).sum(axis=-1)
            to_scores = (
                shares
                * (to_shares - (to_shares * shares).sum(axis=-1, keepdims=True))
                / np.float32(np.sqrt(d))
            )
            to_past = to_scores
            to_q: Any = 0.0
            if own is not None:
                to_own = to_scores[..., diagonal, diagonal][..., None]
                to_past = to_scores.copy()
                to_past[..., diagonal, diagonal] = 0.0
                own[0].grad = own[0].grad + joined((to_own * qs).sum(axis=1, keepdims=True))
                own[1].grad = own[1].grad + joined((mine * g).sum(axis=1, keepdims=True))
                to_q = to_own * ko
            q.grad = q.grad + joined(to_past @ ks + to_q)
            k.grad = k.grad + joined((to_past.swapaxes(-1, -2) @ qs).sum(axis=1, keepdims=True))
            v.grad = v.grad + joined((past.swapaxes(-1, -2) @ g).sum(axis=1, keepdims=True))

        return self.node(joined(seen), back)

    def loss(self, logits: Node, best: NDArray[np.int64]) -> tuple[float, NDArray[np.bool_]]:
        """Return the mean cross entropy for known choices (not −1), and whether each choice is
        predicted."""
        top = logits.value.max(axis=1, keepdims=True)
        shares = np.exp(logits.value - top)
        shares /= shares.sum(axis=1, keepdims=True)
        known = np.flatnonzero(best >= 0)
        value = -float(np.log(shares[known, best[known]] + 1e-9).mean())
        grad = shares
        grad[known, best[known]] -= 1.0
        grad[best < 0] = 0.0
        logits.grad = grad / np.float32(max(1, len(known)))
        return value, np.asarray(logits.value.argmax(axis=1) == best)


class Head:
    """One layer after the features of three, with llama.cpp's names and order of operations
    (src/models/eagle3.cpp)."""

    def __init__(self, path: Path, texts: list[dict[str, Any]], n_words: int) -> None:
        reader = gguf.GGUFReader(path)
        given = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
            for t in reader.tensors
        }
        counts = np.bincount(
            np.concatenate([t["best"] for t in texts]), minlength=len(given["token_embd.weight"])
        )
        self.words = np.sort(np.argsort(-counts)[:n_words])
        self.covered = float(counts[self.words].sum() / counts.sum())
        self.embeddings = given["token_embd.weight"]
        self.output = Node(self.embeddings[self.words])
        e, last = self.embeddings.shape[1], "blk.29"
        nothing = np.zeros((e, e), dtype=np.float32)
        values = {
            "fc": np.concatenate([nothing, nothing, np.eye(e, dtype=np.float32)], axis=1),
            "output_norm": given["output_norm.weight"],
            "blk.0.attn_norm": np.full(e, 4.0, dtype=np.float32)
            * given["blk.0.attn_norm.weight"].mean(),
            "blk.0.attn_norm_2": given[f"{last}.attn_norm.weight"],
            **{
                f"blk.0.{n}": given[f"{last}.{n}.weight"]
                for n in ("attn_output", "ffn_norm", *_FFN)
            },
        }
        rng = np.random.default_rng(2)
        for name in ("attn_q", "attn_k", "attn_v"):
            own = given[f"{last}.{name}.weight"]
            said = rng.standard_normal(own.shape).astype(np.float32) * own.std() * 0.5
            values[f"blk.0.{name}"] = np.concatenate([said, own], axis=1)
        self.weights = {name: Node(np.ascontiguousarray(value)) for name, value in values.items()}

    def layer(
        self, tape: Tape, words: Node, g: Node, past: tuple[Node, Node] | None
    ) -> tuple[Node, Node, tuple[Node, Node]]:
        """Return the logits, the layer's hidden row, and its keys and values."""
        w = {name.removeprefix("blk.0."): node for name, node in self.weights.items()}
        both = tape.beside(tape.norm(words, w["attn_norm"]), tape.norm(g, w["attn_norm_2"]))
        q = tape.rotated(tape.times(both, w["attn_q"]), 9)
        k, v = tape.rotated(tape.times(both, w["attn_k"]), 3), tape.times(both, w["attn_v"])
        seen = tape.attention(q, *(past or (k, v)), None if past is None else (k, v))
        middle = tape.sum(tape.times(seen, w["attn_output"]), g)
        normed = tape.norm(middle, w["ffn_norm"])
        gated = tape.gated(tape.times(normed, w["ffn_gate"]), tape.times(normed, w["ffn_up"]))
        hidden = tape.sum(tape.times(gated, w["ffn_down"]), middle)
        return (
            tape.times(tape.norm(hidden, w["output_norm"]), self.output, frozen=True),
            hidden,
            (k, v),
        )

    def learn(
        self, text: dict[str, Any], *, backwards: bool = True
    ) -> tuple[float, list[NDArray[np.bool_]]]:
        """Process one text, two tokens ahead at each position. Return the loss, and which guesses
        are right."""
        tape = Tape()
        tokens, best = text["tokens"], self.numbered[text["best"]][1:]
        rows, words = Node(text["rows"][:-1].astype(np.float32)), Node(self.embeddings[tokens[1:]])
        g = tape.times(rows, self.weights["fc"], given=True)
        first, hidden, past = self.layer(tape, words, g, None)
        loss, right = tape.loss(first, best)
        second, _, _ = self.layer(tape, words, tape.later(hidden), past)
        later, right_later = tape.loss(second, np.concatenate([[-1], best[1:]]))
        if backwards:
            tape.backwards()
        return loss + later, [right, right_later]

    @cached_property
    def numbered(self) -> NDArray[np.int64]:
        """Return the index of each token in the head's vocabulary, or −1."""
        places = np.full(len(self.embeddings), -1)
        places[self.words] = np.arange(len(self.words))
        return places

    def write(self, model: Path, out: Path) -> None:
        """Write a GGUF of the architecture eagle3, with its matrices in Q8_0."""
        writer = gguf.GGUFWriter(str(out), "eagle3")
        for field in gguf.GGUFReader(model).fields.values():
            name = (
                field.name.replace("llama.", "eagle3.", 1)
                if field.name.startswith("llama.")
                else field.name
            )
            if name.startswith(("GGUF.", "general.")) or name == "eagle3.block_count":
                continue
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
        writer.add_block_count(1)
        writer.add_array("eagle3.target_layers", list(LAYERS))
        writer.add_uint32("eagle3.target_hidden_size", self.embeddings.shape[1])
        tensors = {**{n: w.value for n, w in self.weights.items()}, "output": self.output.value}
        for name, value in tensors.items():
            kind = (
                gguf.GGMLQuantizationType.Q8_0 if value.ndim > 1 else gguf.GGMLQuantizationType.F32
            )
            data = gguf.quants.quantize(value.astype(np.float32), kind)
            writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
        writer.add_tensor("d2t", self.words.astype(np.int64))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


_FFN = ("ffn_gate", "ffn_up", "ffn_down")


class Adam:
    """Adam (arXiv 1412.6980) with a rate that falls to zero over the available time."""

    def __init__(self, weights: dict[str, Node]) -> None:
        self._weights, self._n = weights, 0
        self._mean = {n: np.zeros_like(w.value) for n, w in weights.items()}
        self._square = {n: np.zeros_like(w.value) for n, w in weights.items()}

    def step(self, rate: float, texts: int) -> None:
        """Update every weight with the gradients of `texts` texts."""
        self._n += 1
        for name, node in self._weights.items():
            grad = node.grad / np.float32(texts)
            self._mean[name] = 0.9 * self._mean[name] + 0.1 * grad
            self._square[name] = 0.95 * self._square[name] + 0.05 * grad**2
            mean, square = (
                self._mean[name] / (1 - 0.9**self._n),
                self._square[name] / (1 - 0.95**self._n),
            )
            node.value -= (rate * mean / (np.sqrt(square) + 1e-8)).astype(np.float32)
            node.grad = np.zeros((), dtype=np.float32)


def train(head: Head, texts: list[dict[str, Any]], minutes: float, out: Path) -> None:
    """Train on all but the held-out texts until the time is over. Print the results for those, and
    write the head."""
    rng, adam, began = np.random.default_rng(3), Adam(head.weights), time.monotonic()
    every = max(2, len(texts) // HELD_OUT)
    held, learnt = texts[::every], [t for i, t in enumerate(texts) if i % every]
    rounds, past = 0, 0.0
    while past < 1.0:
        order = rng.permutation(len(learnt))
        for begin in range(0, len(order), 3):
            several = order[begin : begin + 3]
            for i in several:
                head.learn(learnt[i])
            past = (time.monotonic() - began) / (60 * minutes)
            adam.step(RATE * max(0.02, 1.0 - past), len(several))
            if past >= 1.0:
                break
        rounds += 1
        found = [head.learn(text, backwards=False) for text in held]
        first, second = (np.concatenate([right[k] for _, right in found]).mean() for k in (0, 1))
        loss = float(np.mean([value for value, _ in found]))
        print(
            f"{rounds} rounds, {past:.0%} of the time: loss {loss:.2f}, right {first:.3f}, then "
            f"{second:.3f}",
            flush=True,
        )
        head.write(smollm2(), out)


def main() -> None:
    """Collect, train, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", default="story")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--words", type=int, default=1024)
    parser.add_argument("--minutes", type=float, default=20.0)
    options = parser.parse_args()
    texts = collect(smollm2(), options.kinds.split(","), options.texts, options.tokens)
    head = Head(smollm2(), texts, options.words)
    print(f"{len(head.words)} words, {head.covered:.1%} of what the model said")
    train(head, texts, options.minutes, options.out)


if __name__ == "__main__":
    main()
