"""The sampler: order of the stages, exact draws, penalties, processors, log-probabilities, undo."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from power_core.errors import BackendError, RequestError, TransactionError
from power_core.request import SamplingSpec
from power_core.sampling import MAX_LOGPROBS, Sampler, draw, reduce_seed, resolve_seed, uniform
from power_core.testing import ScriptedTokenizer, small_vocabulary

Row = NDArray[np.float32]


class LogitRows:
    """Rows that are given logits, and count what is read."""

    width = 1

    def __init__(self, *rows: Sequence[float]) -> None:
        self.rows = [np.array(row, np.float32) for row in rows]
        for row in self.rows:
            row.setflags(write=False)
        self.reads: Counter[str] = Counter()

    def greedy(self, i: int) -> int:
        self.reads["greedy"] += 1
        return int(self.rows[i].argmax())

    def logits(self, i: int) -> Row:
        self.reads["logits"] += 1
        return self.rows[i]

    def hidden(self, i: int | slice, layer: int) -> Row:
        raise NotImplementedError


def sampler_of(spec: SamplingSpec, *, vocab: int = 8, prompt: Sequence[int] = (0,), seed: int = 1) -> Sampler:
    return Sampler(spec, prompt=prompt, tokenizer=ScriptedTokenizer(small_vocabulary(vocab)), seed=seed)


def random_rows(vocab: int, count: int = 1, seed: int = 0) -> LogitRows:
    return LogitRows(*np.random.default_rng(seed).normal(0, 2, (count, vocab)))


def softmax(values: NDArray[Any]) -> NDArray[np.float64]:
    weights = np.exp(values.astype(np.float64) - values.max())
    return np.asarray(weights / weights.sum())


def probabilities(row: Sequence[float], spec: SamplingSpec, points: int = 4000) -> dict[int, float]:
    """The distribution `draw` realises, by evaluating its inverse CDF on a regular grid."""
    logits = np.array(row, np.float32)
    found = Counter(draw(logits, spec, (i + 0.5) / points) for i in range(points))
    return {token: count / points for token, count in found.items()}


def kept(row: NDArray[Any], spec: SamplingSpec) -> set[int]:
    """Ids `draw` can return: a temperature this high makes all kept tokens equally likely."""
    flat = SamplingSpec(temperature=1e9, top_k=spec.top_k, typical_p=spec.typical_p, top_p=spec.top_p, min_p=spec.min_p)
    points = 8 * row.size
    return {draw(row.astype(np.float32), flat, (i + 0.5) / points) for i in range(points)}


# Logits on a coarse grid, so that ties are common.
rows_of_logits = st.lists(st.integers(-12, 12).map(lambda n: n / 2), min_size=1, max_size=24).map(np.array)


# --- draws


def test_the_draw_is_numpys_philox() -> None:
    """`uniform` is the published generator: numpy's, which steps its counter before use, agrees bit for bit."""
    for seed in (0, 1, 2**64 - 1, 0xDEADBEEF):
        for index in (1, 2, 77, 2**40):
            word = int(np.random.Philox(key=seed, counter=index - 1).random_raw())
            assert uniform(seed, index) == (word >> 11) * 2.0**-53


