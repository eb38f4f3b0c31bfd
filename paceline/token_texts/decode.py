"""Decoder of tokens: ``python -m paceline.token_texts.decode TOKENIZER_JSON``, a child of
``text_decoder``.

A vocabulary takes a second to load, during which Python answers nobody, and 100 MB: so it is in a
process of its own.

    standard input:  1 if names of special tokens are wanted, number of tokens, tokens (int32)   again and again
    standard output: a byte once it is ready; then for each: bytes of the text, text (UTF-8)
"""

from __future__ import annotations

import os
import struct
import sys
from typing import BinaryIO

REQUEST = struct.Struct("<BI")
REPLY = struct.Struct("<I")
READY = b"r"


def main(path: str) -> int:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    target.write(READY)
    target.flush()
    while head := source.read(REQUEST.size):
        special, count = REQUEST.unpack(head)
        tokens = memoryview(source.read(4 * count)).cast("i").tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=not special).encode()
        _write(target, text)
    return 0


def _write(target: BinaryIO, text: bytes) -> None:
    target.write(REPLY.pack(len(text)) + text)
    target.flush()


if __name__ == "__main__":
    # At the end nobody is interested in an orderly farewell.
    try:
        status = main(sys.argv[1])
    except BrokenPipeError:
        status = 1
    os._exit(status)
