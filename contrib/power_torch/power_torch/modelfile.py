"""A model's files: what can be known without its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import torch

from power_core.artifacts.files import FileStamp, file_sha256
from power_core.artifacts.gguf import GgufFile
from power_core.types import TargetIdentity
from power_torch.hf_config import HfConfig
from power_torch.hparams import HyperParameters
from power_torch.tokenizer import GgufTokenizer, TorchTokenizer
from power_torch.tokenizer_hf import HfTokenizer
from power_torch.vocabulary import read_vocabulary
from power_torch.weights import ModelWeights, load_weights
from power_torch.weights_gguf import has_magic, hyper_parameters
from power_torch.weights_hf import weight_files

__all__ = ["ModelFile", "looks_like_model", "open_model"]

_TEMPLATE_KEY = "tokenizer.chat_template"


class ModelFile(Protocol):
    """A checked model, its weights unread."""

    path: Path
    hparams: HyperParameters
    tokenizer: TorchTokenizer
    identity: TargetIdentity
    nbytes: int

    def load(self, dtype: torch.dtype) -> ModelWeights:
        """
        Read the weights.

        Raises:
            ArtifactError: They are incomplete or damaged, or the file changed since it was opened.
        """


def looks_like_model(path: Path) -> bool:
    """Whether *path* is GGUF, safetensors, or a folder with a `config.json`: a look at names and magic only."""
    if path.is_dir():
        return (path / "config.json").is_file()
    return path.suffix.lower() in (".gguf", ".safetensors") or has_magic(path)


def open_model(path: Path) -> ModelFile:
    """
    Read and check everything but the weights of the model at *path*.

    Raises:
        ArtifactError: It is damaged, of another architecture, or its tokenizer is not one of this backend's.
    """
    if path.is_file() and (path.suffix.lower() == ".gguf" or has_magic(path)):
        return _Gguf(path)
    return _Folder(path)


class _Gguf:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = file = GgufFile.open(path)
        self.hparams = hyper_parameters(file)
        self.nbytes = file.file_size
        template = file.metadata.get(_TEMPLATE_KEY)
        self.tokenizer: TorchTokenizer = GgufTokenizer(
            read_vocabulary(file), template if isinstance(template, str) else None
        )
        name = str(file.metadata.get("general.name") or path.stem)
        # The digests are those that any backend computes for the file: drafters are bound to a target by them.
        self.identity = _identity(name, self.hparams, file_sha256(path), file.keys_sha256("tokenizer."))

    def load(self, dtype: torch.dtype) -> ModelWeights:
        self._file.stamp.check(self.path)
        return load_weights(self.path, dtype)


class _Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        files = weight_files(path)
        folder = files[0].parent
        self.hparams = HfConfig(folder / "config.json").hyper_parameters()
        self.nbytes = sum(file.stat().st_size for file in files)
        self._stamps = {file: FileStamp.of(file) for file in [*files, folder / "config.json"]}
        tokenizer = HfTokenizer(folder, self.hparams.vocab_size)
        self.tokenizer: TorchTokenizer = tokenizer
        digests = "".join(f"{file.name}:{file_sha256(file)}\n" for file in sorted(self._stamps))
        digest = hashlib.sha256(digests.encode()).hexdigest()
        self.identity = _identity(folder.name, self.hparams, digest, tokenizer.sha256)

    def load(self, dtype: torch.dtype) -> ModelWeights:
        for file, stamp in self._stamps.items():
            stamp.check(file)
        return load_weights(self.path, dtype)


def _identity(name: str, hparams: HyperParameters, file: str, tokenizer: str) -> TargetIdentity:
    return TargetIdentity(
        name=name,
        architecture=hparams.architecture,
        file_sha256=file,
        tokenizer_sha256=tokenizer,
        vocab_size=hparams.vocab_size,
        hidden_size=hparams.hidden_size,
        num_layers=hparams.num_layers,
    )