def test_draws_are_uniform_and_differ_by_seed_and_index() -> None:
    """Deciles of 20,000 draws pass a chi-square test (9 degrees of freedom, 99.9 % bound 27.88)."""
    values = [uniform(seed, index) for seed in range(20) for index in range(1000)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    counts = np.bincount([int(value * 10) for value in values], minlength=10)
    assert ((counts - 2000) ** 2 / 2000).sum() < 27.88


def test_any_integer_is_a_seed() -> None:
    """Seeds are taken modulo 2**64; what is no integer is refused."""
    assert resolve_seed(SamplingSpec(seed=-1)) == reduce_seed(2**64 - 1) == 2**64 - 1
    assert resolve_seed(SamplingSpec(seed=2**64 + 5)) == 5
    with pytest.raises(RequestError, match=r"seed is 1\.5"):
        resolve_seed(SamplingSpec(seed=1.5))  # type: ignore[arg-type] # the mistake under test


def test_fresh_seeds_differ() -> None:
    """Without a seed each request takes 64 fresh bits."""
    seeds = {resolve_seed(SamplingSpec()) for _ in range(64)}
    assert len(seeds) == 64
    assert 2**63 <= max(seeds) < 2**64


# --- greedy


def test_plain_greedy_reads_no_logits() -> None:
    """Temperature 0 without anything else takes the target's own argmax and nothing more."""
    rows = random_rows(8)
    sampler = sampler_of(SamplingSpec())
    assert sampler.sample(rows, 0) == int(rows.rows[0].argmax())
    assert rows.reads == {"greedy": 1}
    assert sampler.logprobs() == []
    assert not sampler.is_complete


@pytest.mark.parametrize("extra", [{"logprobs": 0}, {"logit_bias": {7: -1.0}}, {"presence_penalty": 0.5}])
def test_greedy_takes_the_lowest_id_on_a_tie(extra: dict[str, Any]) -> None:
    """The same rule with and without edits to the row."""
    row = [0, 3, 5, 5, 1, 5, 0, 0]
    assert sampler_of(SamplingSpec(**extra), prompt=[0]).sample(LogitRows(row), 0) == 2


# --- filters against their definitions


@given(rows_of_logits, st.integers(1, 30))
def test_top_k_keeps_the_k_largest_lowest_ids_first(row: NDArray[Any], k: int) -> None:
    """A full sort by (logit, id) gives the same set."""
    order = sorted(range(row.size), key=lambda i: (-row[i], i))
    assert kept(row, SamplingSpec(top_k=k)) == set(order[:k])


@given(rows_of_logits, st.floats(0.001, 1))
def test_min_p_keeps_what_is_likely_enough(row: NDArray[Any], ratio: float) -> None:
    """Kept tokens have p >= ratio * max p and dropped ones do not, up to rounding."""
    p = softmax(row)
    ids = kept(row, SamplingSpec(min_p=ratio))
    assert all(p[i] >= ratio * p.max() * (1 - 1e-12) for i in ids)
    assert all(p[i] < ratio * p.max() * (1 + 1e-12) for i in set(range(row.size)) - ids)


def assert_smallest_prefix(ids: set[int], score: NDArray[Any], p: NDArray[np.float64], mass: float) -> None:
    """*ids* is a prefix by (score, id), reaches *mass*, and would not without its last element."""
    order = sorted(range(p.size), key=lambda i: (-round(float(score[i]), 9), i))
    assert ids == set(order[: len(ids)])
    assert p[order[: len(ids)]].sum() >= mass - 1e-9
    assert len(ids) == 1 or p[order[: len(ids) - 1]].sum() < mass + 1e-9


@given(rows_of_logits, st.floats(0, 0.9999))
def test_top_p_keeps_the_smallest_nucleus(row: NDArray[Any], mass: float) -> None:
    """The most likely tokens up to the one that reaches the mass, at least one."""
    assert_smallest_prefix(kept(row, SamplingSpec(top_p=mass)), row, softmax(row), mass)


@given(rows_of_logits, st.floats(0, 0.9999))
def test_typical_keeps_what_is_nearest_to_the_entropy(row: NDArray[Any], mass: float) -> None:
    """Tokens by the distance of their surprise from the entropy, up to the one that reaches the mass."""
    p = softmax(row)
    distance = np.abs(-np.log(p) + (p * np.log(p)).sum())
    if len(set(np.round(distance, 6))) == len(set(row)):  # two logits at one distance are settled by rounding
        assert_smallest_prefix(kept(row, SamplingSpec(typical_p=mass)), -distance, p, mass)


@pytest.mark.parametrize("vocab", [1000, 49_152])
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0, 40.0])
def test_filters_on_whole_vocabularies(vocab: int, scale: float) -> None:
    """Flat, ordinary and peaked rows of real size keep the sets that full sorts give."""
    from power_core.sampling import filters

    row = (np.random.default_rng(vocab).normal(0, scale, vocab)).astype(np.float32)
    row[5] = row[17] = row[vocab // 2]  # ties among them
    order = np.argsort(-row, kind="stable")
    for k in (1, 40, 333, vocab - 1, vocab):
        assert np.array_equal(filters.largest(row, k), order[:k])
    p = softmax(row)
    cumulative = np.cumsum(p[order])
    for mass in (0.1, 0.5, 0.95, 0.999):
        ids = filters._top_p(row.astype(np.float64), mass)
        assert ids is not None
        assert np.array_equal(ids, np.sort(order[: int(np.searchsorted(cumulative, mass)) + 1]))


def test_stages_run_in_the_documented_order_and_renormalise() -> None:
    """top-k, then top-p over what it kept, then min-p, then temperature: worked by hand."""
    row = np.log([0.4, 0.3, 0.15, 0.1, 0.05])
    # top-k 3 leaves 0.4 0.3 0.15 of 0.85; 0.8 of that needs the first two (0.82), of the whole all three.
    assert kept(row, SamplingSpec(top_k=3, top_p=0.8)) == {0, 1}
    assert kept(row, SamplingSpec(top_p=0.8)) == {0, 1, 2}
    # top-p keeps three of the whole, all above 0.3 * 0.4; of what min-p leaves (0.85) it would keep two.
    assert kept(row, SamplingSpec(top_p=0.8, min_p=0.3)) == {0, 1, 2}
    # min-p sees probabilities before the temperature is applied: 0.3 >= 0.5 * 0.4 at any temperature.
    cold = probabilities(row.tolist(), SamplingSpec(temperature=0.25, top_k=3, min_p=0.5))
    weights = np.array([0.4, 0.3]) ** 4
    assert cold == pytest.approx(dict(enumerate(weights / weights.sum())), abs=1e-3)


@given(rows_of_logits, st.floats(0.05, 5))
def test_temperature_draws_the_softmax(row: NDArray[Any], temperature: float) -> None:
    """The inverse CDF realises softmax(logits / temperature) to the width of the grid, by ascending id."""
    found = probabilities(row.tolist(), SamplingSpec(temperature=temperature), points=500)
    expected = softmax(row / temperature)
    assert all(abs(found.get(i, 0) - p) <= 1 / 500 + 1e-9 for i, p in enumerate(expected))
    tokens = [draw(row.astype(np.float32), SamplingSpec(temperature=temperature), i / 50) for i in range(50)]
    assert tokens == sorted(tokens)


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """No overflow, no NaN: all weight goes to the largest logit, at the ends of the CDF too."""
    assert {
        draw(np.array([1, 2, -3], np.float32), SamplingSpec(temperature=temperature), u) for u in (0.0, 1 - 2**-53)
    } == {1}
    assert probabilities([1.0, 2.0, -3.0], SamplingSpec(temperature=temperature), points=50) == {1: 1.0}


def test_excluded_tokens_are_never_drawn() -> None:
    """Tokens at -inf have no share at either end of the CDF, whatever the filters."""
    row = np.array([-np.inf, 0, -np.inf, 0, -np.inf], np.float32)
    for spec in (
        SamplingSpec(temperature=1),
        SamplingSpec(temperature=1, top_k=4),
        SamplingSpec(temperature=1, top_p=0.99),
    ):
        assert {draw(row, spec, u) for u in (0.0, 0.3, 0.7, 1 - 2**-53)} == {1, 3}


@pytest.mark.parametrize("changes", [{}, {"top_k": 300}, {"top_p": 0.9}, {"typical_p": 0.9}, {"min_p": 0.01}])
def test_a_draw_depends_on_the_logits_bits_only(changes: dict[str, Any]) -> None:
    """The same row anywhere in memory gives the same tokens: no sum depends on alignment."""
    row = random_rows(5003).rows[0]
    spec, us = SamplingSpec(temperature=0.9, **changes), [i / 97 for i in range(97)]
    expected = [draw(row, spec, u) for u in us]
    for offset in range(1, 17):
        moved = np.empty(row.size + offset, np.float32)[offset:]
        moved[:] = row
        assert [draw(moved, spec, u) for u in us] == expected


# --- statistics of whole streams


@pytest.mark.parametrize(
    "spec",
    [
        SamplingSpec(temperature=1),
        SamplingSpec(temperature=0.6, top_k=4),
        SamplingSpec(temperature=1.3, top_p=0.8),
        SamplingSpec(temperature=1, min_p=0.2),
        SamplingSpec(temperature=1, typical_p=0.7),
    ],
)
def test_a_stream_follows_its_distribution(spec: SamplingSpec) -> None:
    """6,000 tokens of one seed against exact probabilities: chi-square below the 99.9 % bound for 5 degrees."""
    row = [1.2, 0.4, -0.5, 0.9, -2.0, 0.1]
    sampler, rows = sampler_of(spec, vocab=6, seed=42), LogitRows(row)
    counts = Counter(sampler.sample(rows, 0) for _ in range(6000))
    ids = sorted(kept(np.array(row), spec))
    assert set(counts) == set(ids)
    expected = softmax(np.array(row)[ids] / spec.temperature) * 6000
    assert sum((counts[i] - e) ** 2 / e for i, e in zip(ids, expected, strict=True)) < 20.52


def test_min_p_holds_for_every_emitted_token() -> None:
    """Case of dropped samplers: at min_p 0.2 no seed emits a token with p < 0.2 of the best."""
    rows = random_rows(50, count=20)
    for seed in range(200):
        sampler = sampler_of(SamplingSpec(temperature=1, min_p=0.2), vocab=50, seed=seed)
        for i in range(20):
            p = softmax(rows.rows[i])
            assert p[sampler.sample(rows, i)] >= 0.2 * p.max() * (1 - 1e-9)


# --- bias and penalties


def test_a_banned_token_never_occurs_and_a_pushed_one_always() -> None:
    """Logit bias acts on each row, also where the target is sure."""
    rows = random_rows(8, count=30)
    best = Counter(int(row.argmax()) for row in rows.rows).most_common(1)[0][0]
    for bias in (-100.0, -math.inf):
        banned = sampler_of(SamplingSpec(logit_bias={best: bias}))
        assert best not in {banned.sample(rows, i) for i in range(30)}
    pushed = sampler_of(SamplingSpec(temperature=1, logit_bias={6: 100.0}))
    assert {pushed.sample(rows, i) for i in range(30)} == {6}


def test_the_targets_row_is_not_written_to() -> None:
    """Edits happen on a copy: the row is the backend's memory."""
    rows = random_rows(8)
    before = rows.rows[0].copy()
    sampler_of(SamplingSpec(logit_bias={1: 5.0}, repeat_penalty=1.3, processors=(lambda t, x: x.fill(0),))).sample(
        rows, 0
    )
    assert np.array_equal(rows.rows[0], before)


penalty_specs = st.builds(
    SamplingSpec,
    repeat_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.6, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    penalty_window=st.integers(-1, 6),
    temperature=st.sampled_from([0.0, 1.0]),
)


def naive_penalties(row: Row, spec: SamplingSpec, history: list[int]) -> Row:
    """Straight from the description, from the whole history each time."""
    size = len(history) if spec.penalty_window < 0 else min(spec.penalty_window, len(history))
    out = row.astype(np.float64)
    for token, count in Counter(history[len(history) - size :]).items():
        out[token] = out[token] / spec.repeat_penalty if out[token] > 0 else out[token] * spec.repeat_penalty
        out[token] -= count * spec.frequency_penalty + spec.presence_penalty
    return out.astype(np.float32)


@given(penalty_specs, st.lists(st.integers(0, 4), max_size=8), st.data())
def test_penalties_match_a_recount_of_the_history(spec: SamplingSpec, prompt: list[int], data: st.DataObject) -> None:
    """Counts kept incrementally, through undone tokens too, equal counts made anew."""
    rows = random_rows(5, count=12)
    sampler = sampler_of(spec, vocab=5, prompt=prompt, seed=3)
    for i in range(12):
        checkpoint = sampler.checkpoint()
        for j in data.draw(st.lists(st.integers(0, 11), max_size=4)):
            sampler.sample(rows, j)
        sampler.restore(checkpoint)
        edited = naive_penalties(rows.rows[i], spec, sampler.history)
        u = uniform(3, i)
        expected = draw(edited, spec, u) if spec.temperature else int(edited.argmax())
        assert sampler.sample(rows, i) == expected
    assert sampler.history[: len(prompt)] == prompt


def test_tokens_sampled_earlier_in_a_block_are_penalised() -> None:
    """Three rows of one forward: each sees the tokens chosen from the rows before it."""
    row = [3.0, 2.0, 1.0, 0.0]
    sampler = sampler_of(SamplingSpec(presence_penalty=10.0), vocab=4, prompt=[3])
    assert [sampler.sample(LogitRows(row, row, row), i) for i in range(3)] == [0, 1, 2]


def test_penalties_leave_excluded_tokens_excluded() -> None:
    """Tokens at -inf or at the largest negative float32 stay last, without a warning."""
    lowest = float(np.finfo(np.float32).min)
    sampler = sampler_of(SamplingSpec(repeat_penalty=2.0), vocab=4, prompt=[0, 1, 2])
    assert sampler.sample(LogitRows([lowest, -np.inf, 1.0, 0.4]), 0) == 2


# --- processors


class OddBan:
    """Forbids a token at even output positions and remembers its calls; its state can be undone."""

    def __init__(self, token: int, num_prompt: int) -> None:
        self.token, self.num_prompt = token, num_prompt
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, tokens: Sequence[int], logits: Row) -> None:
        self.calls.append(tuple(tokens))
        if (len(tokens) - self.num_prompt) % 2 == 0:
            logits[self.token] = -np.inf

    def checkpoint(self) -> object:
        return len(self.calls)

    def restore(self, checkpoint: object) -> None:
        assert isinstance(checkpoint, int)
        del self.calls[checkpoint:]


