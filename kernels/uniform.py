"""Random numbers as a function of (seed, position), without state, so that a request can continue on any engine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from npuserve.kernels import native

U64 = npt.NDArray[np.uint64]

# Constants of Philox4x32 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox(counter: U64, key: U64) -> U64:
    """Return [4, N] random 32-bit words of Philox4x32-10 for counter [4, N] and key [2, N] of 32-bit words."""
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        product = even * _MULTIPLIERS
        even, odd = (product[::-1] >> _32) ^ odd ^ key, product[::-1] & _LOW
        key = (key + _KEY_STEPS) & _LOW
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniform(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1), a multiple of 2**-53, for each of seeds [N] (uint64) and positions [N] (from 0)."""
    seed, position = np.asarray(seeds, dtype=np.uint64), np.asarray(positions, dtype=np.uint64)
    return _native(seed, position) if native.available() else golden(seed, position)


def _native(seed: U64, position: U64) -> npt.NDArray[np.float64]:
    out = np.empty(len(seed))
    arguments = [torch.from_numpy(array) for array in (seed.view(np.int64), position.view(np.int64), out)]
    native.call("uniform", ("uniform", torch.float64, arguments, [len(seed)]))
    return out


def golden(seed: U64, position: U64) -> npt.NDArray[np.float64]:
    """Compute `uniform` of arrays by `philox`, without the native kernels."""
    nothing = np.zeros_like(position)
    counter = np.stack([position & _LOW, position >> _32, nothing, nothing])
    words = philox(counter, np.stack([seed & _LOW, seed >> _32]))
    bits: U64 = (words[0] << np.uint64(21)) | (words[1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53
