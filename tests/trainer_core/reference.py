"""The arithmetic of codecs and rounds in plain numpy, cell by cell and replica by replica."""

import numpy as np

f32 = np.float32


def int8_encoded(cell: np.ndarray) -> bytes:
    """Scales of the blocks of 256, then codes; blocks too small for a normal scale are zero."""
    scales, codes = [], []
    for start in range(0, len(cell), 256):
        block = cell[start : start + 256].astype(f32)
        scale = f32(np.abs(block).max()) / f32(127)
        if scale < f32(2.0**-126):
            scale = f32(0)
            codes.append(np.zeros(len(block), dtype=np.int8))
        else:
            codes.append(np.clip(np.rint(block / scale), -127, 127).astype(np.int8))
        scales.append(scale)
    return np.array(scales, dtype="<f4").tobytes() + np.concatenate(codes).tobytes()


def int8_decoded(encoded: bytes, elements: int) -> np.ndarray:
    blocks = -(-elements // 256)
    scales = np.frombuffer(encoded[: 4 * blocks], dtype="<f4")
    codes = np.frombuffer(encoded[4 * blocks :], dtype=np.int8).astype(f32)
    return codes * np.repeat(scales, 256)[:elements]


def through(codec: str, cell: np.ndarray) -> np.ndarray:
    """What arrives of a cell."""
    return int8_decoded(int8_encoded(cell), len(cell)) if codec == "Int8" else cell.copy()
