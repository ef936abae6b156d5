"""Tile sizes of the matrix products, chosen by the number of rows; measured on an H200 with benchmarks/kernels.py."""

from dataclasses import dataclass

ROWS = 128  # buffers hold a multiple of so many rows, the largest row tile
MIN_COLS = 32  # the narrowest column tile of products whose squares are summed by tile


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, columns and depth of a tile, warps, and stages of the load pipeline."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


# For batches that must not change a row's numbers: one size for every batch.
INVARIANT = Tile(64, 64, 64, 4, 4)


def tile(rows: int, cols: int, depth: int, *, invariant: bool, double: bool = False) -> Tile:
    """The tile for [rows, depth] x [depth, cols]; double: two products at once, which need twice the registers."""
    if invariant:
        return INVARIANT
    if rows <= 16:
        return Tile(16, 32 if cols < 8192 else 64, 128, 4, 4)
    if rows <= 32:
        return Tile(32, 32 if cols < 8192 else 64, 64, 4, 4)
    if rows <= 128:
        return Tile(64, 32 if cols < 8192 else 128, 64, 4, 4)
    if rows <= 512:
        return Tile(64, 64 if double or cols > 1024 else 32, 64, 4, 4) if cols < 8192 else Tile(128, 128, 64, 8, 3)
    return Tile(64, 64, 64, 4, 4) if cols < 1024 else Tile(128, 128 if not double else 64, 64, 8, 3)
