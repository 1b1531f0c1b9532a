"""How many bytes each codec puts on the wire, and how bytes are shown: what planner, codecs and displays share.

Standard library only, since the operator imports this module without torch or numpy. All element counts are
numbers of fp32 values of one parameter; a parameter is cut into cells of `CELL_ELEMENTS` values from its
first one, and the last cell of a parameter is shorter where the count isn't a multiple.
"""

from collections.abc import Iterable
from dataclasses import dataclass

CELL_ELEMENTS = 4096
"""Values in a whole cell, the unit that crosses the WAN."""

INT8_BLOCK = 256
"""Values of a cell that share one scale under `Int8`; it divides `CELL_ELEMENTS`, so that blocks tile a cell.
"""

FP32_BYTES = 4

BF16_BYTES = 2

CODECS = ("None", "BF16", "Int8", "TopK")


@dataclass(frozen=True)
class CodecSpec:
    """A codec by name, with its settings: all that the bytes of a cell depend on, but its values.

    Under `TopK`, `keep` elements of each whole cell are sent (1 to 2,048), each value in `bits` bits (2, 4 or 8); the
    other codecs don't look at them. ValueError for anything else.
    """

    name: str
    keep: int = 64
    bits: int = 2

    def __post_init__(self) -> None:
        if self.name not in CODECS:
            raise ValueError(f"codec {self.name!r} does not exist; use one of {', '.join(CODECS)}")
        if not 1 <= self.keep <= CELL_ELEMENTS // 2:
            raise ValueError(f"keep is {self.keep}; it must be 1 to {CELL_ELEMENTS // 2}")
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits is {self.bits}; it must be 2, 4 or 8")


@dataclass(frozen=True)
class TopKParts:
    """Bytes of the parts of a whole cell under `TopK`, in the order in which they lie.

    The positions of the kept elements are written as Elias (1974) and Fano (1971) write a growing list of numbers: the
    low bits of each as they are, and the high bits as a bitmap, in which the i-th one stands at place high + i. With 64
    of 4,096 elements that is 8 bits for each, where plain numbers would need 12 and the entropy is 7.4.
    """

    low_bits: int
    """Bits of a position that are written as they are."""
    places: int
    """Bits of the bitmap."""
    levels: int
    """Bytes of the smallest and the largest magnitude, as bf16."""
    bitmap: int
    lows: int
    codes: int

    @property
    def total(self) -> int:
        return self.levels + self.bitmap + self.lows + self.codes


def top_k_parts(spec: CodecSpec) -> TopKParts:
    """The parts of a whole cell under `TopK` with these settings."""
    low_bits = (CELL_ELEMENTS // spec.keep).bit_length() - 1
    places = spec.keep + (CELL_ELEMENTS >> low_bits) - 1
    return TopKParts(
        low_bits=low_bits,
        places=places,
        levels=2 * BF16_BYTES,
        bitmap=-(-places // 8),
        lows=-(-spec.keep * low_bits // 8),
        codes=-(-spec.keep * spec.bits // 8),
    )


def cell_bytes(spec: CodecSpec, elements: int) -> int:
    """Bytes of one encoded cell of `elements` values."""
    if spec.name == "None":
        return FP32_BYTES * elements
    if spec.name == "BF16":
        return BF16_BYTES * elements
    if spec.name == "TopK" and elements == CELL_ELEMENTS:
        return top_k_parts(spec).total
    return elements + FP32_BYTES * -(-elements // INT8_BLOCK)  # Int8, and what is too short for TopK


def payload_bytes(spec: CodecSpec, parameters: Iterable[int]) -> int:
    """Bytes of one whole update: every cell of parameters that have the given element counts, encoded once."""
    whole = cell_bytes(spec, CELL_ELEMENTS)
    total = 0
    for elements in parameters:
        cells, rest = divmod(elements, CELL_ELEMENTS)
        total += cells * whole + cell_bytes(spec, rest)
    return total


def wan_bytes(spec: CodecSpec | str, parameters: Iterable[int], replicas: int) -> float:
    """Bytes that one of `replicas` equal replicas sends in a round, on average, without headers; a codec's name stands
    for its default settings.

    Each replica owns one C-th of the cells: it sends the payload of the others' cells and the result of its
    own ones to each of the others, which together is 2 (C - 1) / C times the payload.
    """
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}; it must be 1 or more")
    spec = CodecSpec(spec) if isinstance(spec, str) else spec
    return 2 * (replicas - 1) / replicas * payload_bytes(spec, parameters)


def bytes_text(count: int) -> str:
    """Like 1.5 MB, in powers of 1,000 as network equipment counts."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
