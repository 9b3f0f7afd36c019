"""
Receipts: what a request was, what it cost and what came out, bound by digests that verify offline.

A receipt is a document ``{"schema", "body", "digest"}``; the digest covers schema and body. It is no
signature: it finds accidents and careless edits, not someone who recomputes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from power_core.evidence.canonical import digest, plain
from power_core.evidence.environment import process_environment, source_revision
from power_core.evidence.schema import (
    SCHEMA,
    ArtifactRecord,
    CountsRecord,
    FileRecord,
    OutputRecord,
    PolicyRecord,
    ReceiptBody,
    RequestRecord,
    SamplingRecord,
    ShapeRecord,
    Timings,
    TimingsRecord,
    UsageRecord,
    WidthRecord,
    converter,
)
from power_core.types import JSON, FinishReason, TargetIdentity, TokenId

if TYPE_CHECKING:  # a receipt is checked without numpy, which these need
    from power_core.artifacts.contract import Artifact
    from power_core.request import Counts, GenerationRequest, SamplingSpec, TokenLogprobs, Usage
    from power_core.shapes import ShapeProfile, WidthClass

__all__ = ["artifact_record", "build_receipt", "generation_document", "logprobs_json"]


def build_receipt(
    *,
    target: TargetIdentity,
    strategy: str,
    drafter_owner: str | None,
    profile: ShapeProfile,
    request: GenerationRequest,
    seed: int,
    token_ids: Sequence[TokenId],
    text: str,
    finish_reason: FinishReason,
    usage: Usage,
    logprobs: Sequence[TokenLogprobs] | None,
    counts: Counts,
    timings: Timings,
    environment: Mapping[str, JSON],
    policy: PolicyRecord | None = None,
    host: Mapping[str, JSON] | None = None,
    artifacts: Iterable[ArtifactRecord] = (),
    warnings: Iterable[str] = (),
) -> dict[str, JSON]:
    """
    Make the receipt of a finished request.

    Args:
        target: What decoded.
        strategy: The strategy that ran.
        drafter_owner: Distribution and version behind it (`Registration.owner`), None for plain decoding.
        profile: The session's measured shapes.
        request: What was asked.
        seed: The seed the draws were keyed with.
        token_ids: Emitted ids.
        text: The final text.
        finish_reason: Why the request ended.
        usage: Token counts.
        logprobs: Log-probability entries where asked for.
        counts: What it cost.
        timings: How long it took.
        environment: The target's own facts (`TargetModel.facts`); those of the process are added here.
        policy: How proposal lengths were decided, None for plain decoding.
        host: How the process was run: threads, cores, priority.
        artifacts: The drafters it loaded: see `artifact_record`.
        warnings: What the engine wants a reader to know.

    Returns:
        A JSON document for `verify_document`.

    Raises:
        ReceiptError: A number in it is not finite.
    """
    loaded = list(artifacts)
    body = ReceiptBody(
        target=target,
        strategy=strategy,
        drafter=drafter_owner,
        policy=policy,
        shape=_shape_record(profile),
        request=_request_record(request, seed),
        counts=_counts_record(counts),
        timings=_timings_record(timings, len(token_ids)),
        output=_output_record(token_ids, text, finish_reason.value, usage, logprobs_json(logprobs)),
        environment={**process_environment(), "target": plain(environment), "host": plain(host or {})},
        source=source_revision(),
        warnings=[*warnings, *_own_warnings(drafter_owner, counts), *_binding_warnings(target, loaded)],
        artifacts=loaded,
    )
    return _document(converter.unstructure(body))


def artifact_record(artifact: Artifact) -> ArtifactRecord:
    """What a receipt says about *artifact*."""
    manifest = artifact.manifest
    files = [FileRecord(file.name, file.nbytes, file.sha256) for file in manifest.files]
    origin = manifest.provenance
    return ArtifactRecord(manifest.name, manifest.kind, files, origin.source, origin.revision, origin.license)


def generation_document(
    *,
    text: str,
    token_ids: Sequence[TokenId],
    prompt_token_ids: Sequence[TokenId],
    finish_reason: FinishReason,
    usage: Usage,
    logprobs: Sequence[TokenLogprobs] | None,
    receipt: Mapping[str, JSON],
) -> dict[str, JSON]:
    """One JSON document of a result with its receipt, as ``power generate --json`` prints it."""
    return {
        "text": text,
        "token_ids": [int(token) for token in token_ids],
        "prompt_token_ids": [int(token) for token in prompt_token_ids],
        "finish_reason": finish_reason.value,
        "usage": {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens},
        "logprobs": logprobs_json(logprobs),
        "receipt": dict(receipt),
    }


def logprobs_json(entries: Sequence[TokenLogprobs] | None) -> JSON:
    """Log-probability entries as JSON; a probability of zero, whose logarithm JSON cannot hold, is null."""
    if entries is None:
        return None
    return [
        {
            "token_id": int(entry.token_id),
            "logprob": _finite(entry.logprob),
            "top": [[int(token), _finite(value)] for token, value in entry.top],
        }
        for entry in entries
    ]


def _document(body: JSON) -> dict[str, JSON]:
    content = {"schema": SCHEMA, "body": body}
    return {**content, "digest": digest(content)}


def _shape_record(profile: ShapeProfile) -> ShapeRecord:
    return ShapeRecord(
        level=profile.level.value,
        identity=profile.identity.digest,
        decode=_width_record(profile.decode),
        prefill=_width_record(profile.prefill),
        evidence=plain(profile.evidence),
    )


def _width_record(width: WidthClass) -> WidthRecord:
    return WidthRecord(width.identity.digest, [int(n) for n in width.widths], [float(c) for c in width.costs])


def _request_record(request: GenerationRequest, seed: int) -> RequestRecord:
    return RequestRecord(
        prompt_sha256=digest([int(token) for token in request.prompt]),
        prompt_tokens=len(request.prompt),
        max_tokens=request.max_tokens,
        stop=list(request.stop),
        stop_ids=sorted(request.stop_ids),
        spec=request.spec,
        draft_max=request.draft_max,
        sampling=_sampling_record(request.sampling, seed),
    )


def _sampling_record(sampling: SamplingSpec, seed: int) -> SamplingRecord:
    schema = sampling.json_schema
    if isinstance(schema, Mapping):
        schema = json.dumps(schema, sort_keys=True)  # a schema is the user's: it may hold what JSON numbers cannot
    return SamplingRecord(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        typical_p=sampling.typical_p,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repeat_penalty=sampling.repeat_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        penalty_window=sampling.penalty_window,
        logit_bias=[
            (int(token), None if bias == -math.inf else float(bias))
            for token, bias in sorted(sampling.logit_bias.items())
        ],
        seed=str(seed),
        logprobs=sampling.logprobs,
        processors=[_hook_name(hook) for hook in sampling.processors],
        json_schema_sha256=_optional_digest(schema),
        regex_sha256=_optional_digest(sampling.regex),
    )


def _counts_record(counts: Counts) -> CountsRecord:
    return CountsRecord(
        rounds=counts.rounds,
        target_passes=counts.target_passes,
        prefill_passes=counts.prefill_passes,
        proposals=counts.proposals,
        drafted=counts.drafted,
        accepted=counts.accepted,
        dropped=counts.dropped,
        emitted=counts.emitted,
        replays=counts.replays,
        rebuilds=counts.rebuilds,
        guard=counts.guard,
        widths={str(rows): times for rows, times in sorted(counts.widths.items())},
        reused=counts.reused,
    )


def _timings_record(timings: Timings, emitted: int) -> TimingsRecord:
    return TimingsRecord(
        ttft_s=timings.ttft_s,
        prefill_s=timings.prefill_s,
        decode_s=timings.decode_s,
        request_s=timings.request_s,
        steady_tokens_per_s=_rate(emitted - 1, timings.decode_s),
        request_tokens_per_s=_rate(emitted, timings.request_s),
    )


def _output_record(
    token_ids: Sequence[TokenId], text: str, finish_reason: str, usage: Usage, logprobs: JSON
) -> OutputRecord:
    parts: dict[str, Any] = {
        "token_ids_sha256": digest([int(token) for token in token_ids]),
        "text_sha256": digest(text),
        "logprobs_sha256": _optional_digest(logprobs),
        "finish_reason": finish_reason,
        "usage": {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens},
    }
    whole = digest(parts)
    return OutputRecord(**{**parts, "usage": UsageRecord(usage.prompt_tokens, usage.completion_tokens)}, sha256=whole)


def _own_warnings(drafter_owner: str | None, counts: Counts) -> list[str]:
    if drafter_owner is not None and counts.emitted > 1 and counts.proposals == 0:
        return ["the drafter made no proposal in this request: it was decoded plainly"]
    return []


def _binding_warnings(target: TargetIdentity, artifacts: Sequence[ArtifactRecord]) -> list[str]:
    if target.adapters and artifacts:
        return ["the target has adapters, which its drafter was not bound to: it may be right less often"]
    return []


def _hook_name(hook: object) -> str:
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{named.__module__}.{getattr(named, '__qualname__', named)}"


def _optional_digest(value: JSON) -> str | None:
    return None if value is None else digest(value)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None
