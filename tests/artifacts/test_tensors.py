"""Both containers: what is read, and that every damage is one line before a value is touched."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from artifacts.toy import head, write_gguf, write_safetensors
from power_core.artifacts import open_tensors
from power_core.errors import ArtifactError
from power_core.testing.gguf import tiny_llama

gguf = pytest.importorskip("gguf", reason="pip install 'power-core[testing]'")
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def raw(path: Path, header: Any, data: bytes = b"\0" * 8) -> Path:
    """A safetensors file with this header, whatever it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_safetensors_values_and_metadata(tmp_path: Path) -> None:
    """Floats come as float32, integers as they are; config.json and the header's own texts are metadata."""
    ids = np.arange(5)
    path = write_safetensors(
        tmp_path / "m.safetensors", {"a": head(), "half": head(1.5).astype(np.float16), "ids": ids}
    )
    file = open_tensors(path)
    assert (file.format, file.files) == ("safetensors", (path, tmp_path / "config.json"))
    assert file.metadata == {"__metadata__": {"format": "pt"}, "model_type": "toy", "target_layers": [1, 2]}
    assert [(t.dtype, t.shape) for t in file.tensors.values()] == [("F32", (24, 8)), ("F16", (24, 8)), ("I64", (5,))]
    assert file.read("half").dtype == np.float32
    assert np.array_equal(file.read("half"), head(1.5))
    assert file.read("ids").dtype == np.int64
    assert open_tensors(tmp_path).path == path  # the folder will do


def test_bfloat16_is_the_upper_half_of_float32(tmp_path: Path) -> None:
    """1.0, -2.5 and infinity keep their values."""
    bits = struct.pack("<3H", 0x3F80, 0xC020, 0x7F80)
    entry = {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}
    file = open_tensors(raw(tmp_path / "m.safetensors", {"x": entry}, bits))
    assert file.read("x").tolist() == [1.0, -2.5, np.inf]


