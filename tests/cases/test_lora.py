"""LoRA adapters end to end: exact under every strategy, told apart in receipts, refused in one line (case 22)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cases.conftest import SECTIONS
from cases.lab import STORY, asked_after, check_kept, draft_all, fields_of, plain_fields
from parity.conftest import STRATEGIES, open_engine
from power_core.artifacts import Provenance
from power_core.artifacts.admission import admit
from power_core.artifacts.matching import installed_contracts
from power_core.cli import cli
from power_core.config import PowerConfig
from power_core.engine import Engine
from power_core.errors import ReceiptError
from power_core.evidence import verify_document
from power_core.evidence.canonical import digest
from power_core.request import GenerationRequest, SamplingSpec
from power_core.runtime import Runtime
from power_core.testing import AdversarialDrafter, OracleDrafter, recorded
from power_core.testing.gguf import tiny_hybrid, tiny_llama
from power_core.testing.gguf_drafts import tiny_dflash, tiny_dspark, tiny_mtp
from power_core.testing.gguf_lora import tiny_lora

pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")
pytest.importorskip("power_llamacpp")

OPTIONS: dict[str, Any] = {
    "spec": "off", "draft_max": 15, "threads": 1, "context_size": 512, "parallel": 3, "width_policy": "fixed"
}  # fmt: skip
SMOLLM2_SHAPES = {"blk.3.attn_q.weight": (576, 576), "blk.20.ffn_down.weight": (576, 1536)}
HYBRID_SHAPES = {"blk.0.attn_qkv.weight": (128, 64), "blk.1.attn_q.weight": (128, 64), "output.weight": (320, 64)}
Open = Callable[..., Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`m.gguf`, `one.gguf` and `two.gguf`: a model and two adapters for it."""
    folder = tmp_path_factory.mktemp("lora")
    tiny_llama(folder / "m.gguf", layers=4)
    tiny_lora(folder / "one.gguf")
    tiny_lora(folder / "two.gguf", seed=2)
    return folder


@pytest.fixture(scope="module")
def opened() -> Iterator[Open]:
    """Opens a model with adapters in a runtime of its own: `opened(path, (adapter, scale), ..., options...)`."""
    runtimes: list[Runtime] = []

    def open_(path: Path | str, *lora: tuple[Path, float], **options: Any) -> Engine:
        section = SECTIONS["llamacpp"] | {"lora": [{"file": str(file), "scale": scale} for file, scale in lora]}
        runtimes.append(Runtime(PowerConfig(sections={"llamacpp": section}, spec_mtp_recurrent_snapshots=2)))
        return open_engine(runtimes[-1], path, **(OPTIONS | options))

    yield open_
    for runtime in runtimes:
        runtime.close()


@pytest.fixture(scope="module")
def adapted(folder: Path, opened: Open) -> Engine:
    return opened(folder / "m.gguf", (folder / "one.gguf", 1.0))


def requests(engine: Engine, **fields: Any) -> list[GenerationRequest]:
    """Repetitive and other text, greedy and seeded."""
    seeded = SamplingSpec(temperature=0.7, seed=3, logprobs=2)
    texts = [STORY * 4, "alpha beta gamma\n" * 8, "Once upon a time"]
    samplings = [SamplingSpec(logprobs=1), seeded]
    return [
        engine.request(text, max_tokens=24, sampling=sampling, **fields) for text in texts for sampling in samplings
    ]


@pytest.mark.parametrize("draft_max", [1, 3, 7, 15])
def test_every_strategy_is_plain_decoding(adapted: Engine, draft_max: int) -> None:
    """Alone and in a batch; proposals that are right, wrong from the first token on, and looked up."""
    asked = requests(adapted, spec="off")
    plain = [adapted.complete(request) for request in asked]
    expected = [fields_of(result) for result in plain]
    drafted = 0
    for spec in STRATEGIES:
        each = [request.with_(spec=spec, draft_max=draft_max) for request in asked]
        results = [adapted.complete(request) for request in each]
        assert [fields_of(result) for result in results] == expected
        assert [fields_of(result) for result in adapted.generate_many(each)] == expected
        drafted += sum(result.counts.drafted for result in results)
    assert drafted > 0
    texts = recorded(*((*result.prompt_token_ids, *result.token_ids) for result in plain))
    for drafter in (OracleDrafter(texts, 320), *(AdversarialDrafter(texts, 320, wrong_at=n) for n in (0, 2))):
        assert [fields_of(result) for result in draft_all(adapted, drafter, asked, draft_max)] == expected


