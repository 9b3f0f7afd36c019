"""
What a drafter's GGUF file must satisfy before llama.cpp may see it.

llama.cpp trusts drafter files: a missing size is a division by zero, a foreign vocabulary scrambled logits, a norm of
another type garbage. Each check stands for a way to end the process or to draft nonsense in silence, found by feeding
it malformed files (llama-cpp-python 0.3.36) or read in its sources.
"""

from __future__ import annotations

from pathlib import Path

from power_core.errors import CapabilityError
from power_llamacpp.draft_dflash import dflash_facts, dflash_ids, dflash_tensors
from power_llamacpp.draft_facts import FIX, DraftFacts, DraftKind, check_tensors, check_values
from power_llamacpp.draft_mtp import layer_tensors, mtp_facts, mtp_tensors
from power_llamacpp.gguf_file import GgufInfo, read_gguf, refuse
from power_llamacpp.taps import available_layers, has_nextn

__all__ = ["DraftFacts", "DraftKind", "check_draft", "check_own_layer"]


def check_draft(path: Path, target: GgufInfo) -> DraftFacts:
    """
    Read *path* and check that it can draft for *target*, without calling llama.cpp; weights are read, too.

    Args:
        path: The drafter's GGUF file.
        target: What `check_gguf` returned for the target.

    Raises:
        ArtifactError: The first thing found wrong: the file, what was found, what was expected, what to do.
        CapabilityError: The target's architecture gives no hidden states, so nothing could be injected.
    """
    info = read_gguf(path)
    parts = info.metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts > 1:
        fix = "merge the parts with llama-gguf-split --merge"
        refuse(path, f"the file is one of {parts} parts", got=parts, expected="a single file", fix=fix)
    if info.architecture == "dflash":
        if not available_layers(target):
            raise CapabilityError(
                f"llama.cpp gives no hidden states of architecture {target.architecture!r}, which the drafter reads",
                plugin="llamacpp", where=str(path), got=target.architecture, fix="use a strategy that needs none",
            )  # fmt: skip
        facts = dflash_facts(info, target)
        check_tensors(info, *dflash_tensors(info, facts))
        dflash_ids(info, facts)
    elif info.architecture == "qwen35":
        if "blk.0.attn_norm.weight" in info.tensors:
            fix = "open a target of this file and let it draft for itself"
            refuse(path, "the file is a whole model", expected="a prediction layer without its trunk", fix=fix)
        facts = mtp_facts(info, target)
        check_tensors(info, *mtp_tensors(info, facts))
    else:
        name = info.architecture
        refuse(path, f"architecture {name!r} is no drafter's", got=name, expected="dflash or qwen35", fix=FIX)
    check_values(info)
    return facts


def check_own_layer(target: GgufInfo) -> DraftFacts:
    """
    Check the prediction layer inside *target*, which `check_gguf` has accepted.

    Raises:
        ArtifactError: The layer is damaged.
        CapabilityError: There is none that llama.cpp could run here.
    """
    if not has_nextn(target):
        raise CapabilityError(
            f"the target has {target.nextn_layers} prediction layers of architecture {target.architecture!r}",
            plugin="llamacpp",
            where=str(target.path),
            got=(target.architecture, target.nextn_layers),
            expected="one prediction (NextN) layer, of architecture qwen35",
            fix="give a drafter file",
        )
    facts = mtp_facts(target, target)
    block = f"blk.{target.num_layers}."
    check_tensors(target, *layer_tensors(target, facts), prefix=block)
    check_values(target, prefix=block)
    return facts