@pytest.mark.parametrize("weights", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_gguf_values(tmp_path: Path, weights: str) -> None:
    """Values are those of the gguf package, in numpy's order of dimensions, whatever the type."""
    path = tiny_llama(tmp_path / "t.gguf", weights=weights)
    file, other = open_tensors(path), gguf.GGUFReader(path)
    for tensor in other.tensors:
        values = file.read(tensor.name)
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert file.tensors[tensor.name].shape == values.shape == tuple(tensor.shape.tolist())[::-1]
        assert np.array_equal(values, expected.reshape(values.shape))


def test_quantized_values_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package gguf is named where it is needed; plain types do without."""
    file = open_tensors(tiny_llama(tmp_path / "t.gguf", weights="Q8_0"))
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    assert file.read("output_norm.weight").dtype == np.float32
    with pytest.raises(ArtifactError, match=r"which the package gguf is needed to read; pip install gguf$"):
        file.read("token_embd.weight")


@pytest.mark.parametrize("write", [write_safetensors, write_gguf])
def test_a_file_that_changes_after_its_header_was_read(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """Values are never read from another file than the one that was checked."""
    path = write(tmp_path / "drafter.bin")
    if write is write_safetensors:
        path = path.rename(tmp_path / "drafter.safetensors")
    file = open_tensors(path)
    with pytest.raises(ArtifactError, match="'nothing' is missing"):
        file.read("nothing")
    path.write_bytes(path.read_bytes() + b"\0" * 32)
    with pytest.raises(ArtifactError, match="changed after it was opened"):
        file.read("head.weight")


DAMAGE = {
    "the header claims": lambda path: path.write_bytes(struct.pack("<Q", 2**63) + b"{}"),
    "the file has 3 bytes": lambda path: path.write_bytes(b"abc"),
    "the header is no JSON object": lambda path: raw(path, b"[]"),
    "the header is not JSON": lambda path: raw(path, b"{]"),
    "the key 'x' occurs twice": lambda path: raw(path, b'{"x": 1, "x": 2}'),
    "NaN is no JSON number": lambda path: raw(path, b'{"x": NaN}'),
    "the header is nested too deeply": lambda path: raw(path, b'{"x": ' + b"[" * 200_000),
    "not JSON: 'utf-8'": lambda path: raw(path, b'{"\xff": 1}'),
    "__metadata__ is": lambda path: raw(path, {"__metadata__": {"a": 1}}, b""),
    "expected dtype, shape and data_offsets": lambda path: raw(path, {"x": {**ENTRY, "more": 1}}),
    "has the type 'F8_E4M3'": lambda path: raw(path, {"x": {**ENTRY, "dtype": "F8_E4M3"}}),
    "has the shape [-2]": lambda path: raw(path, {"x": {**ENTRY, "shape": [-2]}}),
    "has the shape [True]": lambda path: raw(path, {"x": {**ENTRY, "shape": [True]}}),
    "has the shape [2.0]": lambda path: raw(path, {"x": {**ENTRY, "shape": [2.0]}}),
    "has the offsets [0]": lambda path: raw(path, {"x": {**ENTRY, "data_offsets": [0]}}),
    "takes 4 bytes (expected 8": lambda path: raw(path, {"x": {**ENTRY, "data_offsets": [0, 4]}}),
    "starts at 4": lambda path: raw(path, {"x": {**ENTRY, "data_offsets": [4, 12]}}, b"\0" * 12),
    "starts at 0 (expected 8)": lambda path: raw(path, {"x": ENTRY, "y": ENTRY}),
    "the file has 4 for them": lambda path: raw(path, {"x": ENTRY}, b"\0" * 4),
    "the file has 12 for them": lambda path: raw(path, {"x": ENTRY}, b"\0" * 12),
    "has the name ''": lambda path: raw(path, {"": ENTRY}),
}


@pytest.mark.parametrize("expected", DAMAGE)
def test_damaged_safetensors(expected: str, tmp_path: Path) -> None:
    """Each damage is refused by the header alone, in one line that says what was found."""
    path = tmp_path / "m.safetensors"
    DAMAGE[expected](path)
    with pytest.raises(ArtifactError) as caught:
        open_tensors(path)
    line = str(caught.value)
    assert expected in line
    assert line.startswith(str(path))
    assert "\n" not in line
    assert caught.value.fix


@pytest.mark.parametrize(
    ("text", "expected"),
    [("[1]", "no JSON object"), ("{", "not JSON"), ('{"__metadata__": {}}', "is the weight file's"),
     ('{"a": 1, "a": 2}', "occurs twice"), ('{"a": "' + "x" * (1 << 20) + '"}', "expected at most")],
)  # fmt: skip
def test_damaged_config(text: str, expected: str, tmp_path: Path) -> None:
    """config.json is read as strictly as the header, and named."""
    path = write_safetensors(tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ArtifactError, match=f"config.json: .*{expected}"):
        open_tensors(path)


def test_paths_that_are_no_drafter(tmp_path: Path) -> None:
    """A missing file, an empty one, something else, and folders with none or two."""
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "other").write_bytes(b"PK\3\4")
    found = {}
    for name in ("nowhere", "empty", "other", ".", "a\0b"):
        with pytest.raises(ArtifactError) as caught:
            open_tensors(tmp_path / name)
        found[name] = caught.value.what
    assert found["nowhere"] == "the file cannot be read: No such file or directory"
    assert found["empty"] == "this is an empty file"
    assert found["other"] == "this is a file that starts with b'PK\\x03\\x04'"
    assert found["."] == "the folder has 0 safetensors files"
    for name in "ab":
        write_safetensors(tmp_path / "two" / f"{name}.safetensors")
    with pytest.raises(ArtifactError, match=r"has 2 safetensors files: a.safetensors, b.safetensors"):
        open_tensors(tmp_path / "two")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), is_gguf=st.booleans())
def test_no_mutation_of_a_header_raises_anything_else(data: st.DataObject, is_gguf: bool, tmp_path: Path) -> None:
    """Flipped, cut and inserted bytes give a file that opens and reads, or an `ArtifactError` of one line."""
    path = tmp_path / ("m.gguf" if is_gguf else "m.safetensors")
    content = bytearray((write_gguf if is_gguf else write_safetensors)(path).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(len(content) - 1, 260)))
        change = data.draw(st.sampled_from(["flip", "cut", "insert", "end"]))
        if change == "flip":
            content[at] = data.draw(st.integers(0, 255))
        elif change == "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            del content[at : at + 8 if change == "cut" else None]
        if not content:
            break
    path.write_bytes(content)
    try:
        file = open_tensors(path)
        for name in file.tensors:
            file.read(name)
    except ArtifactError as exc:
        lines = str(exc).splitlines()
    else:
        lines = ["sound"]
    assert len(lines) == 1