def test_a_processor_is_called_once_a_token_with_the_true_prefix() -> None:
    """Also where a step was undone in between: its own state goes back with the sampler's."""
    rows, processor = LogitRows([0, 9, 1, 0]), OddBan(1, num_prompt=2)
    sampler = sampler_of(SamplingSpec(processors=(processor,)), vocab=4, prompt=[3, 3])
    for n in range(6):
        checkpoint = sampler.checkpoint()
        for _ in range(n % 3):
            sampler.sample(rows, 0)
        sampler.restore(checkpoint)
        sampler.sample(rows, 0)
    assert sampler.history == [3, 3, 2, 1, 2, 1, 2, 1]
    assert processor.calls == [tuple(sampler.history[:n]) for n in range(2, 8)]


def test_processors_run_in_order_after_penalties_and_may_return_an_array() -> None:
    """Each sees what the one before made; a returned array stays the processor's own."""
    own, seen = np.array([0, 0, 5, 4], np.float32), []

    def first(tokens: Sequence[int], logits: Row) -> Row:
        seen.append(logits.tolist())
        return own

    def second(tokens: Sequence[int], logits: Row) -> None:
        seen.append(logits.tolist())
        logits[2] = -1

    spec = SamplingSpec(logit_bias={0: 1.0}, presence_penalty=2.0, processors=(first, second))
    assert sampler_of(spec, vocab=4, prompt=[1]).sample(LogitRows([1, 1, 1, 1]), 0) == 3
    assert seen == [[2, -1, 1, 1], [0, 0, 5, 4]]
    assert own.tolist() == [0, 0, 5, 4]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: x[:-1], r"returned float32\[3\]"),
        (lambda x: np.append(x, x), r"returned float32\[8\]"),
        (lambda x: x.astype(np.float64), r"returned float64\[4\]"),
        (lambda x: x.tolist(), "returned list"),
        (lambda x: x * np.float32("nan"), "left NaN"),
        (lambda x: x.fill(np.inf), r"left NaN or \+inf"),
        (lambda x: 1 / 0, "raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_processors_nonsense_names_it(result: Callable[[Row], Any], message: str) -> None:
    """Wrong shape, type or numbers fail this request with the processor's name."""

    def culprit(tokens: Sequence[int], logits: Row) -> Any:
        return result(logits)

    sampler = sampler_of(SamplingSpec(processors=(culprit,)), vocab=4)
    with pytest.raises(RequestError, match=f"culprit.*{message}"):
        sampler.sample(LogitRows([1, 2, 3, 4]), 0)


# --- log-probabilities


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.8]), st.integers(0, 10))
def test_logprobs_are_the_raw_rows_log_softmax(seed: int, temperature: float, top: int) -> None:
    """One entry a token, before bias and penalties, to 1e-6 of a float64 reference, sorted with ties by id."""
    rows = LogitRows(*np.random.default_rng(seed).integers(-9, 9, (5, 8)))
    spec = SamplingSpec(temperature=temperature, logprobs=top, logit_bias={2: 4.0}, repeat_penalty=1.2)
    sampler = sampler_of(spec, seed=seed)
    tokens = [sampler.sample(rows, i) for i in range(5)]
    assert [entry.token_id for entry in sampler.logprobs()] == tokens
    for row, entry in zip(rows.rows, sampler.logprobs(), strict=True):
        reference = np.log(softmax(row))
        order = sorted(range(8), key=lambda i: (-row[i], i))[:top]
        assert [token for token, _ in entry.top] == order
        assert [value for _, value in entry.top] == pytest.approx(reference[order], abs=1e-6)
        assert entry.logprob == pytest.approx(reference[entry.token_id], abs=1e-6)


