"""A llama.cpp server that a benchmark starts, asks over HTTP and stops."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from power_core.request import GenerationRequest

START_S, ANSWER_S = 120.0, 600.0
HOST = "127.0.0.1"


class LlamaServer:
    """
    One server of one model, as a context manager. Every slot has a context of its own, and no prompt is kept.

    Args:
        program: The `llama-server` to run.
        model: The GGUF file.
        parallel: Slots.
        context_size: Positions of a slot.
        threads: Compute threads; None leaves them to the server.
        options: Further options of the command line.
    """

    def __init__(
        self,
        program: Path,
        model: Path,
        *,
        parallel: int,
        context_size: int,
        threads: int | None,
        options: Sequence[str] = (),
    ) -> None:
        with socket.socket() as free:
            free.bind((HOST, 0))
            self._port = int(free.getsockname()[1])
        self._command = [
            str(program), "--model", str(model), "--host", HOST, "--port", str(self._port), "--offline",
            "--parallel", str(parallel), "--ctx-size", str(parallel * context_size), "--no-kv-unified",
            "--cache-ram", "0", *([] if threads is None else ["--threads", str(threads)]), *options,
        ]  # fmt: skip

    def __enter__(self) -> LlamaServer:
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=subprocess.STDOUT)
        started = time.monotonic()
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() - started > START_S:
                self.__exit__(None, None, None)
                raise RuntimeError(f"the server did not start: {self._tail}")
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.seek(0)
        self._tail = self._log.read()[-2000:].decode(errors="replace")
        self._log.close()

    def together(self, requests: Sequence[GenerationRequest]) -> list[tuple[int, ...]]:
        """The token ids of the answers to *requests*, sent at the same time."""
        with ThreadPoolExecutor(len(requests)) as clients:
            return list(clients.map(self._complete, requests))

    def cpu_s(self) -> float:
        """Processor time the server has used so far, in seconds, as Linux tells it."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
        finally:
            connection.close()

    def _complete(self, request: GenerationRequest) -> tuple[int, ...]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=ANSWER_S)
        try:
            connection.request("POST", "/completion", json.dumps(_body(request)), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise RuntimeError(f"the server answered {response.status}: {answer}")
        return tuple(answer["tokens"])


def _body(request: GenerationRequest) -> dict[str, Any]:
    """*request* in the server's words, with the samplers it asks for and no others."""
    sampling = request.sampling
    return {
        "prompt": list(request.prompt),
        "n_predict": request.max_tokens,
        "stop": list(request.stop),
        "samplers": ["penalties", "temperature"],
        "temperature": sampling.temperature,
        "seed": -1 if sampling.seed is None else sampling.seed,
        "repeat_penalty": sampling.repeat_penalty,
        "repeat_last_n": sampling.penalty_window,
        "cache_prompt": False,
        "return_tokens": True,
    }
