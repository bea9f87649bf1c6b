"""Which calls to time: coarse grids over the shapes of one model on one GPU of its parallel plan.

Columns are those of the public kernel timings (gemm, attn_prefill, attn_decode, moe, elementwise,
all-reduce), so that measured and published points are fitted alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from sim.cost.models import ModelShape
from sim.cost.parallel import RankPlan
from sim.errors import UserError

TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BY_FOUR = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
DISTRIBUTIONS = ("balanced", "power_law_1.2")


@dataclass(frozen=True)
class Point:
    """One call to time: an operator and the columns that say which."""

    op: str
    columns: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, op: str, /, **columns: Any) -> Point:
        return cls(op, tuple(columns.items()))

    def __getitem__(self, name: str) -> Any:
        return dict(self.columns)[name]

    @property
    def key(self) -> str:
        """A name that is the same in every run."""
        return self.op + " " + " ".join(f"{k}={v}" for k, v in self.columns)

    def row(self) -> dict[str, Any]:
        return dict(self.columns)


@dataclass(frozen=True)
class Limits:
    """How large the calls may be on this device."""

    tokens: int
    context: int
    kv_tokens: int
    """Cached tokens of one attention call."""


def limits_for(kind: str, model: ModelShape) -> Limits:
    """A GPU takes vLLM's budgets; a CPU what it can do in milliseconds."""
    if kind == "cuda":
        return Limits(8192, min(model.context, 32768), 1 << 20)
    return Limits(512, min(model.context, 2048), 8192)


def kernel_points(model: ModelShape, tp: int, dtype: str, limits: Limits) -> list[Point]:
    """All points, the operators in turn, so that a short budget still covers every one of them.
    Within an operator the first points span its range."""
    rank = RankPlan(model, tp)
    if model.heads % tp:
        raise UserError(f"--tp {tp} does not divide the {model.heads} heads of {model.name}")
    families: list[Sequence[Point]] = [
        *(_spread(gemms) for gemms in _gemms(rank, dtype, limits)),
        _spread(list(_prefills(rank, dtype, limits))),
        _spread(list(_decodes(rank, dtype, limits))),
        _spread(list(_moes(rank, dtype, limits))),
        _spread(list(_elementwise(rank, limits))),
    ]
    turns = chain.from_iterable(zip_longest(*families))
    return [point for point in turns if point is not None]


def _gemms(rank: RankPlan, dtype: str, limits: Limits) -> Iterator[list[Point]]:
    shapes = {(x.n, x.k): None for x in rank.linears if x.name != "router"}
    shapes[(rank.vocab, rank.model.hidden)] = None
    for n, k in shapes:
        yield [Point.of("gemm", dtype=dtype, m=m, n=n, k=k) for m in TOKENS if m <= limits.tokens]


def _heads(rank: RankPlan, dtype: str) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "kv_dtype": dtype,
        "heads": rank.heads,
        "kv_heads": rank.kv_heads,
        "head_dim": rank.model.head_dim,
    }


def _prefills(rank: RankPlan, dtype: str, limits: Limits) -> Iterator[Point]:
    heads = _heads(rank, dtype)
    lengths = sorted({*(q for q in BY_FOUR if 4 <= q <= limits.tokens), limits.tokens})
    for q in lengths:
        for prefix in (0, *(p for p in BY_FOUR if p >= 64)):
            if q + prefix <= limits.context:
                yield Point.of("attn_prefill", batch=1, q_len=q, prefix=prefix, **heads)
        if 4 * q <= limits.tokens:
            yield Point.of("attn_prefill", batch=4, q_len=q, prefix=0, **heads)


def _decodes(rank: RankPlan, dtype: str, limits: Limits) -> Iterator[Point]:
    for batch in BY_FOUR[:5]:
        for kv_len in (n for n in BY_FOUR if 16 <= n <= limits.context):
            if batch * kv_len <= limits.kv_tokens:
                yield Point.of("attn_decode", batch=batch, kv_len=kv_len, **_heads(rank, dtype))


def _moes(rank: RankPlan, dtype: str, limits: Limits) -> Iterator[Point]:
    moe = rank.model.moe
    if moe is None:
        return
    for tokens in sorted({*(n for n in BY_FOUR if n <= limits.tokens), limits.tokens}):
        for distribution in DISTRIBUTIONS:
            yield Point.of(
                "moe", dtype=dtype, tokens=tokens, hidden=rank.model.hidden,
                inter=moe.intermediate, topk=moe.topk, experts=moe.experts, tp=rank.tp, ep=1,
                distribution=distribution,
            )  # fmt: skip


def _elementwise(rank: RankPlan, limits: Limits) -> Iterator[Point]:
    width = rank.model.intermediate // rank.tp
    for tokens in (n for n in (*BY_FOUR, limits.tokens) if n <= limits.tokens):
        for op, dim in (("norm", rank.model.hidden), ("act", width)):
            yield Point.of("elementwise", op=op, tokens=tokens, dim=dim)
        yield Point.of(
            "elementwise", op="rope", tokens=tokens,
            dim=(rank.heads + 2 * rank.kv_heads) * rank.model.head_dim,
        )  # fmt: skip


def _spread(points: list[Point]) -> list[Point]:
    """The same points in an order of which every beginning spans the list evenly: the first, the
    last, the middle, the quarters, ..."""
    count = len(points)
    order: dict[int, None] = dict.fromkeys([0, count - 1] if count else [])
    step = max(1, count)
    while len(order) < count:
        step = max(1, step // 2)
        order.update(dict.fromkeys(range(0, count, step)))
    return [points[i] for i in order]