def test_logprobs_hold_for_large_logits_and_leave_out_the_impossible() -> None:
    """The log-softmax neither overflows nor lists tokens of probability 0."""
    sampler = sampler_of(SamplingSpec(logprobs=4), vocab=4)
    sampler.sample(LogitRows([3e38, 3e38, -3e38, -np.inf]), 0)
    entry = sampler.logprobs()[0]
    assert [token for token, _ in entry.top] == [0, 1, 2]
    assert [value for _, value in entry.top[:2]] == pytest.approx([-math.log(2)] * 2)


# --- the same stream under every strategy, and undo


specs = st.builds(
    SamplingSpec,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.9]),
    repeat_penalty=st.sampled_from([1.0, 1.4]),
    logprobs=st.sampled_from([None, 2]),
)


@given(specs, st.data())
def test_a_stream_does_not_depend_on_blocks_or_undone_steps(spec: SamplingSpec, data: st.DataObject) -> None:
    """Tokens and log-probabilities equal plain decoding's, however steps were cut, failed and repeated."""
    rows = random_rows(8, count=20)
    plain, other = sampler_of(spec, seed=9), sampler_of(spec, seed=9)
    expected = [plain.sample(rows, i) for i in range(20)]
    emitted = 0
    while emitted < 20:
        checkpoint = other.checkpoint()
        block = data.draw(st.integers(1, 5))
        if data.draw(st.booleans()):  # a step that fails somewhere and is undone
            for i in data.draw(st.lists(st.integers(0, 19), max_size=4)):
                other.sample(rows, i)
            other.restore(checkpoint)
        for i in range(emitted, min(emitted + block, 20)):
            other.sample(rows, i)
        emitted = min(emitted + block, 20)
        other.commit(block)
    assert other.history == plain.history == [0, *expected]
    assert other.logprobs() == plain.logprobs()


