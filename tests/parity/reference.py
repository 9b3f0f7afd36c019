"""
An independent reference: one token a decode on raw llama-cpp-python calls, argmax in numpy.

Shares no code with Power, so that an error in both is unlikely. On builds whose single rows are in
another width class it is padded as a user would do it by hand: further rows behind the last one, cut
again afterwards, and as many rows read as the output matrix needs for its kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as native

from power_core.engine import Engine

__all__ = ["RawLoop", "raw_loop"]


class RawLoop:
    """
    A model decoded greedily, one token at a time.

    Args:
        path: The GGUF file.
        extra_buffers: `use_extra_bufts`.
        flash_attention: Whether it is on.
        threads: Compute threads.
        step_rows: Fewest rows of a step of one token.
        chunk_rows: Fewest and most rows of a prompt chunk.
    """

    def __init__(
        self,
        path: Path,
        *,
        extra_buffers: bool,
        flash_attention: bool,
        threads: int,
        step_rows: int = 1,
        chunk_rows: tuple[int, int] = (1, 512),
    ) -> None:
        native.llama_backend_init()
        model_params = native.llama_model_default_params()
        model_params.use_extra_bufts = extra_buffers
        self.model = native.llama_model_load_from_file(str(path).encode(), model_params)
        assert self.model
        vocab = native.llama_model_get_vocab(self.model)
        self.vocab_size = native.llama_vocab_n_tokens(vocab)
        self.is_end = [bool(native.llama_vocab_is_eog(vocab, token)) for token in range(self.vocab_size)]
        params = native.llama_context_default_params()
        params.n_ctx = 2048
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1 if flash_attention else 0
        params.kv_unified = False
        self.context = native.llama_init_from_model(self.model, params)
        assert self.context
        self.step_rows = step_rows
        self.chunk_rows = chunk_rows

    def decode(self, tokens: Sequence[int], position: int, fewest: int | None = None) -> np.ndarray:
        """
        Evaluate *tokens* from *position* on in at least *fewest* rows (None: those of a step).

        Returns:
            Logits of the last token, float32[vocab].
        """
        count = max(len(tokens), self.step_rows if fewest is None else fewest)
        outputs = max(self.step_rows, 1)
        batch = native.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i] = tokens[min(i, len(tokens) - 1)], position + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == len(tokens) - 1 or i >= count - outputs
        assert native.llama_decode(self.context, batch) == 0
        native.llama_batch_free(batch)
        if count > len(tokens):
            memory = native.llama_get_memory(self.context)
            assert native.llama_memory_seq_rm(memory, 0, position + len(tokens), -1)
        pointer = native.llama_get_logits_ith(self.context, len(tokens) - 1)
        return np.ctypeslib.as_array(pointer, shape=(self.vocab_size,)).copy()

    def logits(self, prompt: Sequence[int]) -> np.ndarray:
        """Logits after *prompt* as a new text, float32[vocab]."""
        native.llama_memory_clear(native.llama_get_memory(self.context), True)
        fewest, most = self.chunk_rows
        for start in range(0, len(prompt), most):
            logits = self.decode(prompt[start : start + most], start, fewest)
        return logits

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy ids after *prompt*, an end-of-generation id included."""
        out: list[int] = []
        token = int(self.logits(prompt).argmax())
        while True:
            out.append(token)
            if len(out) == max_tokens or self.is_end[token]:
                return out
            token = int(self.decode([token], len(prompt) + len(out) - 1).argmax())

    def close(self) -> None:
        native.llama_free(self.context)
        native.llama_model_free(self.model)


def raw_loop(engine: Engine) -> RawLoop:
    """A raw loop with the settings and widths that *engine* measured to be exact."""
    facts, profile = engine.profile.evidence, engine.profile
    return RawLoop(
        engine.model.path,  # type: ignore[attr-defined] # a llama.cpp model
        extra_buffers=facts["settings"]["extra_buffers"],
        flash_attention=facts["settings"]["flash_attention"],
        threads=facts["threads"],
        step_rows=profile.decode.widths[0],
        chunk_rows=(profile.prefill.widths[0], profile.prefill.max_rows),
    )
