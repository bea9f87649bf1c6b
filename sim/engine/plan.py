"""A step as the scheduler hands it out, and what it produced."""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.engine.sequence import Sequence


@dataclass(slots=True)
class Budget:
    """What is left of one step, and its other bounds.

    Every scheduled sequence takes its tokens from two budgets, and one more row of the second
    (the model's input) when a draft model needs it.
    """

    tokens: int
    inputs: int
    draft_rows: int = 0
    per_sequence: int = 0
    """Most tokens for one sequence; 0 is no limit."""
    max_running: int = 1 << 60
    hold_prefills: bool = False
    """Only decodes may run in this step."""
    left: int = field(init=False)
    """Tokens the next sequence may still get; <= 0 when the step is full."""

    def __post_init__(self) -> None:
        self.left = min(self.tokens, self.inputs - self.draft_rows)

    def take(self, num_tokens: int) -> int:
        """Give tokens to a sequence; what is `left`."""
        if self.draft_rows:
            self.tokens -= num_tokens
            self.inputs -= num_tokens + self.draft_rows
            self.left = min(self.tokens, self.inputs - self.draft_rows)
        else:  # both shrink alike
            self.left -= num_tokens
        return self.left

    def give_back(self, num_tokens: int) -> None:
        """A sequence that got tokens loses them again."""
        if self.draft_rows:
            self.tokens += num_tokens
            self.inputs += num_tokens + self.draft_rows
            self.left = min(self.tokens, self.inputs - self.draft_rows)
        else:
            self.left += num_tokens


@dataclass(slots=True, eq=False)
class StepPlan:
    """The sequences of one step in schedule order: first those that were running, then admitted
    ones. The lists are parallel."""

    seqs: list[Sequence] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    """Tokens to compute for each, drafts included."""
    num_computed: list[int] = field(default_factory=list)
    """Tokens each had computed before this step; for an admitted one its prefix-cache hit."""
    samples: list[bool] = field(default_factory=list)
    """Whether the step completes all known tokens of the sequence, so that it samples."""
    num_running: int = 0
    """The first so many entries were running before."""
    drafts: dict[Sequence, int] = field(default_factory=dict)
    """Draft tokens to verify, where there are any."""
    padded: set[Sequence] = field(default_factory=set)
    """Admitted sequences whose drafts only pad the batch: all will be rejected."""
    preempted: list[Sequence] = field(default_factory=list)
    """Victims of this step, in order."""

    def __bool__(self) -> bool:
        return bool(self.seqs)

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    def add(self, seq: Sequence, num_tokens: int, num_computed: int) -> None:
        self.seqs.append(seq)
        self.num_tokens.append(num_tokens)
        self.num_computed.append(num_computed)

    def drop(self, seq: Sequence) -> int | None:
        """Take a sequence out again; its tokens, or None when it was not in."""
        if seq not in self.seqs:
            return None
        i = self.seqs.index(seq)
        del self.seqs[i], self.num_computed[i]
        self.drafts.pop(seq, None)
        return self.num_tokens.pop(i)


@dataclass(slots=True)
class StepResult:
    """What `Scheduler.update` made of a step's output."""

    new_tokens: list[int]
    """Output tokens delivered per entry of the plan (0: none, or the sequence is gone)."""
    finished: list[Sequence]
    """Sequences that reached their end, in schedule order."""
