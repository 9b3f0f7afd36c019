"""Malformed drafters of all four kinds, a process each: no death, no hang, no silent acceptance."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from power_core.artifacts import open_tensors
from power_core.artifacts.matching import installed_contracts
from power_core.errors import ArtifactError
from power_core.plugins import load_plugins
from power_core.testing import gguf_drafts
from power_core.testing.gguf import tiny_llama

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
    | rope_theta\ is\ (huge|odd)                              # published bases are as large; they cost acceptance
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


KEYS = (
    "attention.causal", "attention.layer_norm_rms_epsilon", "attention.scale", "attention.sliding_window",
    "attention.sliding_window_pattern", "attention.value_length", "block_size", "embedding_length_out",
    "embedding_scale", "expert_count", "final_logit_softcapping", "has_confidence_head", "hyper_connection_count",
    "logit_scale", "mask_token_id", "pooling_type", "rope.dimension_sections", "rope.freq_base", "rope.scaling.factor",
    "rope.scaling.type", "sample_from_anchor", "selector_top_k", "target_layers", "whatever",
)  # fmt: skip
VALUES = (0, 2, 0.0, 2.0, math.nan, 1e9, True, False, "none", "", [1, 3], [8, 0, 0, 0], [True, False], [1.0, 3.0])


def _refusal(check: Callable[[], object]) -> str | None:
    try:
        check()
    except ArtifactError as exc:
        return str(exc)
    return None


@pytest.mark.parametrize("kind", ["dflash-v1", "dflash2", "dspark"])
def test_what_a_contract_admits_the_native_loader_takes(tmp_path: Path, kind: str) -> None:
    """A key that the loader refuses is refused when the file is admitted, not when somebody first decodes with it."""
    from power_llamacpp.draft_check import check_draft
    from power_llamacpp.gguf_check import check_gguf

    make = {
        "dflash-v1": gguf_drafts.tiny_dflash,
        "dflash2": gguf_drafts.tiny_dflash2,
        "dspark": gguf_drafts.tiny_dspark,
    }
    target, path = check_gguf(tiny_llama(tmp_path / "target.gguf", layers=4)), tmp_path / "drafter.gguf"
    contract = installed_contracts(load_plugins().registry)[kind]
    found = []
    for key, value in itertools.product(KEYS, VALUES):
        make[kind](path, overrides={f"dflash.{key}": value})
        ours, native = _refusal(lambda: contract.check(open_tensors(path))), _refusal(lambda: check_draft(path, target))
        if ours is None and native is not None:
            found.append((key, value, native))
    assert found == []


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