def test_scale_zero_is_the_model_and_scale_one_is_not(folder: Path, opened: Open, adapted: Engine) -> None:
    """Every field, log-probabilities included."""
    base, off = opened(folder / "m.gguf"), opened(folder / "m.gguf", (folder / "one.gguf", 0.0))
    texts = [plain_fields(engine, requests(engine)) for engine in (base, off, adapted)]
    assert texts[0] == texts[1]
    assert all(one != other for one, other in zip(texts[0], texts[2], strict=True))


def test_two_adapters_replicas_and_kept_prompts(folder: Path, opened: Open) -> None:
    """Each session of a pool has both adapters, in one order; a prompt that was kept changes nothing."""
    lora = [(folder / "one.gguf", 1.0), (folder / "two.gguf", -0.5)]
    one, pool = opened(folder / "m.gguf", *lora), opened(folder / "m.gguf", *lora, replicas=2, parallel=1)
    text = one.encode(STORY * 3)
    asked = asked_after(text, [one.encode(end) for end in (" one day", " one day", " so", " nobody")], spec="suffix")
    plain = plain_fields(one, asked)
    assert [fields_of(result) for result in pool.generate_many(asked)] == plain
    for engine in (one, pool):
        assert min(result.counts.reused for result in check_kept(engine, asked, plain)) > len(text) - 16


@pytest.mark.parametrize("drafter", [tiny_dflash, tiny_dspark, tiny_mtp])
def test_drafters_bound_to_the_model_draft_for_it_with_an_adapter(
    opened: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, drafter: Callable[..., Path]
) -> None:
    """Native draft contexts beside an adapted target: whatever they propose, the text is plain; the receipt says so."""
    strategy = drafter.__name__.removeprefix("tiny_")
    pytest.importorskip(f"power_{strategy}")
    monkeypatch.setenv("POWER_ARTIFACTS_DIR", str(tmp_path / "admitted"))
    model = tiny_hybrid(tmp_path / "m.gguf", nextn_layers=1)
    lora = tiny_lora(tmp_path / "a.gguf", architecture="qwen35", shapes=HYBRID_SHAPES)
    file = drafter(tmp_path / "d.gguf", **({} if strategy == "mtp" else {"target_layers": (1, 3)}))
    with Runtime(PowerConfig(sections=SECTIONS)) as runtime:
        target, contracts = runtime.load_target(model), installed_contracts(runtime.registry)
        admit(file, name="d", target=target, provenance=Provenance("a test", "1", "CC0"), contracts=contracts)
        target.close()
    engine = opened(model, (lora, 1.0), spec=strategy, draft_max=5)
    asked = requests(engine)
    assert [fields_of(engine.complete(request)) for request in asked] == plain_fields(engine, asked)
    result = engine.complete(asked[0])
    assert result.counts.drafted > 0
    assert any("its drafter was not bound to" in warning for warning in result.receipt["body"]["warnings"])


