"""KV memory in blocks: who holds each, and which chunks of which prompts are still in them, so that a prefix is
computed once. A block that nobody holds keeps its content until it is taken for something else."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

CHUNK = 32  # prefixes are shared in steps of so many tokens

Key = tuple[int, tuple[int, ...]]  # the id of the chunk before, and the tokens: a dictionary compares them


@dataclass(slots=True, eq=False)
class CachedChunk:
    """CHUNK tokens of a prompt that follow the chunk whose id is in `key`; kept in at least one block."""

    id: int  # never used again, so that the children of a chunk that is gone are found by nobody
    key: Key
    blocks: dict[int, None]  # in the order they were filled


class PrefixIndex:
    """The chunks in memory, as a tree; the root of each tree is an adapter, for its keys and values are its own."""

    def __init__(self) -> None:
        self.chunks: dict[Key, CachedChunk] = {}
        self.held: dict[int, list[CachedChunk]] = {}  # by block
        self.roots: dict[str | None, int] = {}
        self._ids = 0

    def find(self, adapter: str | None, prompt: Sequence[int]) -> list[CachedChunk]:
        """The chunks that begin the prompt, without its last token: that one is always computed."""
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
        """The first columns of the prompt are in memory: one block a chunk, or all in one block."""
        above = self._root(adapter)
        for number in range(columns // CHUNK):
            key = above, tuple(prompt[number * CHUNK : (number + 1) * CHUNK])
            chunk = self.chunks.get(key)
            if chunk is None:
                chunk = self.chunks[key] = CachedChunk(id=self._new_id(), key=key, blocks={})
            block = blocks[0] if len(blocks) == 1 else blocks[number]
            if block not in chunk.blocks:
                chunk.blocks[block] = None
                self.held.setdefault(block, []).append(chunk)
            above = chunk.id

    def drop(self, block: int, keep: int = 0) -> None:
        """Forget the chunks in a block that is written anew, except its first `keep` chunks."""
        held = self.held.pop(block, [])
        for chunk in held[keep:]:
            del chunk.blocks[block]
            if not chunk.blocks:
                del self.chunks[chunk.key]
        if held[:keep]:
            self.held[block] = held[:keep]

    def move(self, a: int, b: int) -> None:
        """Note that the content of block `a` is in block `b` now."""
        self.drop(b)
        if held := self.held.pop(a, []):
            self.held[b] = held
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

    slab: a row is its block, and the caller says which one it takes (`claim`). Otherwise the pool chooses (`take`): a
    blank one, or the one that has been unused for longest.
    """

    def __init__(self, num_blocks: int, *, slab: bool = False) -> None:
        self.index, self.slab = PrefixIndex(), slab
        self.refs = [0] * num_blocks
        self.free = num_blocks
        self._blank = [] if slab else list(range(num_blocks))[::-1]  # the next one last
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, content in the index; the longest unused first

    def take(self, count: int) -> list[int]:
        """Blocks to write into, no more than are free; the caller holds them."""
        split = max(len(self._blank) - count, 0)
        blocks = self._blank[split:][::-1]
        del self._blank[split:]
        while len(blocks) < count:
            block, _ = self._kept.popitem(last=False)
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
        """One more reader of each, free ones that have kept their content among them."""
        held = list(blocks)
        for block in held:
            if not self.refs[block]:
                del self._kept[block]
                self.free -= 1
            self.refs[block] += 1
        return held

    def release(self, blocks: Iterable[int]) -> None:
        """Count one reader less for each block. Give a sequence's last block first: its beginning is wanted longest."""
        refs, held = self.refs, self.index.held
        for block in blocks:
            left = refs[block] - 1
            if left < 0:
                raise ValueError(f"block {block} is held by nobody")
            refs[block] = left
            if left:
                continue
            self.free += 1
            if block in held and not self.slab:
                self._kept[block] = None
            elif not self.slab:
                self._blank.append(block)

    def move(self, a: int, b: int) -> None:
        """Row `a`, which is its block, goes on as `b`, which was free."""
        self.claim(b)
        self.index.move(a, b)
        self.release([a])


def claim_rows(pool: BlockPool, rows: Sequence[int], chunks: Sequence[CachedChunk]) -> tuple[int, int, int] | None:
    """The blocks of these rows, for a prompt that begins with the chunks; the columns to copy into the first row."""
    holders = chunks[-1].blocks if chunks else {}
    kept = rows[0] in holders  # what it needs is in place already
    source = next(reversed(holders)) if holders else -1
    pool.claim(rows[0], keep=len(chunks) if kept else 0)
    for row in rows[1:]:
        pool.claim(row)
    return None if kept or not chunks else (source, rows[0], CHUNK * len(chunks))


def claim_blocks(
    pool: BlockPool, prompt: int, limits: Sequence[int], chunks: Sequence[CachedChunk], *, held_back: int = 0
) -> list[tuple[int, ...]]:
    """Blocks for sequences that share a prompt of so many tokens, as many sequences as there is room for.

    Full blocks of the prompt are shared, without its last `held_back` tokens; those of `chunks` are in memory already.
    A partly filled last block is private to each sequence.
    """
    shared = [next(reversed(chunk.blocks)) for chunk in chunks]
    whole = (prompt - held_back) // CHUNK
    own = [-(-(prompt + limit) // CHUNK) - whole for limit in limits]
    room = pool.free - (whole - len(shared)) - sum(not pool.refs[block] for block in shared)
    ends = list(takewhile(lambda end: end <= room, accumulate(own)))
    if not ends:
        return []
    start = (*pool.hold(shared), *pool.take(whole - len(shared)))
    pool.hold(start * (len(ends) - 1))
    blocks = pool.take(ends[-1])
    return [(*start, *blocks[end - count : end]) for count, end in zip(own, ends, strict=False)]
