"""
The native layer that session and probe share: one model, one context, one batch, explicit settings.

Nothing here measures, caches or decides. Calls that could end the process are refused first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from power_core.errors import BackendError
from power_llamacpp.config import KvType
from power_llamacpp.native import interrupts_deferred, library, log_bridge
from power_llamacpp.taps import Taps

__all__ = ["ContextSettings", "NativeBatch", "NativeContext", "NativeModel"]

PLUGIN = "llamacpp"
CELL_BLOCK = 256  # llama.cpp rounds a sequence's cells up to this
_FLASH_ON, _FLASH_OFF = 1, 0
_KV_TYPES = {
    KvType.F32: 0,
    KvType.F16: 1,
    KvType.Q4_0: 2,
    KvType.Q4_1: 3,
    KvType.Q5_0: 6,
    KvType.Q5_1: 7,
    KvType.Q8_0: 8,
    KvType.IQ4_NL: 20,
    KvType.BF16: 30,
}  # ggml_type
_PARTIAL_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_DECODE_CAUSES = {
    1: "no room for the rows in the key/value cache",
    2: "the computation was aborted",
    -1: "the rows were refused as an invalid batch",
}


@frozen
class ContextSettings:
    """
    Everything a context is made with. Two contexts of one file and equal settings compute alike.

    Args:
        context_size: Positions each sequence must be able to hold.
        max_sequences: Sequence ids are 0 .. max_sequences-1, each with a cache stream of its own.
        batch_rows: Most rows of one native decode.
        max_outputs: Most rows of one decode whose logits are read.
        threads: Compute threads.
        flash_attention: Whether attention is the fused kernel.
        kv_type: Element type of the key/value cache.
        swa_full: Whether sliding-window layers keep every position, so that any rollback is exact.
        rollback_rows: Recurrent states kept resident per sequence (`n_rs_seq`).
        hidden_layers: Block outputs that `NativeContext.hidden` gives; checked by `taps.check_hidden_layers`.
    """

    context_size: int
    max_sequences: int = 1
    batch_rows: int = 512
    max_outputs: int = 16
    threads: int = 1
    flash_attention: bool = False
    kv_type: KvType = KvType.F16
    swa_full: bool = True
    rollback_rows: int = 0
    hidden_layers: tuple[int, ...] = ()


class NativeModel:
    """
    Weights (or only the vocabulary) of one GGUF file. The caller has checked the file.

    Args:
        path: The file.
        extra_buffers: Whether weights may be repacked for this processor (`use_extra_bufts`).
        vocab_only: Load the vocabulary without the weights.
        prediction_layers: Load the prediction (NextN) layers too; a context of them on a model without them
            would end the process.
        adapters: File and scale of the LoRA adapters of every context, checked by `lora.check_lora`. They are loaded
            before there is a context: llama.cpp makes room for them when it makes one.

    Raises:
        BackendError: llama.cpp refuses a file.
    """

    def __init__(
        self,
        path: Path,
        *,
        extra_buffers: bool = False,
        vocab_only: bool = False,
        prediction_layers: bool = False,
        adapters: Sequence[tuple[Path, float]] = (),
    ) -> None:
        self._lib = lib = library()
        self.path = path
        self.has_prediction_layers = prediction_layers
        self.extra_buffers = extra_buffers
        self._contexts: set[NativeContext] = set()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0  # exactness is measured and promised for the CPU
        params.use_extra_bufts = extra_buffers
        params.vocab_only = vocab_only
        params.load_mtp = prediction_layers
        log_bridge().forget()
        with interrupts_deferred():
            self._handle = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._handle:
            raise BackendError(
                f"llama.cpp cannot load the model{log_bridge().reason()}",
                plugin=PLUGIN,
                where=str(path),
            )
        handle = self._handle
        self.vocab: Any = lib.llama_model_get_vocab(handle)
        self.vocab_size: int = lib.llama_vocab_n_tokens(self.vocab)
        self.hidden_size: int = lib.llama_model_n_embd(handle)
        self.num_layers: int = lib.llama_model_n_layer(handle)
        self.trained_context: int = lib.llama_model_n_ctx_train(handle)
        self.window: int = 0 if vocab_only else lib.llama_model_n_swa(handle)  # positions, 0 where there is none
        self.is_recurrent: bool = not vocab_only and bool(
            lib.llama_model_is_recurrent(handle) or lib.llama_model_is_hybrid(handle)
        )
        self._scales = [scale for _, scale in adapters]
        self._adapters: list[Any] = []  # freed with the model
        for file, _ in adapters:
            self._load_adapter(file)

    def _load_adapter(self, file: Path) -> None:
        log_bridge().forget()
        with interrupts_deferred():
            adapter = self._lib.llama_adapter_lora_init(self.handle, str(file).encode())
        if not adapter:
            self.close()
            raise BackendError(
                f"llama.cpp cannot load the adapter{log_bridge().reason()}", plugin=PLUGIN, where=str(file)
            )
        self._adapters.append(adapter)

    def adapt(self, context: Any) -> None:
        """Add the model's adapters to *context*, a native one, for good; the last one first, as llama.cpp sums up."""
        if self._adapters:
            count = len(self._adapters)
            adapters = (self._lib.llama_adapter_lora_p_ctypes * count)(*self._adapters)
            self._lib.llama_set_adapters_lora(context, adapters, count, (ctypes.c_float * count)(*self._scales))

    @property
    def handle(self) -> Any:
        """
        The native pointer.

        Raises:
            BackendError: The model is closed.
        """
        if self._handle is None:
            raise BackendError("the model is closed", plugin=PLUGIN, where=str(self.path), fix="load it again")
        return self._handle

    def close(self) -> None:
        """Free the weights, after every context that uses them. Idempotent."""
        for context in list(self._contexts):
            context.close()
        if self._handle is not None:
            handle, self._handle, self.vocab = self._handle, None, None
            self._lib.llama_model_free(handle)

    def attach(self, context: NativeContext) -> None:
        """Own *context*, which must be freed before the weights, until `detach`."""
        self._contexts.add(context)

    def detach(self, context: NativeContext) -> None:
        """Forget *context*, which is free."""
        self._contexts.discard(context)


