"""The backend and its models: files to weights, tokenizer, identity and sessions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from power_core.draft_context import NEXTN_STATE
from power_core.errors import BackendError, ConfigError
from power_core.shapes import ShapeProfile
from power_core.target import SessionOptions, Tokenizer
from power_core.types import TargetIdentity
from power_llamacpp.config import Choice, LlamaCppConfig
from power_llamacpp.context import NativeModel
from power_llamacpp.draft_check import check_own_layer
from power_llamacpp.gguf_check import GgufInfo, check_gguf
from power_llamacpp.lora import LoraAdapter, open_adapters
from power_llamacpp.native import library, log_bridge
from power_llamacpp.session import LlamaCppSession, context_size_of
from power_llamacpp.sizes import session_bytes
from power_llamacpp.taps import check_hidden_layers
from power_llamacpp.threads import ThreadChoice, choose_threads
from power_llamacpp.tokenizer import LlamaCppTokenizer

__all__ = ["LlamaCppBackend", "LlamaCppModel"]

PLUGIN = "llamacpp"
TEMPLATE_KEY = "tokenizer.chat_template"


class LlamaCppBackend:
    """
    GGUF files through llama.cpp.

    Args:
        config: The plugin's section of the configuration.
    """

    def __init__(self, config: LlamaCppConfig | None = None) -> None:
        self.config = config or LlamaCppConfig()

    def claims(self, path: Path) -> bool:
        if path.suffix.lower() == ".gguf":
            return True
        try:
            with path.open("rb") as file:
                return file.read(4) == b"GGUF"
        except OSError:
            return False

    def load(self, path: Path) -> LlamaCppModel:
        """
        Check *path* and load its vocabulary; the weights follow with the first session.

        Raises:
            ArtifactError: The file, or an adapter for it, is damaged, foreign or unsupported; native code has not
                seen it.
            BackendError: llama.cpp cannot be loaded, or refuses the vocabulary.
            ConfigError: An adapter is named twice.
        """
        log_bridge().threshold = self.config.log_level
        info = check_gguf(path)
        return LlamaCppModel(path, info, self.config, adapters=open_adapters(self.config.lora, info))


class LlamaCppModel:
    """
    One GGUF file.

    Args:
        path: The file.
        info: What its header says; the file has been checked.
        config: The plugin's configuration.
        adapters: What is added to the weights; they have been checked against the file.
        profile: Width classes to use instead of measuring; settings left to the probe are then off.

    Attributes:
        identity: Digests and sizes; the whole file has been read for it, once per file and machine.
        tokenizer: The file's tokenizer.
        trained_context: Positions the model was trained for.
    """

    def __init__(
        self,
        path: Path,
        info: GgufInfo,
        config: LlamaCppConfig,
        *,
        adapters: Sequence[LoraAdapter] = (),
        profile: ShapeProfile | None = None,
    ) -> None:
        self.path = path
        self.info = info
        self.config = config
        self.trained_context = info.context_length
        self.adapters = tuple(adapters)
        self._profile = profile
        self._vocabulary = NativeModel(path, vocab_only=True)
        template = info.metadata.get(TEMPLATE_KEY)
        self.tokenizer: Tokenizer = LlamaCppTokenizer(self._vocabulary, template if isinstance(template, str) else None)
        self.identity = TargetIdentity(
            name=str(info.metadata.get("general.name") or path.stem),
            architecture=info.architecture,
            file_sha256=info.sha256(),
            tokenizer_sha256=info.tokenizer_sha256(),
            vocab_size=self.tokenizer.vocab_size,
            hidden_size=info.hidden_size,
            num_layers=info.num_layers,
            adapters=tuple(adapter.identity for adapter in self.adapters),
        )
        self._weights: dict[tuple[bool, bool], NativeModel] = {}  # by repacked, with prediction layers
        self._matrices: dict[str, NDArray[np.float32]] = {}
        self._threads: ThreadChoice | None = None
        self._is_closed = False

    def open_session(self, options: SessionOptions) -> LlamaCppSession:
        """
        Allocate state and measure (or read from cache) the session's profile.

        Raises:
            BackendError: The library cannot provide it, or the model is closed.
            ArtifactError: The model's prediction layer is asked for and damaged, or an adapter's file was changed.
            CapabilityError: Hidden states are asked for that llama.cpp does not give.
            ConfigError: The options contradict each other or the model.
        """
        if self._is_closed:
            raise BackendError("the model is closed", plugin=PLUGIN, where=str(self.path), fix="load it again")
        options = self._checked(options)
        flash_attention, extra_buffers, profile = self._decide(options)
        key = extra_buffers, NEXTN_STATE in options.hidden_layers
        if key not in self._weights:
            self._weights[key] = NativeModel(
                self.path, extra_buffers=key[0], prediction_layers=key[1], adapters=self._checked_adapters()
            )
        return LlamaCppSession(
            self._weights[key],
            options,
            profile=profile,
            config=self.config,
            info=self.info,
            flash_attention=flash_attention,
        )

    def session_bytes(self, options: SessionOptions) -> int:
        """The most bytes a session of *options* can take, from the file's header."""
        context_size = context_size_of(options, self.trained_context)
        return session_bytes(self.info, options, self.config, context_size, self.adapters)

    def _checked_adapters(self) -> list[tuple[Path, float]]:
        """Files and scales for llama.cpp, which is about to read the files: they are still those that were checked."""
        for adapter in self.adapters:
            adapter.info.stamp.check(adapter.path)
        return [(adapter.path, adapter.scale) for adapter in self.adapters]

    def _checked(self, options: SessionOptions) -> SessionOptions:
        """*options* with every default filled in."""
        check_hidden_layers(self.info, options.hidden_layers)
        if NEXTN_STATE in options.hidden_layers:
            check_own_layer(self.info)
        most = library().llama_max_parallel_sequences()
        for name, value, low, high, key in (
            ("max_sequences", options.max_sequences, 1, most, "parallel"),
            ("max_rows", options.max_rows, 1, self.config.prefill_rows, "spec_draft_max"),
            ("rollback_rows", options.rollback_rows, 0, self.config.prefill_rows - 2, "spec_mtp_recurrent_snapshots"),
            ("threads", options.threads or 1, 1, 512, "threads"),
        ):
            if not low <= value <= high:
                raise ConfigError(
                    f"{name} is {value}",
                    plugin=PLUGIN,
                    got=value,
                    expected=f"{low} to {high}",
                    fix=f"set another {key}",
                )
        return evolve(
            options,
            context_size=context_size_of(options, self.trained_context),
            threads=options.threads or self._default_threads(),
        )

    def _default_threads(self) -> int:
        """Threads of sessions that name none; tried once, on the weights as they are in the file."""
        if self._threads is None:
            self._threads = ThreadChoice(usable_cores())
            if self._threads.threads > 1:
                weights = NativeModel(self.path)
                try:
                    self._threads = choose_threads(weights, self._threads.threads)
                finally:
                    weights.close()
        return self._threads.threads

    def _decide(self, options: SessionOptions) -> tuple[bool, bool, ShapeProfile]:
        """Flash attention, extra buffers and profile: measured, unless the profile was given."""
        if self._profile is not None:
            return self.config.flash_attention is Choice.ON, self.config.extra_buffers is Choice.ON, self._profile
        from power_llamacpp.probe import measure

        self._checked_adapters()
        result = measure(
            self.path,
            self.info,
            config=self.config,
            threads=options.threads or 1,
            max_rows=options.max_rows,
            context=options.context_size,
            rollback_rows=options.rollback_rows,
            adapters=self.adapters,
        )
        return result.settings.flash_attention, result.settings.extra_buffers, result.profile

    def matrix(self, which: Literal["token_embd", "output"]) -> NDArray[np.float32]:
        """
        float32[vocab, hidden], read-only, from the file and not from llama.cpp; see `SharedWeights`.

        Raises:
            ArtifactError: The tensor's type cannot be read.
        """
        name = f"{which}.weight"
        if name not in self.info.tensors:
            name = "token_embd.weight"  # a file without an output matrix uses the embedding for both
        if name not in self._matrices:
            values = self.info.read(name).astype(np.float32, copy=False)
            values.flags.writeable = False
            self._matrices[name] = values
        return self._matrices[name]

    def facts(self) -> Mapping[str, Any]:
        """Build and model facts for `power doctor` and receipts."""
        lib = library()
        return {
            "backend": "llama.cpp",
            "llama_cpp_python": version("llama-cpp-python"),
            "llama_cpp": lib.llama_version().decode(),
            "system_info": " ".join(lib.llama_print_system_info().decode().split()),
            "file": self.path.name,
            "file_bytes": self.info.file_size,
            "architecture": self.info.architecture,
            "trained_context": self.trained_context,
            "kv_type": str(self.config.kv_type),
            "swa_full": self.config.swa_full,
            **({"lora": self._lora_facts()} if self.adapters else {}),
            **self._thread_facts(),
        }

    def _lora_facts(self) -> dict[str, str]:
        """File and scale of each adapter; whole digests are in the identity."""
        return {each.sha256[:12]: f"{each.path.name} * {each.scale}" for each in self.adapters}

    def _thread_facts(self) -> dict[str, Any]:
        if self._threads is None or not self._threads.milliseconds:
            return {}
        tried = {str(threads): value for threads, value in self._threads.milliseconds.items()}
        advice = self._threads.advice
        return {"threads_tried_ms": tried, "threads": self._threads.threads, **({"advice": [advice]} if advice else {})}

    def close(self) -> None:
        """Free weights and vocabulary; contexts of open sessions go first. Idempotent."""
        self._is_closed = True
        for weights in self._weights.values():
            weights.close()
        self._weights.clear()
        self._vocabulary.close()


def usable_cores() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
