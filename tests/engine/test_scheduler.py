"""The scheduler by itself: requests from a strategy, every kind of cache and speculation."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.config import EngineConfig
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence
from sim.request import Request, Segment

requests = st.lists(
    st.tuples(
        st.integers(0, 12),  # step of arrival
        st.integers(1, 30),  # private prompt
        st.integers(0, 20),  # shared prompt
        st.integers(1, 12),  # output
        st.integers(0, 2),  # priority
    ),
    min_size=1,
    max_size=12,
)
configs = st.builds(
    EngineConfig,
    num_gpu_blocks=st.integers(18, 40),
    block_size=st.sampled_from([4, 5]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(8, 40),
    max_model_len=st.just(64),
    enable_prefix_caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    scheduler_reserve_full_isl=st.booleans(),
    sliding_window=st.sampled_from([None, None, 9]),
    async_scheduling=st.booleans(),
    num_speculative_tokens=st.sampled_from([0, 0, 2]),
    spec_method=st.sampled_from(["eagle", "ngram"]),
    watermark=st.sampled_from([0.0, 0.1]),
)


def sequences(drawn):
    for uid, (step, private, shared, output, priority) in enumerate(drawn):
        segments = (Segment(1, 0, shared), Segment(-2 * uid - 1, 0, private))
        request = Request(
            uid, f"r{uid}", step, private + shared, output, segments, priority=priority
        )
        yield step, Sequence(request)


@settings(max_examples=60, deadline=None)
@given(configs, requests)
def test_everything_is_served_and_the_books_balance(config, drawn):
    scheduler = Scheduler(config)
    pending = sorted(sequences(drawn), key=lambda item: item[0])
    everyone = [seq for _, seq in pending]
    depth = config.max_concurrent_batches
    in_flight = []
    for step in range(3000):
        while pending and pending[0][0] <= step:
            scheduler.add(pending.pop(0)[1])
        if scheduler.has_work:
            plan = scheduler.schedule()
            scheduler.check_integrity()
            assert plan.total_tokens <= config.token_budget
            assert len(set(plan.seqs)) == len(plan.seqs)
            assert not set(plan.preempted) & set(plan.seqs)
            in_flight.append(plan)
        if len(in_flight) == depth or (in_flight and not scheduler.has_work):
            plan = in_flight.pop(0)
            sampled = [
                1 + (step + seq.request.uid) % (1 + plan.drafts.get(seq, 0)) if samples else 0
                for seq, samples in zip(plan.seqs, plan.samples, strict=True)
            ]
            scheduler.update(plan, sampled)
            if config.speculative and not config.async_scheduling:
                scheduler.update_drafts(plan, [config.num_speculative_tokens] * len(plan.seqs))
            scheduler.check_integrity()
        if not pending and not scheduler.has_work and not in_flight:
            break
    assert all(seq.finished for seq in everyone)
    assert all(seq.num_output_tokens == seq.request.output_tokens for seq in everyone)
    assert scheduler.cache.num_free == config.num_usable_blocks
