"""Tokenizers of Hugging Face model folders: `tokenizer.json`, and what the files beside it say of special tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from power_core.types import TokenId
from power_torch.refusal import refuse
from power_torch.special import SpecialToken, SpecialTokens
from power_torch.tokenizer import TorchTokenizer, byte_value

__all__ = ["HfTokenizer"]

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


class HfTokenizer(TorchTokenizer):
    """
    The tokenizer of a model folder.

    Args:
        folder: With `tokenizer.json`; `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json`
            and `config.json` are read where they are there.
        vocab_size: Rows of the embedding: there may be more than the tokenizer has tokens.

    Attributes:
        sha256: Digest of the files that decide text, ids and where generation ends.

    Raises:
        ArtifactError: A file is missing or cannot be read.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        file = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
            document = json.loads(file.read_text(encoding="utf-8"))
        except Exception as exc:  # noqa: BLE001 - the library raises Exception itself
            refuse(file, f"it cannot be read: {exc}", expected="the model's tokenizer", fix="download the folder again")
        self._settings = _document(folder / "tokenizer_config.json")
        added = [token for token in document.get("added_tokens", []) if token["id"] < vocab_size]
        names = {token_id: token for token, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        if max(names) >= vocab_size:
            refuse(file, f"it has token id {max(names)}", got=max(names), expected=f"ids below vocab_size {vocab_size}")
        spellings = [names.get(i, f"[UNUSED_{i}]") for i in range(vocab_size)]
        super().__init__(
            spellings,
            SpecialTokens(SpecialToken(token["content"], token["id"], bool(token["special"])) for token in added),
            self._template_source_of(folder),
        )
        self._is_named = names
        self._added = {token["id"] for token in added}
        self.special_ids = frozenset(token["id"] for token in added if token["special"])
        self._is_byte_level = '"ByteLevel"' in json.dumps(document.get("decoder"))
        self.bos_id, self.eos_id = self._role("bos_token"), self._role("eos_token")
        self.end_ids = frozenset(self._ends(folder))
        begun = self._tokenizer.encode("").ids
        self.adds_bos = self.bos_id is not None and begun[:1] == [self.bos_id]
        present = [folder / name for name in _FILES if (folder / name).is_file()]
        parts = (f"{path.name}:{hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in present)
        self.sha256 = hashlib.sha256("".join(parts).encode()).hexdigest()

    def _plain(self, text: str, *, is_after_special: bool) -> list[TokenId]:  # noqa: ARG002 - tokenizer.json decides
        self._tokenizer.encode_special_tokens = True  # spellings of special tokens are plain text here
        ids: list[TokenId] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _piece(self, token_id: TokenId) -> bytes:
        spelling = self._spellings[token_id]
        if token_id in self.special_ids or token_id not in self._is_named:
            return b""
        if token_id in self._added:
            return spelling.encode()
        if self._is_byte_level:
            return b"".join(byte_value(symbol) for symbol in spelling)
        if len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
            return bytes([int(spelling[3:5], 16)])
        return spelling.replace("\u2581", " ").encode()

    def _role(self, name: str) -> TokenId | None:
        value = self._settings.get(name)
        spelling = value.get("content") if isinstance(value, dict) else value
        return self._tokenizer.token_to_id(spelling) if isinstance(spelling, str) else None

    def _ends(self, folder: Path) -> set[TokenId]:
        """EOS by every file that names one."""
        ends = {self.eos_id}
        for name in ("config.json", "generation_config.json"):
            value = _document(folder / name).get("eos_token_id")
            ends |= set(value) if isinstance(value, list) else {value}
        return {i for i in ends if isinstance(i, int) and 0 <= i < self.vocab_size}

    def _template_source_of(self, folder: Path) -> str | None:
        file = folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        source = self._settings.get("chat_template")
        if isinstance(source, list):  # several by name
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        return source if isinstance(source, str) else None


def _document(path: Path) -> Mapping[str, Any]:
    """A JSON object, empty where the file is absent."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        refuse(path, f"it cannot be read: {exc}", fix="download the folder again")
    return value if isinstance(value, dict) else {}
