"""The backend as the core uses it: claims, loading, identity, options, closing, and cost of import."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve
from power_llamacpp.config import Choice, LlamaCppConfig
from power_llamacpp.context import NativeModel
from power_llamacpp.gguf_check import check_gguf
from power_llamacpp.native import WAIT_POLICY, LogBridge, interrupts_deferred, set_wait_policy
from power_llamacpp.plugin import make_llamacpp
from power_llamacpp.target import LlamaCppBackend, LlamaCppModel

from power_core.capabilities import Registry
from power_core.draft_context import NEXTN_STATE
from power_core.errors import ArtifactError, BackendError, CapabilityError, ConfigError, PowerError, RequestError
from power_core.plugins import load_plugins
from power_core.target import ChatMessage, RowBatch, SessionOptions, TargetBackend
from power_core.testing import one_class
from power_core.testing.gguf import tiny_llama

pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target") / "tiny.gguf", chat_template=None)


def load(file: Path) -> LlamaCppModel:
    """The model with a profile made by hand instead of a probe."""
    return LlamaCppModel(file, check_gguf(file), LlamaCppConfig(), profile=one_class()(SessionOptions()))


def test_importing_the_plugin_loads_nothing_heavy() -> None:
    """Hooks are registered without llama.cpp, numpy or jinja2."""
    code = "import sys, power_llamacpp.plugin; print([m for m in ('llama_cpp','numpy','jinja2') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_entry_point_offers_the_backend() -> None:
    """The installed plugin registers the target `llamacpp` with its configuration."""
    registry: Registry = load_plugins(environ={}).registry
    entry = registry.targets.get("llamacpp")
    assert entry.config is LlamaCppConfig
    assert isinstance(make_llamacpp(LlamaCppConfig()), TargetBackend)


def test_backend_claims_gguf_by_suffix_or_magic(file: Path, tmp_path: Path) -> None:
    """A look at name or first bytes; a missing file claims nothing and raises nothing."""
    blob = tmp_path / "blob"
    blob.write_bytes(file.read_bytes()[:64])
    (tmp_path / "text").write_text("hello")
    backend = LlamaCppBackend()
    assert [backend.claims(p) for p in (file, blob, tmp_path / "text", tmp_path / "none", tmp_path)] == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_damaged_file_is_refused_before_native_code(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A truncated file never reaches llama.cpp."""
    monkeypatch.setattr("power_llamacpp.target.NativeModel", lambda *_, **__: pytest.fail("native code"))
    path = tmp_path / "cut.gguf"
    path.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ArtifactError):
        LlamaCppBackend().load(path)


def test_identity_is_by_content(file: Path) -> None:
    """Digest, sizes and architecture come from the file."""
    model = load(file)
    identity = model.identity
    assert identity.file_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (identity.architecture, identity.vocab_size, identity.hidden_size, identity.num_layers) == (
        "llama",
        320,
        64,
        2,
    )
    assert model.trained_context == 2048
    assert model.facts()["architecture"] == "llama"
    model.close()