def test_what_is_admitted_with_an_adapter_drafts_without_it(
    folder: Path, opened: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A drafter is bound to the model's file: its manifest names no adapter, and reads back."""
    pytest.importorskip("power_dflash")
    monkeypatch.setenv("POWER_ARTIFACTS_DIR", str(tmp_path / "admitted"))
    file = tiny_dflash(tmp_path / "d.gguf")
    section = {"lora": [{"file": str(folder / "one.gguf")}]}
    with Runtime(PowerConfig(sections={"llamacpp": section})) as runtime:
        target, contracts = runtime.load_target(folder / "m.gguf"), installed_contracts(runtime.registry)
        admit(file, name="d", target=target, provenance=Provenance("a test", "1", "CC0"), contracts=contracts)
        target.close()
    assert "adapters" not in (tmp_path / "admitted" / "d" / "manifest.json").read_text()
    engine = opened(folder / "m.gguf", spec="dflash", draft_max=5)
    result = engine.complete(STORY, max_tokens=8)
    assert result.counts.drafted > 0
    assert result.receipt["body"]["artifacts"][0]["name"] == "d"


def test_a_models_own_prediction_layer_drafts_with_its_adapter(opened: Open, tmp_path: Path) -> None:
    """The draft context is one of the adapted model's, whose output matrix is changed, too."""
    pytest.importorskip("power_mtp")
    model = tiny_hybrid(tmp_path / "m.gguf", nextn_layers=1)
    lora = tiny_lora(tmp_path / "a.gguf", architecture="qwen35", shapes=HYBRID_SHAPES)
    engine = opened(model, (lora, 1.0), spec="mtp", draft_max=4)
    asked = requests(engine)
    results = [engine.complete(request) for request in asked]
    assert [fields_of(result) for result in results] == plain_fields(engine, asked)
    assert all(result.counts.drafted > 0 for result in results)


def test_a_receipt_names_the_adapters(folder: Path, opened: Open, adapted: Engine) -> None:
    """By digest and scale; another one in their place is found, and without any receipts are as they were."""
    document = adapted.complete("Hello", max_tokens=4).receipt
    target = document["body"]["target"]
    assert target["adapters"] == [{"sha256": adapted.model.adapters[0].sha256, "scale": 1.0}]  # type: ignore[attr-defined]  # llama.cpp's model
    assert [*document["body"]["environment"]["target"]["lora"].values()] == ["one.gguf * 1.0"]
    verify_document(document)
    changed = json.loads(json.dumps(document))
    changed["body"]["target"]["adapters"][0]["scale"] = 0.5
    with pytest.raises(ReceiptError, match="was changed"):
        verify_document(changed)
    content = {"schema": changed["schema"], "body": changed["body"]}
    del changed["body"]["target"]["adapters"][0]["sha256"]
    with pytest.raises(ReceiptError, match="body is not one of"):
        verify_document({**content, "digest": digest(content)})
    base = opened(folder / "m.gguf").complete("Hello", max_tokens=4).receipt["body"]
    assert "adapters" not in base["target"]
    assert "lora" not in base["environment"]["target"]
    assert base["shape"]["identity"] != document["body"]["shape"]["identity"]


def test_the_command_line_takes_adapters_from_its_configuration(folder: Path, tmp_path: Path) -> None:
    """Two texts for two settings; a bad adapter ends it with status 2 and one line."""
    settings = tmp_path / "settings.toml"

    def run(lora: str) -> Any:
        settings.write_text(f"[plugin.llamacpp]\nflash_attention = 'off'\nlora = [{lora}]\n")
        flags = ["--model", str(folder / "m.gguf"), "--threads", "1", "--max-tokens", "8", "--spec", "off", "--raw"]
        return CliRunner().invoke(cli, ["--config", str(settings), "generate", *flags, "The wind"])

    plain, adapted = run(""), run(f"{{file = '{folder / 'one.gguf'}'}}")
    assert (plain.exit_code, adapted.exit_code) == (0, 0), adapted.stderr
    assert plain.stdout != adapted.stdout
    bad = tiny_lora(tmp_path / "bad.gguf", architecture="gemma3")
    for lora, told in (
        (f"{{file = '{bad}'}}", f"{bad}: the adapter is for architecture 'gemma3'"),
        (f"{{file = '{tmp_path / 'none.gguf'}'}}", "none.gguf"),
        (f"{{file = '{folder / 'one.gguf'}', factor = 2}}", "lora[0]: unknown key 'factor'"),
    ):
        refused = run(lora)
        assert refused.exit_code == 2
        assert told in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_with_an_adapter_of_two_layers(opened: Open, tmp_path: Path) -> None:
    """SmolLM2, whose width classes are measured anew with the adapter on: another text, by every strategy the same."""
    lora = tiny_lora(tmp_path / "a.gguf", shapes=SMOLLM2_SHAPES, rank=8, gain=0.2)
    engines = [opened("smollm2", *each, parallel=1, draft_max=7) for each in ([], [(lora, 0.0)], [(lora, 1.0)])]
    base, off, plain = (plain_fields(engine, requests(engine)) for engine in engines)
    assert base == off
    assert base != plain
    adapted = engines[-1]
    drafted = 0
    for spec in STRATEGIES:
        results = [adapted.complete(request) for request in requests(adapted, spec=spec)]
        assert [fields_of(result) for result in results] == plain
        drafted += sum(result.counts.drafted for result in results)
    assert drafted > 0
    asked = asked_after(
        adapted.encode(STORY * 4), [adapted.encode(end) for end in (" One day", " Nobody")], spec="suffix"
    )
    assert all(result.counts.reused > 32 for result in check_kept(adapted, asked, plain_fields(adapted, asked)))
