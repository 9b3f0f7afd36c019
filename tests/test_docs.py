"""The pages say what the code does: generated parts are current, snippets run, tables match."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import attrs
import pytest

from power_core import hookspecs
from power_core.cli.generate import generate
from power_core.config import PowerConfig
from power_core.evidence import ReceiptBody
from power_core.plugins import load_plugins
from power_core.request import GenerationRequest
from power_core.runtime import Runtime
from power_core.testing import ScriptedBackend, ScriptedTarget, inline_plugin, plain_decode, scripted_plugins

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
HOOKS = sorted(name for name in vars(hookspecs) if name.startswith("power_register_"))


def run_module(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_command_page_is_current() -> None:
    """docs/cli.md is what `make docs` would write, the commands of this repository's plugins included."""
    for package in ("power_conformance", "power_train"):
        pytest.importorskip(package)
    # In a process of its own: click keeps the help option that a command was first run with.
    printed = [sys.executable, "-c", "import generate_cli; print(generate_cli.page(), end='')"]
    page = (DOCS / "cli.md").read_text()
    assert page == subprocess.run(printed, cwd=DOCS, capture_output=True, text=True, check=True).stdout
    sections = re.findall(r"^## power (\S+)\n\nFrom `(power-\S+)`\.$", page, flags=re.MULTILINE)
    brought = load_plugins(environ={}).registry.commands
    assert {("train", "power-train"), ("new-plugin", "power-conformance")} <= set(sections)
    assert [(item.name, item.owner.partition(" ")[0]) for item in brought if item.name in dict(sections)] == sections


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_its_section(hook: str) -> None:
    """A heading with the hook's signature, and the exact signature of the callback it is given."""
    function = getattr(hookspecs, hook)
    callback = getattr(hookspecs, inspect.signature(function).parameters["register"].annotation)
    signature = str(inspect.signature(callback.__call__)).replace("(self, ", "(")
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)
    page = (DOCS / "plugin-authors.md").read_text()
    assert f"\n## {hook}(register)\n\n```python\nregister{signature}\n```\n" in page


def test_the_smallest_plugin_works(tmp_path: Path) -> None:
    """The page's plugin loads, proposes, and changes nothing."""
    page = (DOCS / "plugin-authors.md").read_text()
    (source,) = re.findall(r"```python\n(from .*?)```", page, flags=re.DOTALL)
    (tmp_path / "power_echo.py").write_text(source)
    echo = run_module("power_echo", tmp_path / "power_echo.py")
    model = tmp_path / "toy.scripted"
    model.write_bytes(b"toy")
    target = ScriptedTarget(seed=3, order=1)
    plugins = scripted_plugins(
        targets={"scripted": ScriptedBackend(lambda _path: target)}, models={"toy": model},
        more=[inline_plugin("echo", echo)],
    )  # fmt: skip
    request = GenerationRequest([1, 2], max_tokens=40)
    expected = plain_decode(target, request)
    # A cost-aware engine may well decline what this plugin proposes.
    with Runtime(PowerConfig(), plugins) as runtime, runtime.open(spec="echo", width_policy="fixed") as engine:
        result = engine.complete(request)
    assert result.token_ids == expected.token_ids
    assert result.counts.drafted > 0


def rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table after *heading*."""
    text = (DOCS / page).read_text().partition(heading)[2]
    table = re.search(r"^\|.*?(?=\n\n|\Z)", text, flags=re.DOTALL | re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def test_configuration_page_has_every_key_flag_and_default() -> None:
    """The table is that of the class, and its flags are those of `power generate`."""
    fields = {a.name: a.default for a in attrs.fields(PowerConfig) if a.name not in ("sections", "sources")}
    table = {cells[0].strip("`"): [cell.strip("`") for cell in cells] for cells in rows("config.md", "## Keys")}
    flags = {option.name: max(option.opts, key=len) for option in generate.params}
    assert list(table) == list(fields)
    for key, (_, default, flag, _meaning) in table.items():
        assert flag == flags.get(key, "")
        if fields[key] is not None:
            assert default == (
                fields[key] if isinstance(fields[key], str) else json.dumps(fields[key]).removesuffix(".0")
            )


def test_receipt_page_has_every_part() -> None:
    """The table of the body's parts names each of them, and no other."""
    named = re.findall(r"`(\w+)`", " ".join(cells[0] for cells in rows("receipts.md", "over the canonical JSON")))
    assert named == [a.name for a in attrs.fields(ReceiptBody)]


def test_links_between_pages_resolve() -> None:
    """No page points at one that is not there."""
    for page in [*DOCS.glob("*.md"), ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
