"""What is kept of a training run beside the drafter: a receipt to compare and a curve to look at."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from collections.abc import Sequence as Many
from importlib.metadata import version
from pathlib import Path

from power_core.types import JSON
from power_train.dataset import Dataset
from power_train.evaluate import Acceptance
from power_train.train import CurvePoint

__all__ = ["acceptance_json", "data_json", "save_curve", "write_receipt"]


def data_json(dataset: Dataset, trained: int, held_out: int) -> dict[str, JSON]:
    """What the drafter learned from, with a digest of the text itself."""
    digest = hashlib.sha256()
    for part in sorted(dataset.folder.glob("shard-*")):
        for name in ("sequences.bin", "tokens.bin"):
            digest.update((part / name).read_bytes())
    header = dict(dataset.header)
    return {
        "sha256": digest.hexdigest(),
        "tokens": dataset.num_tokens,
        "written_by_target": sum(item.length - item.prompt_length for item in dataset.sequences),
        "sequences": len(dataset.sequences),
        "trained_sequences": trained,
        "held_out_sequences": held_out,
        "generation": header,
    }


def acceptance_json(found: Mapping[int, Acceptance]) -> dict[str, JSON]:
    """Acceptance by K."""
    return {
        str(k): {
            "rounds": each.rounds,
            "tokens_per_pass": round(each.tokens_per_pass, 4),
            "positions": [round(share, 4) for share in each.positions],
        }
        for k, each in found.items()
    }


def write_receipt(path: Path, facts: Mapping[str, JSON]) -> None:
    """Write *facts* with the versions they depend on, as JSON."""
    machine = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        **{name: version(name) for name in ("torch", "numpy", "power-train", "power-torch", "power-core")},
    }
    text = json.dumps({"format": 1, **facts, "versions": machine}, indent=1, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def save_curve(path: Path, curve: Many[CurvePoint], title: str) -> None:
    """Draw cross-entropy and the share of first predictions that hit, over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    steps = [point.step for point in curve]
    left.plot(steps, [point.cross_entropy for point in curve], color="tab:blue", linewidth=1)
    left.set(xlabel="step", ylabel="cross-entropy (blue)", title=title)
    left.grid(alpha=0.3)
    right = left.twinx()
    right.plot(steps, [point.hits for point in curve], color="tab:orange", linewidth=1)
    right.set(ylabel="first prediction is the target's (orange)", ylim=(0, 1))
    figure.savefig(path, dpi=100, metadata={"Software": None})  # the same bytes for the same curve
