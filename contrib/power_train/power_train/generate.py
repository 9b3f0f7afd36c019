"""
The target writes the text its drafters learn from, and the features are kept as it goes.

A drafter must predict what its target says, not what people say: the prompts are only openings. Several processes
of one thread each decode `slots` sequences together; a finished sequence makes room for the next at once.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np
import torch
from attrs import define, field, frozen
from numpy.typing import NDArray
from power_torch.weights import load_weights

from power_core.errors import BackendError
from power_core.types import TokenId
from power_train.dataset import ShardWriter
from power_train.decode import BatchDecoder
from power_train.prompts import EncodedPrompt

__all__ = ["GenerateOptions", "generate"]


@frozen
class GenerateOptions:
    """
    How text is generated.

    Args:
        model: File of the target.
        layers: Block outputs to keep.
        end_ids: Ids that end a turn.
        seed: Of the sampled parts.
        max_new: Most tokens of an answer.
        max_question: Most tokens the target adds to a question it completes.
        capacity: Most tokens of a sequence.
        slots: Sequences decoded together by a process.
        processes: Processes, of one thread each.
        tokens: Stop opening sequences at this many tokens, over all processes.
        seconds: Stop opening sequences after so long, or None.
        sampled_share: Share of the answers that are sampled at *temperature* instead of greedy.
        temperature: Of sampled answers and of completed questions.
        top_k: Ids that sampling chooses from.
    """

    model: Path
    layers: tuple[int, ...]
    end_ids: tuple[TokenId, ...]
    seed: int = 0
    max_new: int = 192
    max_question: int = 96
    capacity: int = 448
    slots: int = 128
    processes: int = 2
    tokens: int = 1_000_000
    seconds: float | None = None
    sampled_share: float = 0.15
    temperature: float = 0.7
    top_k: int = 50


@define
class _Slot:
    """A sequence being decoded: tokens `fed` have been evaluated, `queue` are known but not yet evaluated."""

    prompt: EncodedPrompt
    rng: np.random.Generator
    is_sampled: bool
    queue: deque[TokenId]
    is_question: bool  # the target is still writing the question
    fed: list[TokenId] = field(factory=list)
    answer_start: int = 0  # index of the answer's first token; 0 while the question is not complete
    written: int = 0  # tokens the target wrote in this turn


def generate(
    prompts: Sequence[EncodedPrompt], options: GenerateOptions, folder: Path, progress: Callable[[int], None]
) -> None:
    """
    Write text for *prompts* in their order until `options.tokens` or `options.seconds`; continues what is there.

    Args:
        prompts: Shuffled: a run that stops early takes the first of them.
        options: How.
        folder: Of the dataset; its header is the caller's.
        progress: Called now and then with the tokens there are.

    Raises:
        BackendError: A process died.
    """
    context = multiprocessing.get_context("spawn")
    counts = [context.Value("q", 0, lock=False) for _ in range(options.processes)]
    workers = [
        context.Process(
            target=_work, args=(prompts[i :: options.processes], options, folder / f"shard-{i}", counts[i]), daemon=True
        )
        for i in range(options.processes)
    ]
    for worker in workers:
        worker.start()
    try:
        while any(worker.is_alive() for worker in workers):
            progress(sum(count.value for count in counts))
            time.sleep(0.5)
    except BaseException:
        for worker in workers:
            worker.terminate()
        raise
    progress(sum(count.value for count in counts))
    failed = [worker.exitcode for worker in workers if worker.exitcode]
    if failed:
        raise BackendError(f"a generating process ended with exit code {failed[0]}", who="power-train")


def _work(prompts: Sequence[EncodedPrompt], options: GenerateOptions, folder: Path, count: Synchronized[int]) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    weights = load_weights(options.model, torch.bfloat16)
    hidden = weights.hparams.hidden_size
    decoder = BatchDecoder(weights, options.layers, slots=options.slots, capacity=options.capacity)
    writer = ShardWriter(folder, width=len(options.layers) * hidden, hidden=hidden)
    try:
        _Generator(decoder, writer, options, count).run(prompts)
    finally:
        writer.close()


class _Generator:
    """One process's loop: fill free slots, step, take the next token of each slot, write what is finished."""

    def __init__(
        self, decoder: BatchDecoder, writer: ShardWriter, options: GenerateOptions, count: Synchronized[int]
    ) -> None:
        self._decoder, self._writer, self._options, self._count = decoder, writer, options, count
        hidden = decoder.weights.hparams.hidden_size
        rows = (options.slots, options.capacity)
        self._features = torch.zeros(*rows, len(options.layers), hidden, dtype=torch.bfloat16)
        self._final = torch.zeros(*rows, hidden, dtype=torch.bfloat16)
        self._slots: list[_Slot | None] = [None] * options.slots
        self._all = torch.arange(options.slots)

    def run(self, prompts: Iterable[EncodedPrompt]) -> None:
        self._count.value = self._writer.tokens
        waiting = deque(prompt for prompt in prompts if prompt.index not in self._writer.prompts)
        limit, began = self._options.tokens // self._options.processes, time.monotonic()
        while True:
            late = self._options.seconds is not None and time.monotonic() - began > self._options.seconds
            if late or self._writer.tokens >= limit:
                waiting.clear()
            for index, slot in enumerate(self._slots):
                if slot is None and waiting:
                    self._slots[index] = self._opened(waiting.popleft())
            if not any(self._slots):
                return
            self._step()

    def _opened(self, prompt: EncodedPrompt) -> _Slot:
        rng = np.random.default_rng((self._options.seed, prompt.index))
        is_sampled = bool(rng.random() < self._options.sampled_share)
        return _Slot(prompt, rng, is_sampled, deque(prompt.tokens), is_question=bool(prompt.closing))

    def _step(self) -> None:
        tokens, positions = (
            torch.zeros(len(self._slots), dtype=torch.long),
            torch.zeros(len(self._slots), dtype=torch.long),
        )
        for index, slot in enumerate(self._slots):
            if slot is not None:
                positions[index] = len(slot.fed)
                slot.fed.append(slot.queue.popleft())
                tokens[index] = slot.fed[-1]
        features, final = self._decoder.step(tokens, positions)
        self._features[self._all, positions] = features
        self._final[self._all, positions] = final
        asking = [index for index, slot in enumerate(self._slots) if slot is not None and not slot.queue]
        if not asking:
            return
        logits = self._decoder.logits(final[asking])
        greedy = _greedy(logits)
        for row, index in enumerate(asking):
            slot = self._slots[index]
            if slot is not None:
                self._take(index, slot, int(greedy[row]), logits[row])

    def _take(self, index: int, slot: _Slot, greedy: TokenId, logits: torch.Tensor) -> None:
        """Give *slot* its next token and end its turn where that is due."""
        options = self._options
        token = self._sampled(slot, logits) if slot.is_question or slot.is_sampled else greedy
        ends = token in options.end_ids
        if slot.is_question:
            slot.written += 1
            if ends or slot.written >= options.max_question:
                slot.queue.extend(slot.prompt.closing if ends else (token, *slot.prompt.closing))
                slot.is_question, slot.written = False, 0
            else:
                slot.queue.append(token)
            return
        slot.answer_start = slot.answer_start or len(slot.fed)
        slot.written += 1
        if ends or slot.written >= options.max_new or len(slot.fed) + 1 >= options.capacity:
            self._finish(index, slot, token)
        else:
            slot.queue.append(token)

    def _sampled(self, slot: _Slot, logits: torch.Tensor) -> TokenId:
        values, ids = logits.float().topk(min(self._options.top_k, len(logits)))
        weights = np.exp((values.numpy() - float(values[0])) / self._options.temperature, dtype=np.float64)
        return int(ids[int(np.searchsorted(weights.cumsum(), slot.rng.random() * weights.sum()))])

    def _finish(self, index: int, slot: _Slot, last: TokenId) -> None:
        tokens = np.array([*slot.fed, last], np.int32)
        rows = len(tokens)
        self._features[index, rows - 1], self._final[index, rows - 1] = 0, 0
        features, final = _bits(self._features[index, :rows]), _bits(self._final[index, :rows])
        self._writer.add(slot.prompt.index, tokens, slot.answer_start, features, final, sampled=slot.is_sampled)
        self._count.value = self._writer.tokens
        self._slots[index] = None


def _greedy(logits: torch.Tensor) -> NDArray[np.int64]:
    """
    The likeliest id of each row of bfloat16 logits.

    Positive floats are in the order of their bits, and numpy finds the largest of those 30 times faster than torch that
    of bfloat16 numbers; a row without a positive logit, where it would be the smallest, is left to torch.
    """
    bits = logits.view(torch.int16).numpy()
    ids: NDArray[np.int64] = bits.argmax(-1)
    if (np.take_along_axis(bits, ids[:, None], -1) < 0).any():
        ids = logits.float().argmax(-1).numpy()
    return ids


def _bits(x: torch.Tensor) -> NDArray[np.uint16]:
    return x.reshape(len(x), -1).view(torch.int16).numpy().view(np.uint16)
