"""KV memory in blocks: who holds each block, and which chunks of which prompts are in it.

So a shared prefix is computed once. A block that nobody holds keeps its content until it is taken for something else.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

CHUNK = 32  # prefixes are shared in steps of so many tokens

Key = tuple[int, tuple[int, ...]]  # the id of the chunk before, and the tokens


@dataclass(slots=True, eq=False)
class CachedChunk:
    """CHUNK tokens of a prompt that follow the chunk whose id is in `key`. At least one block holds them."""

    id: int  # never reused: the children of a chunk that was dropped cannot be found
    key: Key
    blocks: dict[int, None]  # in the order in which they were filled


class PrefixIndex:
    """The chunks in memory, as a tree for each adapter, because adapters compute different keys and values."""

    def __init__(self) -> None:
        self.chunks: dict[Key, CachedChunk] = {}
        self.in_block: dict[int, list[CachedChunk]] = {}
        self.roots: dict[str | None, int] = {}
        self._ids = 0

    def find(self, adapter: str | None, prompt: Sequence[int]) -> list[CachedChunk]:
        """The chunks that begin the prompt. Its last token is never among them, because it is always computed."""
        found: list[CachedChunk] = []
        while len(found) < (len(prompt) - 1) // CHUNK:
            chunk = self.chunks.get(self.next_key(adapter, prompt, found))
            if chunk is None:
                break
            found.append(chunk)
        return found

    def next_key(self, adapter: str | None, prompt: Sequence[int], found: Sequence[CachedChunk]) -> Key:
        """The key of the first chunk of the prompt that was not found."""
        above = found[-1].id if found else self._root(adapter)
        return above, tuple(prompt[len(found) * CHUNK : (len(found) + 1) * CHUNK])

    def add(self, adapter: str | None, prompt: Sequence[int], columns: int, blocks: Sequence[int]) -> None:
        """Note that the first columns of the prompt are in memory: a block for each chunk, or all in one block."""
        above = self._root(adapter)
        for number in range(columns // CHUNK):
            key = above, tuple(prompt[number * CHUNK : (number + 1) * CHUNK])
            chunk = self.chunks.get(key)
            if chunk is None:
                chunk = self.chunks[key] = CachedChunk(id=self._new_id(), key=key, blocks={})
            block = blocks[0] if len(blocks) == 1 else blocks[number]
            if block not in chunk.blocks:
                chunk.blocks[block] = None
                self.in_block.setdefault(block, []).append(chunk)
            above = chunk.id

    def drop(self, block: int, keep: int = 0) -> None:
        """Forget the chunks of a block that will be overwritten, except its first `keep` chunks."""
        held = self.in_block.pop(block, [])
        for chunk in held[keep:]:
            del chunk.blocks[block]
            if not chunk.blocks:
                del self.chunks[chunk.key]
        if held[:keep]:
            self.in_block[block] = held[:keep]

    def move(self, a: int, b: int) -> None:
        """Note that the content of block `a` is in block `b` now."""
        self.drop(b)
        if held := self.in_block.pop(a, []):
            self.in_block[b] = held
        for chunk in held:
            del chunk.blocks[a]
            chunk.blocks[b] = None

    def _root(self, adapter: str | None) -> int:
        if adapter not in self.roots:
            self.roots[adapter] = self._new_id()
        return self.roots[adapter]

    def _new_id(self) -> int:
        self._ids += 1
        return self._ids


class BlockPool:
    """Reference counts of `num_blocks` blocks.

    slab: a row is its block, and the caller chooses the block (`claim`). Otherwise the pool chooses (`take`): an empty
    block, or the one that has been unused for longest.
    """

    def __init__(self, num_blocks: int, *, slab: bool = False) -> None:
        self.index, self.slab = PrefixIndex(), slab
        self.refs = [0] * num_blocks
        self.free = num_blocks
        self._empty = [] if slab else list(range(num_blocks))[::-1]  # the last one is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # free but indexed; the longest unused first

    def take(self, count: int) -> list[int]:
        """Take blocks to write into, no more than are free. The caller holds them."""
        split = max(len(self._empty) - count, 0)
        blocks = self._empty[split:][::-1]
        del self._empty[split:]
        while len(blocks) < count:
            block, _ = self._cached.popitem(last=False)
            self.index.drop(block)
            blocks.append(block)
        for block in blocks:
            self.refs[block] = 1
        self.free -= count
        return blocks

    def claim(self, block: int, keep: int = 0) -> None:
        """Take this free block to write into. Its first `keep` chunks stay."""
        if self.refs[block]:
            raise ValueError(f"block {block} is held already")
        self.index.drop(block, keep)
        self.refs[block] = 1
        self.free -= 1

    def hold(self, blocks: Iterable[int]) -> list[int]:
        """Count one reader more for each block. It may be a free one that has kept its content."""
        held = list(blocks)
        for block in held:
            if not self.refs[block]:
                del self._cached[block]
                self.free -= 1
            self.refs[block] += 1
        return held

    def release(self, blocks: Iterable[int]) -> None:
        """Count one reader less for each block.

        Give a sequence's last block first: what is released first is reused first, and beginnings are shared most.
        """
        refs, held = self.refs, self.index.in_block
        for block in blocks:
            readers = refs[block] - 1
            if readers < 0:
                raise ValueError(f"block {block} is held by nobody")
            refs[block] = readers
            if readers:
                continue
            self.free += 1
            if block in held and not self.slab:
                self._cached[block] = None
            elif not self.slab:
                self._empty.append(block)

    def move(self, a: int, b: int) -> None:
        """Row `a`, which is its block, goes on as row `b`, which was free."""
        self.claim(b)
        self.index.move(a, b)
        self.release([a])


def claim_rows(pool: BlockPool, rows: Sequence[int], chunks: Sequence[CachedChunk]) -> tuple[int, int, int] | None:
    """Claim the rows for a prompt that begins with the chunks. Returns the columns to copy into the first row."""
    holders = chunks[-1].blocks if chunks else {}
    in_place = rows[0] in holders  # the first row holds the chunks already
    source = next(reversed(holders)) if holders else -1
    pool.claim(rows[0], keep=len(chunks) if in_place else 0)
    for row in rows[1:]:
        pool.claim(row)
    return None if in_place or not chunks else (source, rows[0], CHUNK * len(chunks))


def claim_blocks(
    pool: BlockPool, prompt: int, limits: Sequence[int], chunks: Sequence[CachedChunk], *, held_back: int = 0
) -> list[tuple[int, ...]]:
    """Blocks for as many sequences as there is room for. They share a prompt of so many tokens.

    The full blocks of the prompt are shared, but never its last `held_back` tokens. Blocks of `chunks` are in memory
    already. A last block that is partly filled belongs to one sequence.
    """
    shared = [next(reversed(chunk.blocks)) for chunk in chunks]
    full = (prompt - held_back) // CHUNK
    private = [-(-(prompt + limit) // CHUNK) - full for limit in limits]
    room = pool.free - (full - len(shared)) - sum(not pool.refs[block] for block in shared)
    ends = list(takewhile(lambda end: end <= room, accumulate(private)))
    if not ends:
        return []
    start = (*pool.hold(shared), *pool.take(full - len(shared)))
    pool.hold(start * (len(ends) - 1))
    blocks = pool.take(ends[-1])
    return [(*start, *blocks[end - count : end]) for count, end in zip(private, ends, strict=False)]