def test_session_of_a_loaded_model_decodes(file: Path) -> None:
    """The first session loads the weights; a second shares them; closing the model ends both."""
    model = load(file)
    sessions = [model.open_session(SessionOptions(context_size=64)) for _ in range(2)]
    batch = RowBatch(4)
    batch.add_chain(0, 0, [5, 6], 1)
    ids = []
    for session in sessions:
        session.open(0)
        ids.append(session.forward(batch, session.profile.decode).greedy(1))
    assert ids[0] == ids[1]
    assert len(model._weights) == 1
    model.close()
    model.close()
    for call in (lambda: sessions[0].length(0), lambda: model.open_session(SessionOptions())):
        with pytest.raises(BackendError, match="closed"):
            call()


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"max_sequences": 0}, ConfigError, "max_sequences is 0"),
    ({"max_sequences": 10_000}, ConfigError, "max_sequences is 10000"),
    ({"max_rows": 513}, ConfigError, "max_rows is 513 .expected 1 to 512.; set another spec_draft_max"),
    ({"rollback_rows": -1}, ConfigError, "rollback_rows is -1"),
    ({"threads": -2}, ConfigError, "threads is -2"),
    ({"context_size": 4096}, ConfigError, "context_size is 4096"),
    ({"hidden_layers": (1,)}, CapabilityError, "does not give the output of block 1 .expected blocks 0 to 0"),
    ({"hidden_layers": (NEXTN_STATE,)}, CapabilityError, "0 prediction layers of architecture 'llama'"),
])  # fmt: skip
def test_options_that_cannot_be_met_are_refused(
    file: Path, changes: dict[str, object], error: type[PowerError], message: str
) -> None:
    """Before the weights are loaded, in one line."""
    model = load(file)
    with pytest.raises(error, match=message):
        model.open_session(evolve(SessionOptions(), **changes))
    assert not model._weights
    model.close()


def test_file_without_a_template_says_what_to_do(file: Path) -> None:
    """Chats need a template; raw prompts do not."""
    model = load(file)
    with pytest.raises(RequestError, match="no chat template") as caught:
        model.tokenizer.encode_chat([ChatMessage("user", "hi")])
    assert caught.value.fix == "use --raw"
    model.close()


def test_configuration_refuses_unknown_words() -> None:
    """Misspelt choices fail when the configuration is read."""
    assert LlamaCppConfig(flash_attention="on").flash_attention is Choice.ON
    with pytest.raises(ValueError, match="sometimes"):
        LlamaCppConfig(flash_attention="sometimes")
    with pytest.raises(ConfigError, match="prefill_rows is 1"):
        LlamaCppConfig(prefill_rows=1)


def test_wait_policy_is_set_unless_the_user_set_one() -> None:
    """Workers soon sleep at barriers by default; any OpenMP wait setting of the user's wins."""
    environ: dict[str, str] = {}
    set_wait_policy(environ)
    assert environ == WAIT_POLICY
    for name, value in (("OMP_WAIT_POLICY", "ACTIVE"), ("KMP_BLOCKTIME", "200"), ("GOMP_SPINCOUNT", "5")):
        chosen = {name: value}
        set_wait_policy(chosen)
        assert chosen == {name: value}


def test_log_lines_are_joined_levelled_and_kept_for_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of lines are joined, progress dots dropped, quiet levels held back, the first error kept."""
    bridge = LogBridge("warning")
    lines: list[tuple[str, str]] = []

    class Logger:
        def __getattr__(self, level: str) -> object:
            return lambda line: lines.append((level, line))

    monkeypatch.setattr(bridge, "_logger", Logger())
    for level, text in (
        (2, b"info\n"),
        (3, b"half a "),
        (5, b"warning\n"),
        (2, b"...."),
        (5, b"..\n"),
        (4, b"bad\xff\n"),
    ):
        bridge.write(level, text)
    assert lines == [("warning", "half a warning"), ("error", "bad\ufffd")]
    assert bridge.reason() == ": bad\ufffd"
    bridge.forget()
    assert bridge.reason() == ""


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """Python's own handler: processes that run tests side by side ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_while_a_model_loads_is_not_lost(
    file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A signal in llama.cpp's log callback, where ctypes would drop it, interrupts when the call is over."""
    monkeypatch.setattr(LogBridge, "write", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        NativeModel(file)
    assert capfd.readouterr().err == ""
    with pytest.raises(BackendError), interrupts_deferred():
        raise BackendError("the block's own")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_refused_model_says_why(tmp_path: Path) -> None:
    """The reason that llama.cpp logged is part of the error."""
    path = tiny_llama(tmp_path / "bad.gguf", omit=["output_norm.weight"])
    with pytest.raises(BackendError, match="output_norm"):
        NativeModel(path)