def test_a_checkpoint_can_be_restored_twice_and_foreign_ones_are_refused() -> None:
    """Restoring does not use a checkpoint up; one from the future is an error in the engine."""
    rows = random_rows(8)
    sampler = sampler_of(SamplingSpec(temperature=1))
    start = sampler.checkpoint()
    first = sampler.sample(rows, 0)
    later = sampler.checkpoint()
    sampler.restore(start)
    assert sampler.sample(rows, 0) == first
    sampler.restore(start)
    assert sampler.history == [0]
    for checkpoint in (later, None):
        with pytest.raises(TransactionError, match="sampler"):
            sampler.restore(checkpoint)


# --- refusals


@pytest.mark.parametrize(
    ("changes", "where", "expected"),
    [
        ({"logit_bias": {8: 1.0}}, "logit_bias", "0 to 7"),
        ({"logit_bias": {9: 1.0}}, "logit_bias", "0 to 7"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", "0 to 7"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias", "0 to 7"),
        ({"logit_bias": {3: math.nan}}, "logit_bias", "a number up to 1e+30, or -inf as a ban"),
        ({"logit_bias": {3: math.inf}}, "logit_bias", "a number up to 1e+30, or -inf as a ban"),
        ({"logit_bias": {3: -1.1e30}}, "logit_bias", "a number up to 1e+30, or -inf as a ban"),
        ({"logit_bias": {3: "1"}}, "logit_bias", "a number up to 1e+30, or -inf as a ban"),
        ({"logprobs": -1}, "logprobs", "0 to 1024"),
        ({"logprobs": MAX_LOGPROBS + 2}, "logprobs", "0 to 1024"),
        ({"logprobs": MAX_LOGPROBS + 1}, "logprobs", "0 to 1024"),
        ({"logprobs": 2.0}, "logprobs", "0 to 1024"),
        ({"top_k": 2.5}, "top_k", "an integer"),
        ({"penalty_window": 1.5}, "penalty_window", "an integer"),
        ({"processors": (len, "len")}, "processors", "a function of (tokens, logits)"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(changes: dict[str, Any], where: str, expected: str) -> None:
    """A bad setting fails when the request is made, naming the setting and what it may be."""
    with pytest.raises(RequestError) as caught:
        sampler_of(SamplingSpec(**changes))
    assert (caught.value.where, caught.value.expected) == (where, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": {0: -1e30, 7: 1e30, 3: -math.inf, 4: np.float32(0.5), 5: 0}},
        {"logprobs": 0},
        {"logprobs": MAX_LOGPROBS},
    ],
)
def test_the_ends_of_each_range_are_allowed(changes: dict[str, Any]) -> None:
    """And numpy's numbers are numbers."""
    assert sampler_of(SamplingSpec(**changes)).sample(random_rows(8), 0) in range(8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("row", "error"),
    [([-np.inf] * 4, RequestError), ([0, np.nan, 0, 0], BackendError), ([0, np.inf, 0, 0], BackendError)],
)
def test_a_row_without_an_answer_is_an_error(temperature: float, row: list[float], error: type[Exception]) -> None:
    """All excluded is the request's fault, NaN and infinity the target's; neither gives a token."""
    sampler = sampler_of(SamplingSpec(temperature=temperature, logprobs=0), vocab=4)
    with pytest.raises(error):
        sampler.sample(LogitRows(row), 0)
    assert sampler.history == [0]
