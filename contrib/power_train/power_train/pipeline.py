"""The whole way from prompts to admitted-quality files; every part continues what an interrupted run left."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Protocol

import torch
from attrs import asdict, frozen
from power_torch.weights import load_weights

from power_core.artifacts.admission import check_provenance, write_manifest
from power_core.artifacts.contract import ArtifactContract, Provenance
from power_core.artifacts.manifest import checked_name
from power_core.errors import ArtifactError
from power_core.names import one_of
from power_core.target import TargetModel
from power_core.types import JSON
from power_train.batches import split
from power_train.dataset import Dataset, Sequence, check_header, num_tokens, open_dataset, write_header
from power_train.evaluate import drafts_of, measure
from power_train.export import exported
from power_train.generate import GenerateOptions, generate
from power_train.prompts import encode_prompts, read_prompts, text_digest
from power_train.report import acceptance_json, data_json, save_curve, write_receipt
from power_train.setup import Trainable, default_layers, drafter_shape, make_trainable, mask_token
from power_train.train import CurvePoint, TrainOptions, measured_pace, take_weights, train
from power_train.write import Quantization, write_gguf, write_safetensors

__all__ = ["DRAFT_MAX", "Plan", "Progress", "run"]

DRAFT_MAX = (1, 3, 5, 7)
_STEPS = "steps"
_CHECKPOINT = "checkpoint.pt"
_RECEIPT = "receipt.json"
_FEWEST_PROMPTS = 2  # the answer to the first is held out
_GENERATING_SHARE = 0.5  # of the time given, where text is missing; the rest is for training


class Progress(Protocol):
    """What a run tells whoever watches."""

    def generating(self, tokens: int, total: int) -> None:
        """So many tokens of text are there."""

    def training(self, step: int, steps: int, point: CurvePoint) -> None:
        """So many steps are done."""

    def note(self, text: str) -> None:
        """Something worth a line."""


@frozen
class Plan:
    """
    What to train and how long.

    Args:
        kind: `dflash-v1`, `dflash2`, `dspark` or `mtp-head`.
        path: File of the target.
        text: Files with prompts.
        out: Folder of the run.
        data: Folder of the text; several drafters can share one.
        minutes: Time for generation and training together.
        steps: Optimizer steps instead of a time.
        tokens: Most tokens of text.
        seed: Of everything.
        processes: Generating processes.
        slots: Sequences each decodes together.
        threads: Of training.
        sequences: Of a batch.
        draft_vocab: Ids the drafter can propose.
        ffn: Width of the feed-forward; None takes the target's.
        blocks: Decoder layers of the drafter; an MTP head has one.
        kv_heads: Its key and value heads; None takes the target's.
        start: Folder of a finished run whose weights it starts from, or None.
        quantizations: GGUF files to write.
        name: Of the artifact.
        provenance: Written into the manifests.
    """

    kind: str
    path: Path
    text: tuple[Path, ...]
    out: Path
    data: Path
    minutes: float
    steps: int | None
    tokens: int
    seed: int
    processes: int
    slots: int
    threads: int
    sequences: int
    draft_vocab: int
    ffn: int | None
    blocks: int
    kv_heads: int | None
    start: Path | None
    quantizations: tuple[Quantization, ...]
    name: str
    provenance: Provenance


def run(plan: Plan, model: TargetModel, contracts: Mapping[str, ArtifactContract], progress: Progress) -> list[Path]:
    """
    Generate, train, export and describe.

    Args:
        plan: What to do.
        model: The target, loaded: gives tokenizer and identity.
        contracts: Installed ones, by kind.
        progress: Told how it goes.

    Returns:
        Manifests of the files written.

    Raises:
        PowerError: What is wrong with the prompts, the target or the folder.
    """
    _check_plan(plan, contracts)
    torch.set_num_threads(plan.threads)
    plan.out.mkdir(parents=True, exist_ok=True)
    dataset, minutes = _text(plan, model, progress)
    weights = load_weights(plan.path, torch.bfloat16)
    trained, held_out = split(dataset)
    if not trained:
        raise _too_little(f"of {len(dataset.sequences)} answers 0 are there to learn from", plan)
    mask_id = mask_token(model.tokenizer, weights.token_embd)
    layers = tuple(dataset.header["layers"])
    shape = drafter_shape(
        plan.kind, weights.hparams, layers, mask_id, ffn=plan.ffn, blocks=plan.blocks, kv_heads=plan.kv_heads
    )

    def made() -> Trainable:
        trainable = make_trainable(shape, weights, dataset, trained, draft_vocab=plan.draft_vocab, seed=plan.seed)
        if plan.start is not None:
            progress.note(f"{take_weights(trainable, plan.start / _CHECKPOINT)} tensors taken from {plan.start}")
        return trainable

    options = TrainOptions(_steps(plan, minutes, made, dataset, trained, progress), plan.seed, plan.sequences)
    trainable = made()
    result = train(
        trainable, dataset, trained, options, plan.out / _CHECKPOINT,
        lambda step, point: progress.training(step, options.steps, point),
    )  # fmt: skip
    greedy = [item for item in held_out if not item.is_sampled]
    found = measure(drafts_of(trainable.module, trainable.vocabulary, trainable.matrix), dataset, greedy, DRAFT_MAX)
    progress.note(
        "held out, tokens a target pass: " + ", ".join(f"K={k} {v.tokens_per_pass:.2f}" for k, v in found.items())
    )
    drafter = exported(trainable, context=model.trained_context, tokenizer_sha256=model.identity.tokenizer_sha256)
    files = [write_safetensors(plan.out / "safetensors", drafter)]
    files += [write_gguf(plan.out / _gguf_name(plan, q), drafter, q) for q in plan.quantizations]
    save_curve(plan.out / "loss.png", result.curve, f"{plan.kind} for {model.identity.name}")
    write_receipt(plan.out / _RECEIPT, {
        "kind": plan.kind, "target": asdict(model.identity), "shape": asdict(shape),
        "data": data_json(dataset, len(trained), len(held_out)), "draft_vocab_coverage": trainable.vocabulary.coverage,
        "options": asdict(options), "curve": [asdict(point) for point in result.curve],
        "held_out": acceptance_json(found), "threads": plan.threads,
        "started_from": None if plan.start is None else _history(plan.start),
        "seconds": {"wall": round(result.wall_seconds, 1), "core": round(result.core_seconds, 1)},
    })  # fmt: skip
    return [
        write_manifest(
            file.parent, name=plan.name, target=model, provenance=plan.provenance, contracts=contracts,
            weights=None if file.suffix == ".safetensors" else file.name,
        )
        for file in files
    ]  # fmt: skip


def _check_plan(plan: Plan, contracts: Mapping[str, ArtifactContract]) -> None:
    """Refuse at once what would be refused when the files are written, after all the training."""
    for name in (plan.name, *(_gguf_name(plan, q) for q in plan.quantizations)):
        checked_name(name)
    check_provenance(plan.provenance)
    if plan.kind not in contracts:
        raise ArtifactError(
            f"no installed plugin knows drafters of kind {plan.kind!r}", who="power-train", got=plan.kind,
            expected=one_of(contracts), fix="install the plugin of its kind",
        )  # fmt: skip
    if plan.start is not None:
        for name in (_CHECKPOINT, _RECEIPT):
            if not (plan.start / name).is_file():
                raise ArtifactError(
                    f"no {name}", who="power-train", where=str(plan.start), fix="--start-from a finished run"
                )


def _gguf_name(plan: Plan, quantization: Quantization) -> str:
    return f"{plan.name}-{quantization}.gguf"


def _too_little(found: str, plan: Plan) -> ArtifactError:
    return ArtifactError(
        found, who="power-train", where=", ".join(map(str, plan.text)), expected=f"{_FEWEST_PROMPTS} or more",
        fix="pass --text FILE with more prompts",
    )  # fmt: skip


def _history(start: Path) -> dict[str, JSON]:
    """What the run that this one started from says of itself; it may have started from another."""
    receipt = json.loads((start / _RECEIPT).read_text(encoding="utf-8"))
    return {key: receipt.get(key) for key in ("options", "seconds", "draft_vocab_coverage", "started_from")}


def _text(plan: Plan, model: TargetModel, progress: Progress) -> tuple[Dataset, float]:
    """The run's text, written as far as tokens and time allow, and the minutes that are left for training."""
    identity = model.identity
    options = GenerateOptions(
        model=plan.path,
        layers=default_layers(identity.num_layers),
        end_ids=tuple(sorted(model.tokenizer.end_ids)),
        seed=plan.seed,
        slots=plan.slots,
        processes=plan.processes,
        tokens=plan.tokens,
        seconds=None if plan.steps is not None else plan.minutes * 60 * _GENERATING_SHARE,
    )
    prompts = read_prompts(plan.text)
    header = _header(plan, model, options)
    check_header(plan.data, header)
    found = num_tokens(plan.data)
    if found and (found >= plan.tokens or (plan.out / _STEPS).exists()):  # or training has begun: its text stays
        return open_dataset(plan.data), plan.minutes
    longest = options.capacity - options.max_new
    encoded = encode_prompts(prompts, model.tokenizer, longest=longest)
    if len(encoded) < _FEWEST_PROMPTS:
        raise _too_little(f"{len(encoded)} of {len(prompts)} prompts have 1 to {longest} tokens", plan)
    write_header(plan.data, header)  # only now: prompts that are refused must not claim the folder
    order = torch.randperm(len(encoded), generator=torch.Generator().manual_seed(plan.seed)).tolist()
    progress.note(f"{len(encoded)} prompts; {options.processes} processes write text")
    generate(
        [encoded[i] for i in order], options, plan.data, lambda tokens: progress.generating(tokens, options.tokens)
    )
    return open_dataset(plan.data), plan.minutes * (1 - _GENERATING_SHARE)


def _header(plan: Plan, model: TargetModel, options: GenerateOptions) -> dict[str, JSON]:
    """What decides the text, besides time."""
    return {
        "format": 1,
        "target": asdict(model.identity),
        "text_sha256": text_digest(plan.text),
        "hidden_size": model.identity.hidden_size,
        "layers": list(options.layers),
        "end_ids": list(options.end_ids),
        **{
            name: getattr(options, name)
            for name in ("seed", "max_new", "max_question", "capacity", "sampled_share", "temperature", "top_k")
        },
    }


def _steps(
    plan: Plan,
    minutes: float,
    made: Callable[[], Trainable],
    dataset: Dataset,
    trained: Many[Sequence],
    progress: Progress,
) -> int:
    """Steps of the run, decided once: from the time given and the pace of this machine."""
    path = plan.out / _STEPS
    if not path.exists():
        steps = plan.steps
        if steps is None:
            pace = measured_pace(made(), dataset, list(trained), TrainOptions(1000, plan.seed, plan.sequences))
            steps = max(1, int(minutes * 60 / pace))
            progress.note(f"{pace:.2f} s a step: {steps} steps")
        path.write_text(f"{steps}\n", encoding="utf-8")
    return int(path.read_text(encoding="utf-8"))
