"""``power generate``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from power_core.cli import stats as counting
from power_core.cli import trace as tracing
from power_core.cli.decode import run_request
from power_core.cli.options import engine_options, file_path, json_option, prompt_options, sampling_options
from power_core.cli.output import print_json
from power_core.cli.progress import open_engine
from power_core.cli.prompts import check_servable, encode_prompt, read_prompt, read_text
from power_core.cli.state import EXIT_INTERRUPTED, State
from power_core.types import FinishReason, TokenId

if TYPE_CHECKING:
    from power_core.capabilities import Registry
    from power_core.config import PowerConfig
    from power_core.request import Result
    from power_core.scheduler.admission import Deadline
    from power_core.scheduler.stats import EngineStats
    from power_core.target import TargetModel

__all__ = ["generate"]


def _biases(_ctx: click.Context, option: click.Parameter, values: Sequence[str]) -> dict[TokenId, float]:
    """``ID=V`` pairs: a token id and what is added to its logit."""
    biases = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not ID=V, a token id and a number", param=option) from None
    return biases


@click.command()
@click.argument("prompt", required=False)
@click.option("-f", "--file", type=file_path(), metavar="FILE", help="Read the prompt from FILE.")
@prompt_options
@engine_options
@click.option("--spec", "spec_mode", metavar="STRATEGY[,...]|auto|off", help="How to speculate; the text is the same.")
@sampling_options
@click.option("--logit-bias", callback=_biases, multiple=True, metavar="ID=V", help="Add V to the logit of token ID.")
@click.option("--stop", multiple=True, metavar="S", help="End before this text.")
@click.option("--stop-id", type=int, multiple=True, metavar="N", help="End at this token id.")
@click.option("--json-schema", type=file_path(), metavar="FILE", help="Constrain the output to this JSON schema.")
@click.option("--logprobs", type=int, metavar="N", help="In the JSON document: the N most likely tokens at each.")
@click.option("--deadline", type=float, metavar="S", help="End after S seconds, loading included, with what there is.")
@click.option("--prompt-cache-key", metavar="KEY", help="Keep the prompt's state, and reuse what KEY kept before.")
@click.option("--stats", is_flag=True, help="Say on standard error how it was decoded: policy, widths, counters.")
@click.option("--trace", is_flag=True, help="Colour tokens by origin, and sum up.")
@click.option(
    "--receipt", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the receipt to FILE."
)
@json_option
@click.pass_context
def generate(
    ctx: click.Context,
    /,
    *,
    prompt: str | None,
    file: Path | None,
    chat: bool | None,
    system: str | None,
    logit_bias: Mapping[TokenId, float],
    stop: Sequence[str],
    stop_id: Sequence[TokenId],
    json_schema: Path | None,
    logprobs: int | None,
    prompt_cache_key: str | None,
    stats: bool,
    trace: bool,
    receipt: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """
    Generate text from a prompt.

    PROMPT is text, or - for standard input, which is read as well where there is neither PROMPT nor -f. Exits
    with 130 where Ctrl-C ended the text early.
    """
    from power_core.request import GenerationRequest

    state = ctx.ensure_object(State)
    text = read_prompt(prompt, file)
    started = time.monotonic()
    if receipt is not None:
        _check_writable(receipt)
    elif logprobs is not None and not as_json:
        raise click.UsageError("--logprobs: only the document of --json has them, and the receipt their digest")
    with state.runtime(flags) as runtime:
        config = runtime.config
        if prompt_cache_key is not None:
            _check_kept(config)
        _check_artifacts(config, runtime.registry)
        sampling = config.sampling(
            logit_bias=logit_bias,
            logprobs=logprobs,
            json_schema=None if json_schema is None else read_text(json_schema),
        )
        requests: list[GenerationRequest] = []

        def ask(model: TargetModel) -> None:
            request = GenerationRequest(
                encode_prompt(model.tokenizer, text, chat=chat, system=system),
                sampling=sampling,
                max_tokens=config.token_limit,
                stop=tuple(stop),
                stop_ids=frozenset(stop_id),
                started_s=started,
                prompt_cache_key=prompt_cache_key,
            )
            check_servable(request, model, config)
            requests.append(request)

        with open_engine(runtime, deadline=_deadline(config.deadline, started), check=ask) as engine:
            result = run_request(
                engine,
                requests[0],
                lambda event: None if as_json else tracing.write_event(event, trace=trace),
                progress=True,
            )
            counted = engine.stats() if stats else None
            damaged = engine.cache.disk.damaged if engine.cache and engine.cache.disk else 0
    if damaged:
        click.echo(f"power: {damaged} files of kept prompts were damaged and are removed; the text is right", err=True)
    _report(result, stats=counted, trace=trace, receipt=receipt, as_json=as_json)
    ctx.exit(EXIT_INTERRUPTED if result.finish_reason is FinishReason.CANCELLED else 0)


def _check_kept(config: PowerConfig) -> None:
    """Refuse a key that can keep nothing: the process ends with the answer."""
    if config.prompt_cache_dir is None:
        raise click.UsageError(
            "--prompt-cache-key: nothing outlives this command without a prompt_cache_dir, in power.toml or "
            "POWER_PROMPT_CACHE_DIR; see docs/prompt-cache.md"
        )
    if config.prompt_cache_bytes == 0:
        raise click.UsageError(f"--prompt-cache-key: {config.sources['prompt_cache_bytes']} is 0, so nothing is kept")


def _check_artifacts(config: PowerConfig, registry: Registry) -> None:
    """Refuse an artifact that was named here for a strategy, named here or not, that loads none of its kind."""
    from power_core.artifacts.catalog import catalog, find
    from power_core.capabilities import AUTO, OFF
    from power_core.scheduler.chains import chain_names

    if not config.spec_artifact or config.sources["spec_artifact"] != "--artifact" or config.spec_mode == AUTO:
        return
    members = () if config.spec_mode == OFF else chain_names(config.spec_mode)
    kinds = {registry.strategy(name).options.get("artifact_kind") for name in members}
    entries = catalog(registry)
    for name in map(str.strip, config.spec_artifact.split(",")):
        manifest = find(entries, name, where="--artifact").manifest
        if manifest is not None and manifest.kind not in kinds:
            raise click.UsageError(f"--artifact: {name} is of kind {manifest.kind}; {config.spec_mode} loads none such")


def _deadline(seconds: float | None, started: float) -> Deadline | None:
    from power_core.scheduler.admission import Deadline

    return None if seconds is None else Deadline(started + seconds)


def _check_writable(file: Path) -> None:
    """Notice before decoding what would lose the receipt after it; a file that is there stays as it is."""
    if not file.parent.is_dir():
        raise click.UsageError(f"--receipt: there is no folder {file.parent}")
    existed = file.exists()
    try:
        with file.open("ab"):
            pass
        if not existed:
            file.unlink()
    except OSError as exc:
        raise click.UsageError(f"--receipt: {file} cannot be written: {exc.strerror}") from exc


def _report(result: Result, *, stats: EngineStats | None, trace: bool, receipt: Path | None, as_json: bool) -> None:
    from power_core.evidence import generation_document
    from power_core.evidence.canonical import canonical

    if as_json:
        print_json(
            generation_document(
                text=result.text,
                token_ids=result.token_ids,
                prompt_token_ids=result.prompt_token_ids,
                finish_reason=result.finish_reason,
                usage=result.usage,
                logprobs=result.logprobs,
                receipt=result.receipt,
            )
        )
    else:
        click.echo()
    if trace:
        click.echo(tracing.legend(), err=True)
        click.echo(tracing.summary(result), err=True)
    if stats is not None:
        for line in counting.lines(result, stats):
            click.echo(line, err=True)
    if receipt is not None:
        try:
            receipt.write_bytes(canonical(result.receipt) + b"\n")
        except OSError as exc:
            raise click.UsageError(f"--receipt: {receipt} cannot be written: {exc.strerror}") from exc