class NativeBatch:
    """
    A `llama_batch` over numpy arrays, so that slices fill it.

    Attributes:
        tokens: int32[capacity].
        positions: int32[capacity].
        seqs: int32[capacity]; one sequence id a row.
        outputs: int8[capacity]; 1 where logits are wanted.
    """

    def __init__(self, lib: Any, capacity: int) -> None:
        self.capacity = capacity
        self.tokens: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.positions: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.seqs: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.outputs: NDArray[np.int8] = np.zeros(capacity, np.int8)
        self._counts: NDArray[np.int32] = np.ones(capacity, np.int32)
        # seq_id is an array of pointers: row i points at seqs[i], for ever
        self._rows: NDArray[np.uintp] = np.arange(capacity, dtype=np.uintp) * np.uintp(4) + np.uintp(
            self.seqs.ctypes.data
        )
        fields: dict[str, NDArray[Any]] = {
            "token": self.tokens,
            "pos": self.positions,
            "n_seq_id": self._counts,
            "seq_id": self._rows,
            "logits": self.outputs,
        }
        types = dict(lib.llama_batch._fields_)
        self.native: Any = lib.llama_batch(
            **{name: ctypes.cast(array.ctypes.data, types[name]) for name, array in fields.items()}
        )


class NativeContext:
    """
    One llama.cpp context with its batch. Used by one thread at a time.

    Args:
        model: Loaded weights.
        settings: How to make it.

    Attributes:
        batch: Fill rows 0..n-1, then call `decode(n)`.
        batch_rows: Most rows `decode` takes, as llama.cpp granted it.
        cells: Positions each sequence can hold, as llama.cpp granted them; at least `settings.context_size`.
        rollback_rows: Recurrent states kept per sequence, as llama.cpp granted them.

    Raises:
        BackendError: llama.cpp cannot make the context.
    """

    def __init__(self, model: NativeModel, settings: ContextSettings) -> None:
        self._lib = lib = model._lib  # noqa: SLF001 - same module
        self._log = log_bridge()
        self._handle: Any = None
        self.model = model
        self.settings = settings
        params = self._params(settings)
        log_bridge().forget()
        with interrupts_deferred():
            self._handle = lib.llama_init_from_model(model.handle, params)
        if not self._handle:
            raise BackendError(
                f"llama.cpp cannot make a context{log_bridge().reason()}",
                plugin=PLUGIN,
                where=str(model.path),
                got=settings,
                fix="ask for a smaller context or fewer sequences",
            )
        model.attach(self)
        model.adapt(self._handle)
        self._memory: Any = lib.llama_get_memory(self._handle)
        self.batch_rows: int = min(lib.llama_n_batch(self._handle), lib.llama_n_ubatch(self._handle))
        self.cells: int = lib.llama_n_ctx_seq(self._handle)
        self.rollback_rows: int = lib.llama_n_rs_seq(self._handle) if model.is_recurrent else 0
        self.max_outputs: int = params.n_outputs_max
        self.batch = NativeBatch(lib, self.batch_rows)
        self._before_close: list[Callable[[], None]] = []
        self._taps = Taps(self._handle, settings.hidden_layers, self.batch_rows, model.hidden_size)
        self._address = 0
        self._logits: NDArray[np.float32] = np.empty((0, model.vocab_size), np.float32)

    def _params(self, settings: ContextSettings) -> Any:
        cells = -(-settings.context_size // CELL_BLOCK) * CELL_BLOCK
        rows = min(max(settings.batch_rows, settings.rollback_rows + 2), cells * settings.max_sequences)
        params = self._lib.llama_context_default_params()
        params.n_ctx = cells * settings.max_sequences
        # one physical batch a logical one: a split would compute its parts at other widths
        params.n_batch = params.n_ubatch = rows
        params.n_seq_max = settings.max_sequences
        params.n_outputs_max = max(settings.max_outputs, settings.max_sequences)  # less aborts at creation
        params.n_rs_seq = min(settings.rollback_rows, rows - 2)  # more aborts at the first decode
        params.n_threads = params.n_threads_batch = settings.threads
        params.flash_attn_type = _FLASH_ON if settings.flash_attention else _FLASH_OFF
        params.type_k = params.type_v = _KV_TYPES[settings.kv_type]
        params.swa_full = settings.swa_full
        params.kv_unified = False  # a shared stream would let sequences change each other's numerics
        params.offload_kqv = params.op_offload = False
        params.no_perf = True
        return params

    @property
    def handle(self) -> Any:
        """
        The native pointer.

        Raises:
            BackendError: The context is closed.
        """
        if self._handle is None:
            raise BackendError("the session is closed", plugin=PLUGIN, fix="open another one")
        return self._handle

    def decode(self, rows: int) -> NDArray[np.float32]:
        """
        Evaluate rows 0..rows-1 of `batch`.

        Returns:
            float32[outputs, vocab]: logits of the rows flagged in `batch.outputs`, in batch order. A
            read-only view of llama.cpp's own buffer: dead with the next `decode` and with `close`.

        Raises:
            BackendError: The rows do not fit, or llama.cpp failed; sequences may then hold some of the rows.
        """
        handle, batch = self.handle, self.batch
        count = int(np.count_nonzero(batch.outputs[:rows]))
        if not 0 < rows <= self.batch_rows or count > self.max_outputs:  # either would abort the process
            raise BackendError(
                f"{rows} rows with {count} outputs do not fit one decode",
                plugin=PLUGIN,
                got=(rows, count),
                expected=f"at most {self.batch_rows} rows and {self.max_outputs} outputs",
            )
        batch.native.n_tokens = rows
        self._log.forget()
        code = self._lib.llama_decode(handle, batch.native)
        if code:
            cause = _DECODE_CAUSES.get(code, "a fatal error")
            raise BackendError(
                f"llama_decode returned {code}, {cause}{self._log.reason()}",
                plugin=PLUGIN,
                got=code,
            )
        return self._view()[:count] if count else self._logits[:0]

    def _view(self) -> NDArray[np.float32]:
        """The whole output buffer; also waits for the computation to finish."""
        pointer = self._lib.llama_get_logits(self.handle)
        if not pointer:
            raise BackendError("llama.cpp has no logits for the rows it computed", plugin=PLUGIN)
        address = ctypes.addressof(pointer.contents)
        if address != self._address:  # the buffer grows with the largest number of outputs seen
            view = np.ctypeslib.as_array(pointer, shape=(self.max_outputs, self.model.vocab_size))
            view.flags.writeable = False
            self._address, self._logits = address, view
        return self._logits

    def hidden(self, rows: int) -> Mapping[int, NDArray[np.float32]]:
        """
        float32[rows, hidden] by layer of `ContextSettings.hidden_layers`, for the first *rows* rows of the last decode.

        Read-only views of llama.cpp's own buffer, dead with the next `decode` and with `close`.

        Raises:
            BackendError: llama.cpp has none.
        """
        self.handle  # noqa: B018 - raises where the context is closed
        return self._taps.read(rows)

    def set_threads(self, threads: int) -> None:
        """Compute with that many threads from the next `decode` on."""
        self._lib.llama_set_n_threads(self.handle, threads, threads)

    def remove(self, seq: int, start: int) -> bool:
        """
        Drop the rows of *seq* from position *start* on.

        Returns:
            False where the memory cannot do that; it is then unchanged. From 0 on it always can.
        """
        return bool(self._lib.llama_memory_seq_rm(self._memory_of(), seq, start, -1))

    def first_position(self, seq: int) -> int:
        """Smallest position from which on every row of *seq* is still held, or -1 where it holds none."""
        return int(self._lib.llama_memory_seq_pos_min(self._memory_of(), seq))

    def last_position(self, seq: int) -> int:
        """Largest position *seq* holds, or -1 where it holds none."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory_of(), seq))

    def _memory_of(self) -> Any:
        self.handle  # noqa: B018 - raises where the context is closed
        return self._memory

    def snapshot(self, seq: int, *, whole: bool = False) -> NDArray[np.uint8]:
        """
        A copy of the state of *seq* that rows cannot be cut from: recurrent state, small sliding windows.

        Args:
            seq: The sequence.
            whole: Copy everything, for `restore_whole`.

        Raises:
            BackendError: llama.cpp wrote another size than it announced.
        """
        flags = 0 if whole else _PARTIAL_ONLY
        size = self._lib.llama_state_seq_get_size_ext(self.handle, seq, flags)
        data = np.empty(size, np.uint8)
        written = self._lib.llama_state_seq_get_data_ext(self.handle, _bytes_of(data), size, seq, flags)
        if written != size or not size:
            raise BackendError(
                f"the snapshot of sequence {seq} has {written} bytes", plugin=PLUGIN, got=written, expected=size
            )
        return data

    def restore(self, seq: int, data: NDArray[np.uint8], length: int) -> bool:
        """
        Bring *seq* back to *data*, a `snapshot` taken when it held *length* positions.

        Returns:
            False where llama.cpp refused either half; *seq* may then hold anything.
        """
        read = self._lib.llama_state_seq_set_data_ext(self.handle, _bytes_of(data), data.size, seq, _PARTIAL_ONLY)
        # the attention part was not in the snapshot: its later rows are cut
        return bool(read == data.size) and self.remove(seq, length)

    def before_close(self, free: Callable[[], None]) -> None:
        """Call *free* before the context is freed: a draft context holds a raw pointer to its target's."""
        self._before_close.append(free)

    def restore_whole(self, seq: int, data: NDArray[np.uint8]) -> bool:
        """
        Make *seq* what a whole `snapshot`, of any sequence, describes.

        Returns:
            False where llama.cpp refused; *seq* may then hold anything.
        """
        read = self._lib.llama_state_seq_set_data_ext(self.handle, _bytes_of(data), data.size, seq, 0)
        return bool(read == data.size)

    def close(self) -> None:
        """Free the context. Idempotent."""
        if self._handle is not None:
            while self._before_close:
                self._before_close.pop()()
            handle, self._handle, self._memory = self._handle, None, None
            self._lib.llama_free(handle)
            self.model.detach(self)

    @property
    def is_open(self) -> bool:
        return self._handle is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bytes_of(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
