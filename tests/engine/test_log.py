"""The step log: what is appended comes out, expanded."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sim.engine.log import COLUMNS, StepLog


def small_log() -> StepLog:
    """A prefill, three merged decode steps, and a mixed step after a pause."""
    log = StepLog()
    log.add_step(0, 5, 1, 2, 0, 0, 0, 0, [(10, 4)], 1, 4, 0, 1, 0)
    log.add_entry(3, 5, 2, 1, 2, 26, 340, 1)
    log.add_ends([7, 9, 12], [2, 2, 3])
    log.add_step(20, 26, 3, 0, 2, 2, 32, 514, [(3, 0), (5, 7)], 3, 0, 1, 4, 2)
    return log


def test_table_expands_runs_and_derives_chunks():
    table = small_log().table()
    assert tuple(table) == COLUMNS
    expected = {
        "start_ns": [0, 5, 7, 9, 20],
        "end_ns": [5, 7, 9, 12, 26],
        "num_running": [1, 2, 2, 2, 3],
        "num_waiting": [2, 1, 1, 1, 0],
        "num_decodes": [0, 2, 2, 2, 2],
        "decode_tokens": [0, 2, 2, 2, 2],
        "decode_context": [0, 26, 28, 30, 32],
        "decode_context_sq": [0, 340, 394, 452, 514],
        "num_prefills": [1, 0, 0, 0, 2],
        "prefill_tokens": [10, 0, 0, 0, 8],
        "num_sampled": [1, 2, 2, 2, 3],
        "cached_tokens": [4, 0, 0, 0, 0],
        "num_preempted": [0, 0, 0, 0, 1],
        "num_gaps": [0, 1, 2, 2, 2],
        "kv_used_blocks": [1, 2, 2, 3, 4],
    }
    assert {name: column.tolist() for name, column in table.items()} == expected
    assert len(pd.DataFrame(table)) == len(small_log()) == 5


def test_squares_of_a_run_are_those_of_growing_contexts():
    contexts = np.array([3, 11, 40])
    log = StepLog()
    log.add_entry(50, 0, 3, 0, 3, int(contexts.sum()), int((contexts**2).sum()), 3)
    log.add_ends(list(range(1, 51)), [0] * 50)
    table = log.table()
    for i in range(50):
        assert table["decode_context"][i] == (contexts + i).sum()
        assert table["decode_context_sq"][i] == ((contexts + i) ** 2).sum()


def test_shapes_are_what_the_cost_model_takes():
    shapes = small_log().shapes()
    assert shapes.num_tokens.tolist() == [10, 2, 2, 2, 10]
    assert shapes.chunk_step.tolist() == [0, 4, 4]
    assert shapes.chunk_tokens.tolist() == [10, 3, 5]
    assert shapes.chunk_prefix.tolist() == [4, 0, 7]


def test_gaps_recover_every_inter_token_time():
    log = small_log()
    log.add_long_gap(4, 21)
    log.num_zero_gaps = 3
    ns, count = log.gaps()
    assert np.repeat(ns, count).tolist() == [2, 2, 2, 3, 3, 14, 14, 21, 0, 0, 0]


def test_an_empty_log_has_empty_columns():
    log = StepLog()
    assert len(log) == 0
    assert all(len(column) == 0 for column in log.table().values())
    assert len(log.shapes().num_tokens) == 0
    assert [len(part) for part in log.gaps()] == [0, 0]
