"""Tile sizes of the matrix products, chosen by the number of rows; measured on an H200 with benchmarks/kernels.py."""

from dataclasses import dataclass

ROWS = 256  # buffers hold a multiple of so many rows, the largest row tile
NARROW = 960  # columns below which a product has too few tiles for an H200
WIDE = 8_192  # columns from which a product is taken for the vocabulary's
CUBLAS_ROWS = 96  # rows from which cuBLAS computes the logits faster


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, columns and depth of a tile, warps, and stages of the load pipeline."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    copied: bool = True  # loaded by Hopper's copy engine, which is faster from a certain size on


INVARIANT = Tile(64, 64, 64, 4, 4)  # for batches that must not change a row's numbers: one size for every batch


def cdiv(whole: int, each: int) -> int:
    """How many of this size cover the whole."""
    return -(-whole // each)


def power(x: int) -> int:
    """The least power of 2 that is not below x."""
    return 1 << max(0, x - 1).bit_length()


def most_parts(cols: int) -> int:
    """Room for the sums of squares of a row, one for each column tile."""
    return power(cdiv(cols, 16 if cols < NARROW else 32))


def tile(rows: int, cols: int, depth: int, *, invariant: bool, double: bool = False) -> Tile:
    """The tile for [rows, depth] x [depth, cols]; double: two products at once, which need twice the registers."""
    if invariant:
        return INVARIANT
    if rows <= 16:
        return Tile(16, 64, 64, 4, 3, False) if cols >= WIDE else _few(depth)
    if rows <= 64:
        return Tile(64, 64, 64, 4, 4) if cols >= WIDE else _some(cols, double=double)
    if double:
        small = Tile(64, 64, 128, 4, 4) if rows <= 256 and cols < 4_096 else Tile(64, 64, 64, 4, 3)
        return small if rows <= 256 or (cols < 4_096 and rows <= 2_048) else Tile(128, 64, 64, 4, 3)
    if rows <= 256 and cols < 1_024:
        return _narrow(cols, depth)
    if rows <= 512:
        return Tile(64, 64, 128, 4, 4) if cols < WIDE else Tile(128, 128, 64, 4, 3)
    if rows <= 2_048 and cols < WIDE:
        return Tile(128, 64, 64, 4, 4) if cols * depth < 1 << 19 else Tile(128, 64, 128, 4, 4)
    return Tile(128, 128, 64, 8, 3)


def _few(depth: int) -> Tile:
    """For up to 16 rows."""
    return Tile(16, 32, 256, 2, 4, False) if depth >= 1_024 else Tile(16, 32, 128, 4, 4, False)


def _some(cols: int, *, double: bool) -> Tile:
    """For 17 to 64 rows: narrow, so that enough multiprocessors have one."""
    if double and cols > 4_096:
        return Tile(64, 64, 128, 4, 3, False)
    return Tile(64, 16, 256, 4, 4) if double or cols < NARROW else Tile(64, 32, 128, 4, 6)


def _narrow(cols: int, depth: int) -> Tile:
    """For 65 to 256 rows and few columns: deep products want many stages, and a multiprocessor of their own."""
    if depth >= 1_024:
        return Tile(64, 32, 128, 4, 6)
    if cols < 768:
        return Tile(64, 32, 128, 4, 4, False)
    return Tile(64, 64, 128, 4, 4, cols >= NARROW)
