"""Digests of model files, and how long they are kept."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from power_llamacpp.gguf_file import read_gguf

from power_core.errors import ArtifactError
from power_core.testing.gguf import tiny_llama

pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POWER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model file old enough for its digest to be kept."""
    path = tiny_llama(tmp_path / "t.gguf")
    os.utime(path, ns=(10**18, 10**18))
    return path


def no_hashing(*args):
    raise AssertionError("the file was hashed again")


def test_digest_is_that_of_the_file(cache_dir: Path, model: Path) -> None:
    """The digest is the file's SHA-256."""
    assert read_gguf(model).sha256() == hashlib.sha256(model.read_bytes()).hexdigest()


def test_digest_is_kept(cache_dir: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start does not hash the file again; a changed file is hashed."""
    first = read_gguf(model).sha256()
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", no_hashing)
        assert read_gguf(model).sha256() == first
    tiny_llama(model, seed=1)
    assert read_gguf(model).sha256() == hashlib.sha256(model.read_bytes()).hexdigest() != first


def test_digest_of_a_fresh_file_is_not_kept(cache_dir: Path, tmp_path: Path) -> None:
    """A file that may still change within its timestamp's tick is hashed each time."""
    read_gguf(tiny_llama(tmp_path / "fresh.gguf")).sha256()
    assert not cache_dir.exists()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"content": "00", "sha256": "00"}', b"\xff\xfe"])
def test_damaged_cache_is_a_miss(damage: bytes, cache_dir: Path, model: Path) -> None:
    """Whatever happened to a cache file, the digest is the right one and is kept again."""
    digest = read_gguf(model).sha256()
    (kept,) = cache_dir.rglob("*.json")
    sound = kept.read_bytes()
    kept.write_bytes(damage)
    assert read_gguf(model).sha256() == digest
    assert kept.read_bytes() == sound


def test_edited_cache_is_a_miss(cache_dir: Path, model: Path) -> None:
    """A content that does not match its own digest is not believed."""
    digest = read_gguf(model).sha256()
    (kept,) = cache_dir.rglob("*.json")
    kept.write_bytes(kept.read_bytes().replace(digest[:8].encode(), b"00000000"))
    assert read_gguf(model).sha256() == digest


def test_unwritable_cache_costs_time_only(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be stored, digests are computed each time."""
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("POWER_CACHE_DIR", str(tmp_path / "file"))
    assert read_gguf(model).sha256() == read_gguf(model).sha256()


def test_file_that_changed_after_reading(cache_dir: Path, model: Path) -> None:
    """The digest of another file than the one whose header was read is never returned."""
    info = read_gguf(model)
    model.write_bytes(model.read_bytes() + b"\0" * 32)
    with pytest.raises(ArtifactError, match="changed"):
        info.sha256()


def test_tokenizer_digest(cache_dir: Path, tmp_path: Path) -> None:
    """Files with one tokenizer agree whatever their weights; another id for the end of a text is another tokenizer."""
    path = tmp_path / "t.gguf"
    first, second = (read_gguf(tiny_llama(path, seed=seed)).tokenizer_sha256() for seed in (0, 1))
    other = read_gguf(tiny_llama(path, overrides={"tokenizer.ggml.eos_token_id": 2})).tokenizer_sha256()
    assert first == second != other
