"""``power verify``: the promise, checked on the reader's own prompts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import asdict

from power_core.cli.options import engine_options, file_path, json_option, prompt_options, sampling_options
from power_core.cli.output import print_json
from power_core.cli.prompts import check_servable, encode_prompt, read_prompt, read_text
from power_core.cli.state import State
from power_core.errors import CapabilityError

if TYPE_CHECKING:
    from power_core.capabilities import Registry
    from power_core.cli.compare import Comparison
    from power_core.config import PowerConfig
    from power_core.request import SamplingSpec
    from power_core.target import TargetModel

__all__ = ["verify"]


@click.command()
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option("-f", "--file", "files", type=file_path(), multiple=True, metavar="FILE", help="Read a prompt from FILE.")
@prompt_options
@engine_options
@click.option(
    "--spec", "specs", multiple=True, metavar="STRATEGY[,...]", help="Strategy. [default: all zero-weight ones]"
)
@sampling_options
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    *,
    prompts: Sequence[str],
    files: Sequence[Path],
    chat: bool | None,
    system: str | None,
    specs: Sequence[str],
    as_json: bool,
    **flags: Any,
) -> None:
    """
    Compare strategies with plain decoding, token by token.

    Each PROMPT (- for standard input) is decoded plainly and with each strategy. Exits with 1 where
    anything differs.
    """
    from power_core.cli.compare import compare
    from power_core.request import GenerationRequest

    texts = [read_prompt(prompt, None) for prompt in prompts] + [read_text(file) for file in files]
    texts = texts or [read_prompt(None, None)]

    with ctx.ensure_object(State).runtime(flags) as runtime:
        sampling = _repeatable(runtime.config)

        def requests(model: TargetModel) -> list[GenerationRequest]:
            prompts = [encode_prompt(model.tokenizer, text, chat=chat, system=system) for text in texts]
            limit = runtime.config.token_limit
            made = [GenerationRequest(ids, sampling=sampling, max_tokens=limit) for ids in prompts]
            for request in made:
                check_servable(request, model, runtime.config)
            return made

        comparisons = compare(runtime, requests, _strategies(runtime.registry, specs))
    identical = all(each.identical for each in comparisons)
    if as_json:
        print_json({"identical": identical, "comparisons": [asdict(each) for each in comparisons]})
    else:
        _print(comparisons)
    ctx.exit(0 if identical else 1)


def _strategies(registry: Registry, specs: Sequence[str]) -> list[str]:
    """The named strategies and chains, checked before a model is loaded; else every zero-weight one."""
    from power_core.capabilities import AUTO, OFF
    from power_core.scheduler.chains import chain_names

    if specs:
        for name in (name for spec in specs for name in chain_names(spec)):
            if name in (OFF, AUTO):
                raise click.UsageError(f"--spec {name}: name strategies; each is compared with plain decoding")
            registry.strategy(name)
        return list(specs)
    found = [item.name for item in registry.strategies if item.options.get("zero_weight")]
    if not found:
        raise CapabilityError(
            "no installed plugin provides a zero-weight strategy to compare",
            who="verify",
            fix="pip install power-ngram, or name a strategy with --spec",
        )
    return found


def _repeatable(config: PowerConfig) -> SamplingSpec:
    """The sampling settings; where nothing fixes the seed one is drawn, for both sides of a comparison."""
    return config.sampling() if config.seed is not None else config.sampling(seed=secrets.randbits(32))


def _print(comparisons: Sequence[Comparison]) -> None:
    several = any(each.prompt for each in comparisons)
    for each in comparisons:
        name = f"prompt {each.prompt + 1}, {each.strategy}" if several else each.strategy
        click.echo(f"{name}: {_verdict(each)}")


def _verdict(each: Comparison) -> str:
    cost = (
        f"{each.tokens} tokens, {each.passes} passes against {each.plain_passes}, "
        f"accepted {each.accepted} of {each.drafted} proposed, exactness {each.level}"
    )
    if each.identical:
        return f"identical ({cost})"
    found = each.first_difference
    if found is None:
        return f"DIFFERS in text or finish reason only ({cost})"
    gap = "unknown" if found.top2_logit_gap is None else f"{found.top2_logit_gap:.4g}"
    off, other = (
        "the end" if token is None else f"{token} {text!r}"
        for token, text in ((found.off, found.off_text), (found.strategy, found.strategy_text))
    )
    return f"DIFFERS at token {found.index}: off {off}, {each.strategy} {other}; top-2 logit gap there {gap} ({cost})"
