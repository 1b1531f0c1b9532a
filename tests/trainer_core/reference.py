"""The arithmetic of codecs and rounds in plain numpy, cell by cell and replica by replica."""

import numpy as np

from crosscloud_trainer.sizes import CodecSpec

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


def bf16_encoded(values: np.ndarray) -> bytes:
    """The upper 16 bits, to nearest: half of the lowest of them is added first, a bit less where that one is even."""
    bits = values.astype(f32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def bf16_decoded(encoded: bytes) -> np.ndarray:
    return (np.frombuffer(encoded, dtype="<u2").astype(np.uint32) << 16).view(f32)


def topk_kept(cell: np.ndarray, keep: int) -> np.ndarray:
    """Positions of the largest magnitudes, growing; of equal ones the first."""
    return np.sort(np.argsort(-np.abs(cell), kind="stable")[:keep])


def topk_levels(magnitudes: np.ndarray, bits: int) -> np.ndarray:
    """Low and high level of the kept magnitudes, as bf16 holds them."""
    sorted_ones = -np.sort(-magnitudes)
    if bits == 2 and len(magnitudes) > 1:
        sums, keep = np.cumsum(sorted_ones, dtype=np.float64), len(magnitudes)
        upper = np.arange(1, keep)
        above, below = sums[:-1] / upper, (sums[-1] - sums[:-1]) / (keep - upper)
        cut = np.argmax(sums[:-1] ** 2 / upper + (sums[-1] - sums[:-1]) ** 2 / (keep - upper))
        levels = np.array([below[cut], above[cut]]).astype(f32)
    elif bits == 2:
        levels = np.array([0, magnitudes[0]], dtype=f32)
    else:
        levels = sorted_ones[[-1, 0]]
    return bf16_decoded(bf16_encoded(np.where(levels < 2.0**-100, f32(0), levels)))


def packed(numbers: np.ndarray, bits: int) -> bytes:
    """The numbers side by side, lowest bits first."""
    return np.packbits((numbers[:, None] >> np.arange(bits)) & 1, bitorder="little").tobytes()


def unpacked(encoded: bytes, bits: int, count: int) -> np.ndarray:
    ones = np.unpackbits(np.frombuffer(encoded, dtype=np.uint8), bitorder="little")[: bits * count]
    return ones.reshape(count, bits) @ (1 << np.arange(bits))


def topk_encoded(cell: np.ndarray, keep: int, bits: int) -> bytes:
    """Levels, then the positions as Elias and Fano write them, then the codes."""
    positions = topk_kept(cell, keep)
    magnitudes = np.abs(cell[positions])
    magnitudes = np.where(magnitudes < 2.0**-100, f32(0), magnitudes)
    low, high = levels = topk_levels(magnitudes, bits)
    top = 2 ** (bits - 1) - 1
    numbers = np.zeros(keep, dtype=np.int64)
    if high > low:
        numbers = np.clip(np.rint((magnitudes - low) / (high - low) * f32(top)), 0, top).astype(np.int64)
    low_bits = int(np.log2(4096 // keep))
    bitmap = np.zeros(keep + (4096 >> low_bits) - 1, dtype=np.int64)
    bitmap[(positions >> low_bits) + np.arange(keep)] = 1
    lows = positions % (1 << low_bits)
    codes = 2 * numbers + (cell[positions] < 0)
    return bf16_encoded(levels) + packed(bitmap, 1) + packed(lows, low_bits) + packed(codes, bits)


def topk_decoded(encoded: bytes, keep: int, bits: int) -> np.ndarray:
    low, high = bf16_decoded(encoded[:4])
    low_bits = int(np.log2(4096 // keep))
    places = keep + (4096 >> low_bits) - 1
    lows = 4 + -(-places // 8)
    codes_at = lows + -(-keep * low_bits // 8)
    highs = np.flatnonzero(unpacked(encoded[4:lows], 1, places)) - np.arange(keep)
    positions = (highs << low_bits) + unpacked(encoded[lows:codes_at], low_bits, keep)
    codes = unpacked(encoded[codes_at:], bits, keep)
    share = (codes >> 1).astype(f32) / f32(2 ** (bits - 1) - 1)
    magnitudes = np.minimum(low * (1 - share) + high * share, high)
    cell = np.zeros(4096, dtype=f32)
    cell[positions] = np.where(codes & 1, -magnitudes, magnitudes)
    return cell


def encoded(spec: CodecSpec, cell: np.ndarray) -> bytes:
    """The bytes of a cell."""
    if spec.name == "None":
        return cell.astype("<f4").tobytes()
    if spec.name == "BF16":
        return bf16_encoded(cell)
    if spec.name == "TopK" and len(cell) == 4096:
        return topk_encoded(cell, spec.keep, spec.bits)
    return int8_encoded(cell)


def decoded(spec: CodecSpec, data: bytes, elements: int) -> np.ndarray:
    """The values of a cell's bytes."""
    if spec.name == "None":
        return np.frombuffer(data, dtype="<f4")
    if spec.name == "BF16":
        return bf16_decoded(data)
    if spec.name == "TopK" and elements == 4096:
        return topk_decoded(data, spec.keep, spec.bits)
    return int8_decoded(data, elements)


def decay(codec: str) -> np.float32:
    """What is left of a residual in the next round."""
    return f32(0.95 if codec == "TopK" else 1)


def through(codec: str, cell: np.ndarray) -> np.ndarray:
    """What arrives of a cell; the codec has its default settings."""
    spec = CodecSpec(codec)
    return decoded(spec, encoded(spec, cell), len(cell))
