"""Paths through the tree of texts, against comparing block by block."""

from __future__ import annotations

import random
from itertools import combinations

from sim.engine.fast.lines import END, Lines, text_runs
from sim.engine.fast.sequence import FastSequence
from sim.engine.interface import RequestRecord, Status
from sim.request import Request, Segment, output_key, prompt_key

BLOCK = 4
DEPTH = 60  # blocks looked at


def sequence(request: Request) -> FastSequence:
    return FastSequence(request, RequestRecord(request, Status.UNFINISHED), 1, False)


def tokens(request: Request, count: int) -> list[tuple[int, int]]:
    """(content, position) of the first tokens, outputs included."""
    listed = [
        (content, start + i)
        for content, start, length in request.prompt_segments()
        for i in range(length)
    ]
    while len(listed) < count:
        listed.append((output_key(request.uid), len(listed) - request.prompt_tokens))
    return listed[:count]


def requests(rng: random.Random, count: int) -> list[Request]:
    made: list[Request] = []
    for uid in range(count):
        segments: list[Segment] = []
        if made and rng.random() < 0.5:
            other = rng.choice(made)
            segments += other.prompt_segments()
            segments.append(Segment(output_key(other.uid), 0, rng.randint(1, 9)))
        elif rng.random() < 0.6:
            segments.append(Segment(rng.randint(0, 1), rng.choice([0, 0, 4]), rng.randint(1, 20)))
        segments.append(Segment(prompt_key(uid), 0, rng.randint(0, 9)))
        if sum(s.length for s in segments) == 0:
            segments.append(Segment(7, 0, 1))
        length = sum(s.length for s in segments)
        made.append(Request(uid, str(uid), 0, length, 1, tuple(segments)))
    return made


def test_paths_agree_exactly_as_far_as_the_texts_do():
    for seed in range(200):
        rng = random.Random(seed)
        lines = Lines(BLOCK)
        seqs = [sequence(request) for request in requests(rng, 8)]
        for seq in seqs:
            seq.path = lines.enter(seq)
        for a, b in combinations(seqs, 2):
            texts = [tokens(s.request, DEPTH * BLOCK) for s in (a, b)]
            common = next((i for i in range(DEPTH * BLOCK) if texts[0][i] != texts[1][i]), None)
            assert common is not None
            assert shared_blocks(a, b) == common // BLOCK, f"seed {seed}: {a.request} {b.request}"


def shared_blocks(a: FastSequence, b: FastSequence) -> int:
    assert a.path is not None
    assert b.path is not None
    shared = 0
    for (line, end), (other, other_end) in zip(a.path, b.path, strict=False):
        if line is not other:
            break
        shared = min(end, other_end)
        if end != other_end:
            break
    return shared


def test_equal_texts_cut_differently_have_equal_runs():
    whole = Request(0, "0", 0, 30, 1, (Segment(5, 0, 30),))
    cut = Request(0, "0", 0, 30, 1, (Segment(5, 0, 3), Segment(5, 3, 20), Segment(5, 23, 7)))
    assert text_runs(whole, BLOCK) == text_runs(cut, BLOCK)


def test_lines_are_dropped_when_nobody_uses_them():
    lines = Lines(BLOCK)
    seqs = [sequence(request) for request in requests(random.Random(3), 20)]
    for seq in seqs:
        seq.path = lines.enter(seq)
    assert len(list(lines.walk())) > 20
    for seq in seqs:
        lines.leave(seq)
    assert len(list(lines.walk())) == 1  # the root


def test_a_private_prompt_is_a_line_of_its_own():
    lines = Lines(BLOCK)
    path = lines.enter(sequence(Request(3, "3", 0, 10, 5)))
    assert [end for _, end in path] == [END]
