"""Tensor checksums: exact in every bit, the same on every device, at memory speed.

Integer arithmetic wraps and is therefore exact in any order of summation. A single changed word
always changes the fingerprint; more than one does, except with a probability of about 2**-32. It
finds damage and divergence; it does not withstand an adversary.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

# A row of words is folded into one; rows are told apart by position in a cryptographic hash.
_ROW_WORDS = 1 << 15
_PIECE_WORDS = {"cpu": _ROW_WORDS * 8, "cuda": _ROW_WORDS * 256}


def weights_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Fingerprint of names, dtypes, shapes and bits of tensors, as 32 hexadecimal digits. Tensors
    of any dtype, layout and device; the order in which they come does not matter. NaNs and zeros
    are compared by their bits."""
    tensors = sorted(((name, tensor.detach()) for name, tensor in named), key=lambda item: item[0])
    folds = _to_host([_fold(tensor) for _, tensor in tensors])
    total = hashlib.blake2b(digest_size=16)
    for (name, tensor), fold in zip(tensors, folds, strict=True):
        label = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0"
        total.update(label.encode())
        total.update(hashlib.blake2b(fold, digest_size=16).digest())
    return total.hexdigest()


def checksum(buffer: Tensor) -> str:
    """Fingerprint of one tensor's bits and size, as 32 hexadecimal digits."""
    return checksums([buffer])[0]


def checksums(buffers: Sequence[Tensor]) -> list[str]:
    """checksum() of each; the host waits for their device once."""
    folds = _to_host([_fold(buffer.detach()) for buffer in buffers])
    salts = [buffer.nbytes.to_bytes(16, "little") for buffer in buffers]
    return [
        hashlib.blake2b(fold, digest_size=16, salt=salt).hexdigest()
        for fold, salt in zip(folds, salts, strict=True)
    ]


def _fold(tensor: Tensor) -> Tensor:
    """int64[rows]: each row of 64-bit words of ``tensor`` folded into one."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    if raw.data_ptr() % 8:
        raw = raw.clone()
    whole = raw.numel() // 8
    words = raw[: whole * 8].view(torch.int64)
    keys = _keys(raw.device)
    if 0 < whole < _ROW_WORDS and raw.numel() % 8 == 0:
        return _mix(words, keys[:whole]).reshape(1)
    rows = whole // _ROW_WORDS
    piece = max(1, _PIECE_WORDS.get(raw.device.type, _ROW_WORDS * 8) // _ROW_WORDS)
    table = words[: rows * _ROW_WORDS].view(rows, _ROW_WORDS)
    folds = [_mix(table[i : i + piece], keys) for i in range(0, rows, piece)]
    rest = words[rows * _ROW_WORDS :]
    if rest.numel():
        folds.append(_mix(rest, keys[: rest.numel()]).reshape(1))
    if raw.numel() % 8:
        last = raw.new_zeros(8)
        last[: raw.numel() % 8] = raw[whole * 8 :]
        folds.append(_mix(last.view(torch.int64), keys[:1]).reshape(1))
    return torch.cat(folds) if folds else torch.empty(0, dtype=torch.int64, device=raw.device)


def _mix(words: Tensor, keys: Tensor) -> Tensor:
    # Without the shift two flipped top bits (the signs of two floats) would cancel in the sum.
    mixed = words >> 32
    mixed.bitwise_xor_(words)
    mixed.mul_(keys)
    return mixed.sum(-1)


@lru_cache(maxsize=16)
def _keys(device: torch.device) -> Tensor:
    """Odd, and therefore invertible, multipliers: one for each position in a row."""
    stream = hashlib.shake_256(b"paceline digest keys").digest(_ROW_WORDS * 8)
    keys = torch.frombuffer(bytearray(stream), dtype=torch.int64) | 1
    return keys.to(device)


def _to_host(folds: Sequence[Tensor]) -> list[bytes]:
    if not folds:
        return []
    if len({fold.device for fold in folds}) > 1:
        folds = [fold.cpu() for fold in folds]
    whole = torch.cat(list(folds)).cpu().numpy().astype("<i8", copy=False)
    ends = np.cumsum([fold.numel() for fold in folds])
    return [part.tobytes() for part in np.split(whole, ends[:-1])]
