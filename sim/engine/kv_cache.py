"""The KV cache of one engine: block tables, allocation and the prefix cache, as in vLLM V1.

It knows sequences and tokens, no time. What fits is decided here; who asks, in which order, and
what happens when the answer is no, is the scheduler's business.
"""

from __future__ import annotations

from sim.engine.block_names import BlockNames
from sim.engine.block_pool import NULL_BLOCK, BlockPool
from sim.engine.config import EngineConfig
from sim.engine.eviction import RankedPool
from sim.engine.runs import FreeRuns
from sim.engine.sequence import Sequence
from sim.protocols import EvictionPolicy, Layout


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // block_size)


def make_pool(num_blocks: int, layout: Layout, eviction: EvictionPolicy | None) -> BlockPool:
    """The pool for a layout; `eviction` None is vLLM's."""
    if layout != "paged":
        return BlockPool(num_blocks, FreeRuns(range(1, num_blocks), buddy=layout == "buddy"))
    if eviction is None or eviction.free_queue:
        return BlockPool(num_blocks)
    return RankedPool(num_blocks, eviction)


class KVCache:
    """Gives blocks to sequences and remembers what the blocks contain."""

    def __init__(
        self,
        config: EngineConfig,
        layout: Layout = "paged",
        eviction: EvictionPolicy | None = None,
    ) -> None:
        """Without pages (`layout` contiguous or buddy) there is no prefix cache."""
        self.block_size = config.block_size
        self.max_model_len = config.max_model_len
        self.caching = config.enable_prefix_caching and layout == "paged"
        self.window = config.sliding_window
        self.lookahead = config.num_lookahead_tokens
        self.pool = make_pool(config.num_blocks, layout, eviction)
        self.names = BlockNames(config.block_size, config.hash_lookahead)
        self._named: dict[Sequence, None] = {}  # sequences that hold names
        self._admission_cap = config.max_window_blocks

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    # -- prefix cache

    def find_hit(self, seq: Sequence) -> list[int]:
        """The longest cached prefix of the known tokens, as a block table (changes nothing).

        At least one token is left to compute: it is needed to sample.
        """
        if not self.caching:
            return []
        self._name(seq)
        names = seq.block_names[: (seq.num_tokens - 1) // self.block_size]
        if self.window is not None:
            return self._find_window_hit(names, self.window)
        hit = []
        for name in names:
            block = self.pool.lookup(name)
            if block is None:
                break
            hit.append(block)
        return hit

    def _find_window_hit(self, names: list[int], window: int) -> list[int]:
        """With a sliding window only the last blocks before the end of a hit must be cached: the
        rightmost run of enough of them wins, else the run at the start."""
        needed = blocks_for(window - 1, self.block_size)
        run: list[int] = []
        for i in range(len(names) - 1, -1, -1):
            block = self.pool.lookup(names[i])
            if block is None:
                run = []
                continue
            run.append(block)
            if len(run) >= needed:
                return [NULL_BLOCK] * i + run[::-1]
        return run[::-1]

    def register(self, seq: Sequence, num_tokens: int) -> None:
        """Enter the blocks that the first `num_tokens` known tokens fill into the prefix cache."""
        if not self.caching or num_tokens // self.block_size <= seq.num_registered:
            return
        self._name(seq)
        full = min(num_tokens // self.block_size, len(seq.block_names))
        if self.window == 1:  # no cached block could ever serve a hit
            seq.num_registered = max(full, seq.num_registered)
        for i in range(seq.num_registered, full):
            if seq.blocks[i] != NULL_BLOCK:
                self.pool.register(seq.blocks[i], seq.block_names[i], depth=i)
            seq.num_registered = i + 1

    def _name(self, seq: Sequence) -> None:
        if seq not in self._named:
            self._named[seq] = None
            if self.names.wants_sweep:
                held = {name for other in self._named for name in other.block_names}
                self.names.sweep(held.union(self.pool.cached_names()))
        self.names.extend(seq)

    # -- allocation

    def missing_blocks(self, seq: Sequence, num_new_tokens: int) -> int:
        """Blocks a running sequence lacks for `num_new_tokens` more."""
        slots = seq.num_computed_tokens + num_new_tokens + self.lookahead
        if slots > self.max_model_len:
            slots = self.max_model_len
        return -(-slots // self.block_size) - len(seq.blocks)

    def allocate(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Make room for `num_new_tokens` more of a running sequence; False when it cannot."""
        if self.window is not None:
            self._drop_out_of_window(seq, seq.num_computed_tokens - seq.in_flight)
        missing = self.missing_blocks(seq, num_new_tokens)
        if missing > 0:
            if not self.pool.free.fits(missing):
                return False
            seq.blocks += self.pool.take(missing)
        if self.caching:
            self.register(seq, min(seq.num_computed_tokens + num_new_tokens, seq.num_tokens))
        return True

    def admission_blocks(self, hit: list[int], num_tokens: int) -> int:
        """Free blocks that room for `num_tokens` takes, after a hit: those missing, and those of
        the hit that nobody holds."""
        missing = blocks_for(min(num_tokens, self.max_model_len), self.block_size) - len(hit)
        hit_tokens = len(hit) * self.block_size
        return max(missing, 0) + self.pool.num_unheld(hit[self._skipped_blocks(hit_tokens) :])

    def admit(
        self,
        seq: Sequence,
        hit: list[int],
        num_new_tokens: int,
        *,
        whole_must_fit: bool,
        spare_blocks: int,
        reserved_tokens: int = 0,
    ) -> bool:
        """Give a waiting sequence its cached prefix `hit` and room for `num_new_tokens` more, or
        for `reserved_tokens` in all if that is more.

        False, and nothing changed, unless they fit and leave `spare_blocks` free; with
        `whole_must_fit` all its known tokens must fit as well, though they are not allocated.
        """
        size, free = self.block_size, self.pool.num_free - spare_blocks
        if whole_must_fit:
            whole = seq.num_tokens
            if self._admission_cap is not None:
                whole = min(whole, self._admission_cap * size)
            if self.admission_blocks(hit, whole) > free:
                return False
        computed = len(hit) * size
        slots = max(computed + num_new_tokens + self.lookahead, reserved_tokens)
        if self.admission_blocks(hit, slots) > free:
            return False
        missing = blocks_for(min(slots, self.max_model_len), size) - len(hit)
        if not self.pool.free.fits(missing):
            return False
        skipped = self._skipped_blocks(computed)
        self.pool.touch(hit[skipped:])
        seq.blocks = [NULL_BLOCK] * skipped + hit[skipped:]
        seq.num_registered = len(hit)
        seq.blocks += self.pool.take(missing)
        self.register(seq, min(computed + num_new_tokens, seq.num_tokens))
        return True

    def release(self, seq: Sequence) -> None:
        """Take all blocks from a sequence; the end of a cached prefix is evicted first."""
        self.pool.release(reversed(seq.blocks))
        seq.blocks = []
        seq.num_registered = 0

    def forget(self, seq: Sequence) -> None:
        """Release a sequence that will not come back."""
        self.release(seq)
        self._named.pop(seq, None)
        seq.block_names = []

    def _skipped_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks wholly below the window of the next token."""
        if self.window is None:
            return 0
        return max(0, num_computed_tokens - self.window + 1) // self.block_size

    def _drop_out_of_window(self, seq: Sequence, num_processed_tokens: int) -> None:
        """Free blocks that no step still to come, or in flight, will read."""
        table, dropped = seq.blocks, []
        for i in range(min(self._skipped_blocks(num_processed_tokens), len(table)) - 1, -1, -1):
            if table[i] == NULL_BLOCK:
                break
            dropped.append(table[i])
            table[i] = NULL_BLOCK
        if dropped:
            self.pool.release(dropped)

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raise AssertionError unless blocks, references and free queue add up."""
        self.pool.check_integrity(seq.blocks for seq in sequences)
        for seq in sequences:
            if seq.blocks:
                slots = len(seq.blocks) * self.block_size
                assert seq.num_computed_tokens <= slots, f"{seq}: tokens without a block"
            assert seq.num_registered <= max(len(seq.blocks), 0), f"{seq}: registered too much"
