"""The backend and its models: files to weights, tokenizer, identity and sessions."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from attrs import evolve
from numpy.typing import NDArray

from power_core.errors import BackendError, CapabilityError, ConfigError
from power_core.target import SessionOptions
from power_core.types import JSON
from power_torch.cache import KvCache
from power_torch.config import TorchConfig
from power_torch.device import compute_dtype, find_device, hardware, kernels_digest, multiplies_bf16
from power_torch.linear import has_packed_kernels
from power_torch.modelfile import ModelFile, looks_like_model, open_model
from power_torch.network import Network, PreparedWeights
from power_torch.probe import PROMPT_ROWS
from power_torch.profiles import profile_of
from power_torch.session import TorchSession, use_threads
from power_torch.sizes import session_bytes, weight_bytes
from power_torch.weights import ModelWeights

__all__ = ["TorchBackend", "TorchModel"]

PLUGIN = "torch"
_MOST_SEQUENCES, _MOST_ROWS, _MOST_THREADS = 256, 1024, 512


class TorchBackend:
    """
    Llama-family models in torch.

    Args:
        config: The plugin's section of the configuration.
    """

    def __init__(self, config: TorchConfig | None = None) -> None:
        self.config = config or TorchConfig()

    def claims(self, path: Path) -> bool:
        return looks_like_model(path)

    def load(self, path: Path) -> TorchModel:
        """
        Check *path* and load its tokenizer; the weights follow when they are needed.

        Raises:
            ArtifactError: The file is damaged, foreign or unsupported.
            ConfigError: The configured device is not there.
        """
        device = find_device(self.config.device)
        return TorchModel(open_model(path), self.config, device)


class TorchModel:
    """
    One model.

    Args:
        file: Its files, checked.
        config: The plugin's configuration.
        device: Where it computes.

    Attributes:
        identity: Digests and sizes.
        tokenizer: Text to ids and back.
        trained_context: Positions the model was trained for.
        dtype: Of matrices and activations.
    """

    def __init__(self, file: ModelFile, config: TorchConfig, device: torch.device) -> None:
        self.identity = file.identity
        self.tokenizer = file.tokenizer
        self.trained_context = file.hparams.trained_context
        self.dtype = compute_dtype(config.dtype, device)
        self._file = file
        self._config = config
        self._device = device
        self._loaded: ModelWeights | None = None
        self._prepared: PreparedWeights | None = None
        self._matrices: dict[str, NDArray[np.float32]] = {}
        self._sessions: weakref.WeakSet[TorchSession] = weakref.WeakSet()
        self._is_closed = False

    def open_session(self, options: SessionOptions) -> TorchSession:
        """
        Allocate state and measure the session's profile, or take it from those measured before.

        Raises:
            ArtifactError: The weights are incomplete or damaged.
            BackendError: The model is closed, or there is not enough memory.
            CapabilityError: The output of a block is asked for that is not there.
            ConfigError: The options contradict each other or the model.
        """
        context = self._checked(options)
        use_threads(options.threads)
        positions, prefill_rows = self._room(context, options)
        hparams = self._file.hparams
        try:
            weights = self._prepare()
            network = Network(hparams, weights, positions, options.hidden_layers)
            cache = KvCache(hparams, options.max_sequences, positions, self._device)
        except (RuntimeError, MemoryError) as exc:
            raise BackendError(f"torch cannot provide the session: {exc}", plugin=PLUGIN, fix="lower ctx") from exc
        profile = profile_of(
            network,
            cache,
            max_rows=options.max_rows,
            prefill_rows=prefill_rows,
            sequences=options.max_sequences,
            facts=self._numeric_facts(),
            folder=self._config.probe_cache_dir,
        )
        session = TorchSession(
            network,
            cache,
            profile=profile,
            context_size=context,
            max_sequences=options.max_sequences,
            threads=options.threads,
        )
        self._sessions.add(session)
        return session

    def session_bytes(self, options: SessionOptions) -> int:
        """
        The most bytes a session of *options* can take, from the file's header.

        Before the first session that includes what the weights take beyond the bytes of their file: they
        are computed with in another type, and laid out anew.

        Raises:
            BackendError, CapabilityError, ConfigError: As `open_session`.
        """
        positions, prefill_rows = self._room(self._checked(options), options)
        hparams = self._file.hparams
        work = session_bytes(hparams, options, positions=positions, prefill_rows=prefill_rows, dtype=self.dtype)
        if self._prepared is not None:
            return work
        for_good, loading = weight_bytes(hparams, self.dtype)
        return max(for_good - self._file.nbytes, 0) + max(work, loading)

    def _room(self, context: int, options: SessionOptions) -> tuple[int, int]:
        """Cache rows of a sequence, and rows of the widest forward."""
        prefill_rows = max(self._config.prefill_rows, options.max_rows)
        return max(context, PROMPT_ROWS + prefill_rows), prefill_rows  # the probe's rows must fit as well

    def _checked(self, options: SessionOptions) -> int:
        """The context size, once every option is within bounds."""
        if self._is_closed:
            raise BackendError("the model is closed", plugin=PLUGIN, where=str(self._file.path), fix="load it again")
        context = options.context_for(self.trained_context)
        for name, value, most, key in (
            ("context_size", context, self.trained_context, "ctx"),
            ("max_sequences", options.max_sequences, _MOST_SEQUENCES, "parallel"),
            ("max_rows", options.max_rows, _MOST_ROWS, "spec_draft_max"),
            ("threads", options.threads or 1, _MOST_THREADS, "threads"),
        ):
            if not 1 <= value <= most:
                raise ConfigError(
                    f"{name} is {value}", plugin=PLUGIN, got=value, expected=f"1 to {most}", fix=f"set another {key}"
                )
        if options.max_rows < options.max_sequences:
            raise ConfigError(
                f"max_rows is {options.max_rows}",
                plugin=PLUGIN,
                got=options.max_rows,
                expected=f"a row for each of {options.max_sequences} sequences",
            )
        layers = self.identity.num_layers
        outside = [layer for layer in options.hidden_layers if not 0 <= layer < layers]
        if outside:
            raise CapabilityError(
                f"there is no block {outside[0]} whose output could be given",
                plugin=PLUGIN,
                got=outside[0],
                expected=f"0 to {layers - 1}",
            )
        return context

    def _weights(self) -> ModelWeights:
        if self._loaded is None:
            self._loaded = self._file.load(self.dtype)
        return self._loaded

    def _prepare(self) -> PreparedWeights:
        if self._prepared is None:
            weights = self._weights()
            self._prepared = PreparedWeights.of(weights, self._device)
            self._loaded = evolve(weights, blocks=())  # embedding and output are all that is asked for from now on
        return self._prepared

    def _numeric_facts(self) -> dict[str, JSON]:
        """What decides a row's bits, beside the row counts that are measured."""
        return {
            "file_sha256": self.identity.file_sha256,
            "torch": torch.__version__,
            "hardware": hardware(self._device),
            "kernels": kernels_digest(self._device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "packed_kernels": self._device.type == "cpu" and has_packed_kernels(),
        }

    def matrix(self, which: Literal["token_embd", "output"]) -> NDArray[np.float32]:
        """
        float32[vocab, hidden], read-only: the embedding, not scaled, or the output matrix.

        Raises:
            ArtifactError: The weights are incomplete or damaged.
            BackendError: The model is closed.
        """
        if self._is_closed:
            raise BackendError("the model is closed", plugin=PLUGIN, where=str(self._file.path), fix="load it again")
        weights = self._weights()
        name = "token_embd" if weights.is_tied else which
        if name not in self._matrices:
            matrix = weights.token_embd if name == "token_embd" else weights.output
            values = matrix.float().numpy()
            if matrix.dtype == torch.float32:
                values = values.view()  # a view of the weights themselves, of which only this one is read-only
            values.flags.writeable = False
            self._matrices[name] = values
        return self._matrices[name]

    def facts(self) -> Mapping[str, Any]:
        """Build and model facts for `power doctor` and receipts."""
        return {
            "backend": "torch",
            "torch": torch.__version__,
            "device": str(self._device),
            "hardware": hardware(self._device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "file": self._file.path.name,
            "file_bytes": self._file.nbytes,
            "architecture": self.identity.architecture,
            "trained_context": self.trained_context,
            **self._advice(),
        }

    def _advice(self) -> dict[str, Any]:
        if self.dtype is not torch.bfloat16 or multiplies_bf16(self._device):
            return {}
        return {"advice": ["bf16 is emulated here, slower than float32: leave dtype of [plugin.torch] on auto"]}

    def close(self) -> None:
        """Free the weights; open sessions are shut down first. Idempotent."""
        self._is_closed = True
        for session in list(self._sessions):
            session.shutdown()
        self._loaded = self._prepared = None
        self._matrices.clear()
