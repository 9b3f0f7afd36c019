"""What is kept between processes: found under its own key only, trusted only whole, and left aside where asked."""

from pathlib import Path

import pytest

from power_core import user_cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POWER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_keys_do_not_collide(folder: Path) -> None:
    """A document is found under its own kind and key only, and a later one replaces it whole."""
    user_cache.store("a", {"k": 1}, [1])
    user_cache.store("a", {"k": 1}, {"x": None})
    assert user_cache.load("a", {"k": 1}) == {"x": None}
    assert user_cache.load("b", {"k": 1}) is None
    assert user_cache.load("a", {"k": 2}) is None
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"content": [1], "sha256": ""}', b"\xff", b"[" * 100_000])
def test_a_damaged_file_is_a_miss(folder: Path, damage: bytes) -> None:
    """Also one that is no JSON, and one that only a machine without a stack limit could parse."""
    user_cache.store("a", {"k": 1}, [1])
    (file,) = folder.rglob("*.json")
    file.write_bytes(damage)
    assert user_cache.load("a", {"k": 1}) is None


def test_another_folder_takes_the_place_of_the_users(folder: Path, tmp_path: Path) -> None:
    user_cache.store("a", {"k": 1}, [1], root=tmp_path / "mine")
    assert user_cache.load("a", {"k": 1}, root=tmp_path / "mine") == [1]
    assert user_cache.load("a", {"k": 1}) is None


def test_what_is_found_again_replaces_what_was_kept() -> None:
    """Within the block a kind is missing, others are not; what is stored there is found after it."""
    user_cache.store("a", {}, 1)
    user_cache.store("b", {}, 1)
    with user_cache.found_again("a"):
        assert (user_cache.load("a", {}), user_cache.load("b", {})) == (None, 1)
        user_cache.store("a", {}, 2)
        assert user_cache.load("a", {}) is None
    assert user_cache.load("a", {}) == 2


def test_misses_are_told_of(tmp_path: Path) -> None:
    """What has to be found out is announced by its kind, within the block; what is there is not."""
    told: list[str] = []
    user_cache.store("a", {"key": 1}, "known", root=tmp_path)
    user_cache.load("b", {"key": 1}, root=tmp_path)
    with user_cache.misses_told(told.append):
        assert user_cache.load("a", {"key": 1}, root=tmp_path) == "known"
        assert user_cache.load("a", {"key": 2}, root=tmp_path) is None
        with user_cache.found_again("a"):
            user_cache.load("a", {"key": 1}, root=tmp_path)
    user_cache.load("b", {"key": 1}, root=tmp_path)
    assert told == ["a", "a"]
