"""From rows to answers: latencies, throughput, where time and memory went, whether it is stable."""
