"""
Record SmolLM2's own greedy answers as token streams: run by hand, once, when the prompts change.

``python record_streams.py MODEL.gguf`` rewrites ``data/streams.json`` beside this file. The streams are
(prompt ids, answer ids) pairs; the drafters' tests and benchmarks replay them without a model.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

ANSWER_TOKENS = 288
LIST = "\n".join(f"- item {n}: colour {c}, size {n * 3}" for n, c in enumerate(("red", "blue", "green", "grey") * 3))


def source(function: Any) -> str:
    return inspect.getsource(function)


def prompts() -> dict[str, str]:
    """Prompts by kind: copy, edit, code, prose, chat, list."""
    import colorsys
    import shlex
    import textwrap

    return {
        "copy-code": "Repeat this code exactly:\n```python\n" + source(textwrap.dedent) + "```",
        "copy-list": "Repeat this list exactly, line by line:\n" + LIST,
        "edit-code": "Rename the variable maxc to top in this code and print all of it:\n```python\n"
        + source(colorsys.rgb_to_hls)
        + "```",
        "explain-code": "Explain this code line by line, quoting each line:\n```python\n" + source(shlex.split) + "```",
        "write-class": "Write a Python class for a bank account with deposit, withdraw and transfer, with docstrings.",
        "write-tests": "Write ten pytest tests for a function add(a, b).",
        "prose-story": "Tell me a story about a lighthouse keeper who finds a letter in a bottle.",
        "prose-history": "Write an essay about the history of the printing press.",
        "chat-plan": "Plan a three day trip to Rome for a family with two children.",
        "math-steps": "A shop sells pens at 3 for 2 dollars. How much do 18 pens cost? Show each step.",
        "json-rows": "Write a JSON array of twelve people with the keys name, age, city and email.",
        "table": "Make a markdown table of ten countries with capital, population and language.",
    }


def record(path: Path) -> dict[str, Any]:
    """Greedy answers to `prompts`, one per prompt, ended by the model or at `ANSWER_TOKENS`."""
    from llama_cpp import Llama

    model = Llama(str(path), n_ctx=2048, n_threads=2, verbose=False)
    streams = {}
    for name, prompt in prompts().items():
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        ids = model.tokenize(text.encode(), add_bos=False, special=True)
        answer: list[int] = []
        for token in model.generate(ids, temp=0.0, repeat_penalty=1.0):
            answer.append(int(token))
            if token == model.token_eos() or len(answer) == ANSWER_TOKENS:
                break
        streams[name] = {"prompt": ids, "answer": answer}
        print(name, len(ids), len(answer), file=sys.stderr)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"model": path.name, "sha256": digest, "sampling": "greedy", "streams": streams}


if __name__ == "__main__":
    target = Path(__file__).with_name("data") / "streams.json"
    target.write_text(json.dumps(record(Path(sys.argv[1])), separators=(",", ":")) + "\n")
