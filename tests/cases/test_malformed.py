"""Malformed drafters of all four kinds, a process each: no death, no hang, no silent acceptance."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

for needed in (
    "power_llamacpp",
    "power_torch.drafting",
    "power_dflash",
    "power_dspark",
    "power_mtp",
    "gguf",
    "safetensors",
):
    pytest.importorskip(needed)

ACCEPTED, REFUSED = 0, 10  # as cases.malformed has them, which imports all of the above
# What the contracts allow on purpose: optional parts, defaults that the format's own readers have, other good values.
HARMLESS = re.compile(
    r"""
    as\ it\ is
    | blk\.\d\.attn_v\.weight\ missing                          # keys serve as values
    | (conf_proj|confidence_head\.proj)\.bias\ missing
    | dflash\.(attention\.key_length|attention\.value_length|rope\.dimension_count|rope\.freq_base)\ missing
    | dflash\.(attention\.causal|sample_from_anchor|has_confidence_head)\ missing
    | (attention_bias|confidence_head_with_markov|enable_confidence_head|head_dim|hidden_act|layer_types)\ missing
    | (markov_head_type|markov_rank|sample_from_anchor|draft_vocab_size)\ missing
    | ((dflash|qwen35)\.context_length|max_position_embeddings)\ is\ (huge|odd)
    | (dflash\.|)(block_size|selector_top_k)\ is\ odd
    | (tokenizer\.ggml\.|)mask_token_id\ is\ odd
    | (rms_norm_eps|rope_theta)\ is\ (huge|odd)                 # finite: they cost acceptance
    | (output|blk\.4\.nextn\.shared_head_norm)\.weight\ missing   # the embedding, and the last norm, serve
    | qwen35\.(rope\.freq_base|rope\.dimension_count|full_attention_interval)\ missing
    | qwen35\.(full_attention_interval|ssm\.conv_kernel)\ is\ odd
    | model_type\ is\ [\w-]+                                    # the published key `architectures` decides
    """,
    re.VERBOSE,
)
ROOT = Path(__file__).resolve().parents[2]


def judged(start: int, step: int) -> list[tuple[str, int, str]]:
    """Name, exit code and message of every *step*-th mutant."""
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    child = subprocess.run(
        [sys.executable, "-m", "cases.malformed", f"{start}:{step}"], check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return [json.loads(line) for line in child.stdout.splitlines()]


def assert_no_surprise(found: list[tuple[str, int, str]]) -> None:
    assert [each for each in found if each[1] not in (ACCEPTED, REFUSED)] == []  # a signal is a negative code
    accepted = [name for name, code, _ in found if code == ACCEPTED]
    assert [name for name in accepted if not HARMLESS.fullmatch(name.split(": ", 1)[1])] == []
    assert [name for name, code, _ in found if code == REFUSED and name.endswith("as it is")] == []
    for name, code, message in found:
        assert code == ACCEPTED or (message and "\n" not in message), name


def test_a_sample_of_malformed_drafters() -> None:
    """Every fortieth of the campaign below."""
    found = judged(13, 40)
    assert len(found) >= 30
    assert_no_surprise(found)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_malformed_drafters_of_all_kinds() -> None:
    """Over a thousand: each is refused in one line, or is as good as the original and changes no token."""
    found = judged(0, 1)
    assert len(found) > 1000
    assert_no_surprise(found)
    accepted = sum(code == ACCEPTED for _, code, _ in found)
    print(f"{len(found)} files: {len(found) - accepted} refused, {accepted} harmless, 0 deaths, 0 hangs")
