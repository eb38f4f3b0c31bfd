"""Texts of tokens: what a person reads of a group whose payload has tokens alone.

Rollout workers leave out texts that a reader can decode: a third of a payload. The decoder is a
child process; one that dies or does not answer is replaced, and costs texts, nothing else.
"""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import threading
import time
from pathlib import Path

from paceline.config.schema import Config
from paceline.process.structured_log import event
from paceline.process.user_code import python_module
from paceline.token_texts.decode import READY, REPLY, REQUEST
from paceline.token_texts.tokenizer_file import tokenizer_file
from paceline.v1 import rollout_pb2

log = logging.getLogger(__name__)

LOAD_S = 60.0
ANSWER_S = 20.0
MOST_FAILURES = 3
"""In a row; then no further child is started."""
_READ_BYTES = 1 << 16


class DecoderFailed(Exception):
    """The child ended, or did not answer in time."""


class TextDecoder:
    """Of one run. Methods block, and may be called from any thread."""

    def __init__(self, config: Config) -> None:
        self._file: Path | None = tokenizer_file(config)
        # Transcripts of environments and recorded conversations show their markers.
        self._special = config.recorded or config.rollout.environment is not None
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._failures = 0

    @property
    def available(self) -> bool:
        """Whether the run's tokenizer is on this host and decodes: workers need not send texts
        then."""
        return self._file is not None and self._failures < MOST_FAILURES

    def fill(self, group: rollout_pb2.Group) -> None:
        """Decodes the texts that ``group`` lacks. Without a decoder they stay empty."""
        if self._file is None:
            return
        with self._lock:
            if self._failures >= MOST_FAILURES:
                return
            try:
                self._fill(group, self._file)
                self._failures = 0
            except (DecoderFailed, OSError) as error:
                self._failures += 1
                event(log, "texts not decoded", logging.WARNING, why=str(error))
                self._end()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _fill(self, group: rollout_pb2.Group, file: Path) -> None:
        if not group.prompt_text and group.prompt_tokens:
            group.prompt_text = self._decoded(file, group.prompt_tokens, special=True)
        for completion in group.completions:
            if not completion.text and completion.tokens:
                completion.text = self._decoded(file, completion.tokens, special=self._special)

    def _decoded(self, file: Path, tokens: bytes, *, special: bool) -> str:
        child = self._child or self._started(file)
        deadline = time.monotonic() + ANSWER_S
        _write(child, REQUEST.pack(special, len(tokens) // 4) + tokens, deadline)
        (size,) = REPLY.unpack(_read(child, REPLY.size, deadline))
        return _read(child, size, deadline).decode(errors="replace")

    def _started(self, file: Path) -> subprocess.Popen[bytes]:
        command = [*python_module("paceline.token_texts.decode"), str(file)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        _read(self._child, len(READY), time.monotonic() + LOAD_S)
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


def _write(child: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
    """All of ``data``, which may be more than the pipe holds while the child is stopped. Raises
    DecoderFailed."""
    assert child.stdin is not None
    left = memoryview(data)
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdin, selectors.EVENT_WRITE)
        while left:
            if not ready.select(max(0.0, deadline - time.monotonic())):
                raise DecoderFailed("the decoder did not take its input in time")
            left = left[os.write(child.stdin.fileno(), left) :]


def _read(child: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    """Exactly ``size`` bytes of its output. Raises DecoderFailed."""
    assert child.stdout is not None
    found = bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        while len(found) < size:
            if not ready.select(max(0.0, deadline - time.monotonic())):
                raise DecoderFailed("the decoder did not answer in time")
            data = os.read(child.stdout.fileno(), min(_READ_BYTES, size - len(found)))
            if not data:
                raise DecoderFailed(f"the decoder ended with status {child.wait()}")
            found += data
    return bytes(found)
