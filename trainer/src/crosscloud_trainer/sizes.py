"""How many bytes each codec puts on the wire, and how bytes are shown: what planner, codecs and displays share.

Standard library only, since the operator imports this module without torch or numpy. All element counts are
numbers of fp32 values of one parameter; a parameter is cut into cells of `CELL_ELEMENTS` values from its
first one, and the last cell of a parameter is shorter where the count isn't a multiple.
"""

from collections.abc import Iterable

CELL_ELEMENTS = 4096
"""Values in a whole cell, the unit that crosses the WAN."""

INT8_BLOCK = 256
"""Values of a cell that share one scale under `Int8`; it divides `CELL_ELEMENTS`, so that blocks tile a cell.
"""

FP32_BYTES = 4

CODECS = ("None", "Int8")


def cell_bytes(codec: str, elements: int) -> int:
    """Bytes of one encoded cell of `elements` values; ValueError for a codec that doesn't exist."""
    if codec == "None":
        return FP32_BYTES * elements
    if codec == "Int8":
        blocks = -(-elements // INT8_BLOCK)
        return elements + FP32_BYTES * blocks
    raise ValueError(f"codec {codec!r} does not exist; use one of {', '.join(CODECS)}")


def payload_bytes(codec: str, parameters: Iterable[int]) -> int:
    """Bytes of one whole update: every cell of parameters that have the given element counts, encoded once."""
    whole = cell_bytes(codec, CELL_ELEMENTS)
    total = 0
    for elements in parameters:
        cells, rest = divmod(elements, CELL_ELEMENTS)
        total += cells * whole + cell_bytes(codec, rest)
    return total


def wan_bytes(codec: str, parameters: Iterable[int], replicas: int) -> float:
    """Bytes that one of `replicas` equal replicas sends in a round, on average, without headers.

    Each replica owns one C-th of the cells: it sends the payload of the others' cells and the result of its
    own ones to each of the others, which together is 2 (C - 1) / C times the payload.
    """
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}; it must be 1 or more")
    return 2 * (replicas - 1) / replicas * payload_bytes(codec, parameters)


def bytes_text(count: int) -> str:
    """Like 1.5 MB, in powers of 1,000 as network equipment counts."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
