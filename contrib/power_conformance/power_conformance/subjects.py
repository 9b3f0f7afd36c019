"""What rules are given: a target, a drafter or a plugin, with everything a check needs to try it."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from power_core.artifacts import ArtifactContract
from power_core.capabilities import Registry
from power_core.drafter import Drafter
from power_core.plugins import PluginSet, load_plugins
from power_core.target import SessionOptions, TargetModel, TargetSession
from power_core.types import TokenId

__all__ = [
    "DEFAULT_OPTIONS",
    "ContractSubject",
    "DrafterSubject",
    "PluginSubject",
    "TargetSubject",
    "import_path",
    "ordinary_ids",
]

# Small enough to run into every edge, large enough for several sequences and rolled-back rows. One thread, because
# on models that small several only wait for each other, and on a busy machine they wait long.
DEFAULT_OPTIONS = SessionOptions(context_size=64, max_sequences=3, max_rows=8, rollback_rows=4, threads=1)


@frozen
class TargetSubject:
    """
    A target to check.

    Args:
        model: The model; rules open sessions of it and shut them down. One of them closes it.
        options: Sessions to try; every rule is run on each.
        others: Models with other weights, for rules that compare identities.
        seed: Chooses the texts.
        again: ``module:function`` that makes the model from a folder, for rules that need a second process.
    """

    model: TargetModel
    options: tuple[SessionOptions, ...] = (DEFAULT_OPTIONS,)
    others: tuple[TargetModel, ...] = ()
    seed: int = 0
    again: str | None = None

    @contextmanager
    def session(self, options: SessionOptions | None = None, **changes: Any) -> Iterator[TargetSession]:
        """A session of *options* (the first ones by default) with *changes*, shut down in the end."""
        session = self.model.open_session(evolve(options or self.options[0], **changes))
        try:
            yield session
        finally:
            session.shutdown()

    def text(self, length: int, stream: int = 0) -> list[TokenId]:
        """*length* ordinary ids; another *stream*, another text."""
        draw = random.Random(f"{self.seed}:{stream}")  # noqa: S311 - texts, not secrets
        ids = ordinary_ids(self.model)
        return [draw.choice(ids) for _ in range(length)]


@frozen
class DrafterSubject:
    """
    A drafter to check.

    Args:
        drafter: The drafter; rules open sessions of it and close them.
        model: A target it can draft for.
        options: Of that target's sessions; hidden layers are added as the drafter requires them.
        shares_state: Whether later requests may see what earlier ones left: configured so, and documented.
        seed: Chooses the texts.
    """

    drafter: Drafter
    model: TargetModel
    options: SessionOptions = DEFAULT_OPTIONS
    shares_state: bool = False
    seed: int = 0

    def text(self, length: int, stream: int = 0) -> list[TokenId]:
        """
        *length* ordinary ids that repeat themselves, so that drafters which copy have something to say.

        Another *stream*, another text.
        """
        draw = random.Random(f"{self.seed}:{stream}")  # noqa: S311 - texts, not secrets
        ids = ordinary_ids(self.model)
        phrases = [[draw.choice(ids) for _ in range(draw.randint(4, 9))] for _ in range(3)]
        text: list[TokenId] = []
        while len(text) < length:
            text += draw.choice(phrases)
            if draw.random() < 0.2:
                text.append(draw.choice(ids))
        return text[:length]


@frozen
class ContractSubject:
    """
    An artifact contract to check.

    Args:
        contract: The contract.
        path: A good file as small as can be: what is optional in it cannot be told from what is not looked at.
        model: A target that the file was made for.
        rivals: Contracts of other kinds, which must not take the file for theirs.
        seed: Chooses the changes of the file.
    """

    contract: ArtifactContract
    path: Path
    model: TargetModel
    rivals: tuple[ArtifactContract, ...] = ()
    seed: int = 0


@frozen
class PluginSubject:
    """
    A plugin to check, by its entry point in the group ``power``.

    Args:
        point: The entry point; its distribution is checked with it.
    """

    point: EntryPoint

    @property
    def module(self) -> str:
        """The module that the entry point names."""
        return self.point.value.partition(":")[0]

    @property
    def package(self) -> str:
        """The top-level package."""
        return self.module.partition(".")[0]

    def load(self) -> PluginSet:
        """What the loader makes of this plugin alone."""
        return load_plugins([self.point], {})

    def registry(self) -> Registry:
        """What the plugin registers; nothing where it does not load (a rule of its own)."""
        return self.load().registry


def ordinary_ids(model: TargetModel) -> Sequence[TokenId]:
    """Ids that stand for text: neither special nor an end of generation."""
    tokenizer = model.tokenizer
    reserved = tokenizer.special_ids | tokenizer.end_ids
    ids = [token for token in range(tokenizer.vocab_size) if token not in reserved]
    return ids or list(range(tokenizer.vocab_size))


def import_path(factory: Callable[[Path], Any]) -> str | None:
    """``module:function`` of *factory*, or None where it cannot be found by name, as with lambdas."""
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", "")
    found = getattr(inspect.getmodule(factory), name, None)
    return f"{module}:{name}" if found is factory else None
