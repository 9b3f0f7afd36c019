"""Receipt version 2, field by field. What a receipt may hold is exactly what these classes name."""

from __future__ import annotations

import attrs
import cattrs
from attrs import Factory, frozen
from cattrs.gen import make_dict_unstructure_fn

from power_core.types import JSON, TargetIdentity

__all__ = [
    "SCHEMA",
    "ArtifactRecord",
    "CostsRecord",
    "CountsRecord",
    "FileRecord",
    "OutputRecord",
    "PolicyRecord",
    "ReceiptBody",
    "RequestRecord",
    "SamplingRecord",
    "ShapeRecord",
    "Timings",
    "TimingsRecord",
    "UsageRecord",
    "WidthRecord",
    "converter",
]

SCHEMA = "power.receipt/1"
converter = cattrs.Converter(forbid_extra_keys=True)
# What receipts learnt to say later has a default and is left out where it holds it: older ones write back the same.
converter.register_unstructure_hook_factory(
    attrs.has, lambda cls: make_dict_unstructure_fn(cls, converter, _cattrs_omit_if_default=True)
)


@frozen
class Timings:
    """
    Wall-clock times of one request, in seconds, as the engine measured them.

    Args:
        ttft_s: From the request's submission to its first token; None where no token was emitted.
        prefill_s: Spent in forwards that evaluated its prompt.
        decode_s: From the first emitted token to the last.
        request_s: From submission to the end.
    """

    ttft_s: float | None
    prefill_s: float
    decode_s: float
    request_s: float


@frozen
class TimingsRecord:
    """
    `Timings` and the two rates they give.

    Args:
        steady_tokens_per_s: Tokens after the first over `decode_s`: what decoding itself reaches.
        request_tokens_per_s: All tokens over `request_s`: what the caller got, waiting and prefill included.
    """

    ttft_s: float | None
    prefill_s: float
    decode_s: float
    request_s: float
    steady_tokens_per_s: float | None
    request_tokens_per_s: float | None


@frozen
class WidthRecord:
    """One width class: see `power_core.shapes.WidthClass`."""

    identity: str
    widths: list[int]
    costs: list[float]


@frozen
class ShapeRecord:
    """The numeric paths the request ran on, and what was promised about them."""

    level: str
    identity: str
    decode: WidthRecord
    prefill: WidthRecord
    evidence: dict[str, JSON]


@frozen
class SamplingRecord:
    """
    Sampling settings: see `power_core.request.SamplingSpec`.

    Args:
        seed: The seed the draws were keyed with, drawn or given, in decimal: JSON numbers end at 2**53.
        logit_bias: (id, bias) pairs by ascending id; None is a ban, whose -inf JSON cannot hold.
        processors: Names of the user hooks; their code is not part of the evidence.
        json_schema_sha256: Digest of the schema, None without one.
        regex_sha256: Digest of the pattern, None without one.
    """

    temperature: float
    top_k: int
    typical_p: float
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_window: int
    logit_bias: list[tuple[int, float | None]]
    seed: str
    logprobs: int | None
    processors: list[str]
    json_schema_sha256: str | None
    regex_sha256: str | None


@frozen
class RequestRecord:
    """
    What was asked. The prompt is bound by its digest only, so that a receipt can be shown without it.

    Args:
        prompt_sha256: Digest of the list of prompt token ids.
        spec: The strategy asked for; None left it to the engine.
        draft_max: The proposal bound asked for (K); None left it to the engine.
    """

    prompt_sha256: str
    prompt_tokens: int
    max_tokens: int | None
    stop: list[str]
    stop_ids: list[int]
    spec: str | None
    draft_max: int | None
    sampling: SamplingRecord


@frozen
class CountsRecord:
    """What it cost: see `power_core.request.Counts`. `widths` maps rows computed (decimal) to how often."""

    rounds: int
    target_passes: int
    prefill_passes: int
    proposals: int
    drafted: int
    accepted: int
    dropped: int
    emitted: int
    replays: int
    rebuilds: int
    guard: int | None
    widths: dict[str, int]
    reused: int = 0


@frozen
class CostsRecord:
    """
    What the width policy took things to cost, in steps of one row: a cost curve for ``power simulate``.

    Args:
        rows: Rows of a forward (decimal) -> its cost.
        drafts: Strategy -> costs of asking it for 1, 2, ... tokens; empty until it was timed.
        feeds: Strategy -> costs of telling it the states of a few rows, and of each row where they are many.
    """

    rows: dict[str, float]
    drafts: dict[str, list[float]]
    feeds: dict[str, list[float]] = Factory(dict)


@frozen
class PolicyRecord:
    """
    How proposal lengths were decided.

    Args:
        name: The width policy.
        summary: Its own account of the request: see `power_core.scheduler.policy.RequestWidth`.
        costs: The costs it decided by in the end.
    """

    name: str
    summary: dict[str, JSON]
    costs: CostsRecord


@frozen
class FileRecord:
    """One file of an artifact: its name beside the manifest, its size and its SHA-256 in 64 hex digits."""

    name: str
    nbytes: int
    sha256: str


@frozen
class ArtifactRecord:
    """
    A drafter that was loaded; its digests were computed when it was.

    Args:
        source: Where its files came from, as whoever admitted them said; the same for *revision* and *license*.
        revision: See there.
        license: See there.
    """

    name: str
    kind: str
    files: list[FileRecord]
    source: str
    revision: str
    license: str


@frozen
class UsageRecord:
    """Token counts as OpenAI's API has them."""

    prompt_tokens: int
    completion_tokens: int


@frozen
class OutputRecord:
    """
    Digests of what was emitted.

    Args:
        token_ids_sha256: Over the list of ids; equal for every exact strategy.
        text_sha256: Over the text, as a JSON string.
        logprobs_sha256: Over the list of log-probability entries, None where none were asked for.
        sha256: Over the other fields of this record: one digest to compare whole outputs by.
    """

    token_ids_sha256: str
    text_sha256: str
    logprobs_sha256: str | None
    finish_reason: str
    usage: UsageRecord
    sha256: str


@frozen
class ReceiptBody:
    """
    Everything a receipt says.

    Args:
        strategy: The strategy that ran.
        drafter: Distribution and version that provided it, None for plain decoding.
        policy: How proposal lengths were decided, None for plain decoding.
        environment: Interpreter, machine, package versions, and under ``target`` the backend's own facts.
        source: Revision of a checkout as git describes it, else the package and its version.
        warnings: What a reader should know before trusting the numbers.
        artifacts: The drafters it loaded; absent where there were none.
    """

    target: TargetIdentity
    strategy: str
    drafter: str | None
    policy: PolicyRecord | None
    shape: ShapeRecord
    request: RequestRecord
    counts: CountsRecord
    timings: TimingsRecord
    output: OutputRecord
    environment: dict[str, JSON]
    source: str
    warnings: list[str]
    artifacts: list[ArtifactRecord] = Factory(list)

    @property
    def summary(self) -> str:
        """One line for a reader."""
        return (
            f"{self.target.name}, {self.strategy}, exactness {self.shape.level}: "
            f"{self.output.usage.completion_tokens} tokens in {self.counts.target_passes} target passes, "
            f"finished by {self.output.finish_reason}"
        )
