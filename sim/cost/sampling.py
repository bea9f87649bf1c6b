"""How vLLM restricts sampling to the top-p tokens, by version.

Models whose generation_config asks for top-p get it from vLLM's server unasked. FlashInfer's kernel
does it in under 0.15 ms; it was the default until 0.11.0 (pull request 26859 switched it off) and
is again since 0.20 (40376). In between vLLM sorted all logits with PyTorch, and since 0.17 it
searches for the threshold in Triton (33538). Only the sort is worth a term of its own.
"""

from __future__ import annotations

SORTED_SINCE = (0, 11, 1)
SORTED_UNTIL = (0, 17)


def sorts_for_top_p(version: tuple[int, ...]) -> bool:
    """Whether that version of vLLM sorts the vocabulary of every sequence to apply top-p."""
    return SORTED_SINCE <= version < SORTED_UNTIL
