"""``power train`` and ``power convert-drafter``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from power_core.cli.state import State
from power_core.errors import ArtifactError

if TYPE_CHECKING:  # `power train --help` runs without torch
    from power_core.runtime import Runtime

__all__ = ["convert", "train"]

_KINDS = ("dflash-v1", "dflash2", "dspark", "mtp-head")
_QUANTIZATIONS = ("f32", "f16", "q8_0", "q4mix")
_MOST_MINUTES = 366 * 24 * 60


def _checked_minutes(_context: click.Context, _parameter: click.Parameter, minutes: float) -> float:
    """`click.FloatRange` takes NaN, which is in no range and out of none."""
    if not 0 < minutes <= _MOST_MINUTES:
        raise click.BadParameter(f"{minutes} is not in the range 0<x<={_MOST_MINUTES}.")
    return minutes


@click.command()
@click.argument("kind", type=click.Choice(_KINDS))
@click.option("--target", metavar="NAME|PATH", required=True, help="The model to draft for.")
@click.option(
    "--text", "texts", type=click.Path(path_type=Path), multiple=True, required=True, metavar="FILE",
    help="Prompts: JSON lines, or text with blank lines between prompts.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder of the run.")
@click.option("--data", type=click.Path(path_type=Path, file_okay=False),
              help="Folder of the text, to share it between drafters. [default: OUT/text]")  # fmt: skip
@click.option("--minutes", type=float, callback=_checked_minutes, default=60.0, show_default=True,
              help="Time for training; where text is missing, half of it is for the text.")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), help="Train so many steps, whatever time it takes.")
@click.option("--tokens", type=click.IntRange(min=1), default=1_000_000, show_default=True, help="Most text.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of all that is drawn.")
@click.option("--processes", type=click.IntRange(min=1), default=lambda: os.cpu_count() or 1,
              help="Processes that write text. [default: the processors]")  # fmt: skip
@click.option("--slots", type=click.IntRange(min=1), default=128, show_default=True, help="Sequences of a process.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads of training.")
@click.option("--sequences", type=click.IntRange(min=1), default=8, show_default=True, help="Sequences of a batch.")
@click.option("--draft-vocab", type=click.IntRange(min=16), default=8192, show_default=True, help="Ids it proposes.")
@click.option("--ffn", type=click.IntRange(min=1), help="Width of its feed-forward. [default: the target's]")
@click.option("--blocks", type=click.IntRange(min=1), default=1, show_default=True, help="Its decoder layers.")
@click.option("--kv-heads", type=click.IntRange(min=1), help="Its key and value heads. [default: the target's]")
@click.option(
    "--start-from", "start", type=click.Path(path_type=Path, file_okay=False), help="A finished run to start from."
)
@click.option("--quant", "quantizations", type=click.Choice(_QUANTIZATIONS), multiple=True,
              default=("q8_0", "q4mix"), show_default=True, help="GGUF files to write.")  # fmt: skip
@click.option("--name", metavar="N", help="Of the artifact. [default: KIND]")
@click.option("--license", "license_", default="unspecified", show_default=True, help="Written into the manifests.")
@click.pass_obj
def train(
    state: State,
    /,
    *,
    kind: str,
    target: str,
    texts: tuple[Path, ...],
    out: Path,
    data: Path | None,
    minutes: float,
    steps: int | None,
    tokens: int,
    seed: int,
    processes: int,
    slots: int,
    threads: int,
    sequences: int,
    draft_vocab: int,
    ffn: int | None,
    blocks: int,
    kv_heads: int | None,
    start: Path | None,
    quantizations: tuple[str, ...],
    name: str | None,
    license_: str,
) -> None:
    """
    Train a drafter of KIND for a target on the target's own text.

    The target continues the prompts, its features are kept, and the drafter learns to say what the target says. A run
    that was interrupted continues where it stopped when it is started again with the same options. OUT receives
    safetensors, GGUF files, their manifests, `receipt.json` and `loss.png`.
    """
    if kind == "mtp-head" and blocks > 1:
        raise click.UsageError(f"--blocks {blocks}: an MTP head is one layer, applied again and again")
    from power_core.artifacts.contract import Provenance
    from power_core.artifacts.matching import installed_contracts
    from power_train.pipeline import Plan, run
    from power_train.watch import Watch
    from power_train.write import Quantization

    with state.runtime({}) as runtime, Watch() as watch:
        plan = Plan(
            kind=kind, path=_path_of(runtime, target), text=texts, out=out, data=data or out / "text",
            minutes=minutes, steps=steps, tokens=tokens, seed=seed, processes=processes, slots=slots, threads=threads,
            sequences=sequences, draft_vocab=draft_vocab, ffn=ffn, blocks=blocks, kv_heads=kv_heads, start=start,
            quantizations=tuple(Quantization(each) for each in quantizations), name=name or kind,
            provenance=Provenance("power train", f"seed {seed}", license_),
        )  # fmt: skip
        model = runtime.load_target(target)
        try:
            manifests = run(plan, model, installed_contracts(state.plugins.registry), watch)
        finally:
            model.close()
    for manifest in manifests:
        click.echo(str(manifest))
    source = "--source 'power train' --revision 1 --license LICENSE"
    click.echo(f"to draft with one: power artifacts admit FILE --target {target} {source}", err=True)


@click.command("convert-drafter")
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option("--quant", type=click.Choice(_QUANTIZATIONS), help="How a GGUF stores matrices. [default: f16]")
@click.pass_obj
def convert(state: State, src: Path, dst: Path, quant: str | None) -> None:
    """
    Convert the drafter SRC between safetensors and GGUF.

    SRC is a file of either, or a folder with one *.safetensors and its config.json. A DST that ends in .gguf becomes
    a GGUF file, any other a folder with safetensors. Metadata stays; SRC must keep the contract of its kind.
    """
    from power_core.artifacts import open_tensors
    from power_core.artifacts.matching import checked_facts, installed_contracts, match_contract
    from power_train.read import read_drafter
    from power_train.write import Quantization, write_gguf, write_safetensors

    to_gguf = dst.suffix == ".gguf"
    if quant is not None and not to_gguf:
        raise click.UsageError(f"--quant {quant} is for GGUF; give a DST that ends in .gguf")
    if dst.exists():
        raise click.UsageError(f"{dst} exists; choose another DST")
    file = open_tensors(src)
    contract = match_contract(file, installed_contracts(state.plugins.registry))
    drafter = read_drafter(file, contract.kind, checked_facts(file, contract, payload=True))
    try:
        path = write_gguf(dst, drafter, Quantization(quant or "f16")) if to_gguf else write_safetensors(dst, drafter)
    except OSError as exc:
        raise ArtifactError(f"cannot be written: {exc.strerror or exc}", who="power-train", where=str(dst)) from exc
    click.echo(f"{path}: {contract.kind}, {path.stat().st_size:,} bytes")


def _path_of(runtime: Runtime, target: str) -> Path:
    """The file behind a model's name, or the path itself; `Runtime.load_target` judges it."""
    source = runtime.models().get(target)
    return Path(target).expanduser() if source is None else source.locate()
