"""When a text ends: EOS, stop tokens, stop strings. (The scheduler knows the lengths.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from calibrate.engine.sampling import SamplingParams
from sim.errors import UserError

Detokenize = Callable[[Sequence[int]], str]


class StopChecker:
    """Looks at the new tokens of one text."""

    def __init__(
        self, params: SamplingParams, eos: Sequence[int], detokenize: Detokenize | None = None
    ) -> None:
        if params.stop and detokenize is None:
            raise UserError("stop strings need a tokenizer: give the engine a detokenize function")
        self.ends = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos)
        )
        self.strings = params.stop
        self._detokenize = detokenize

    @property
    def active(self) -> bool:
        """Whether anything can end the text at all."""
        return bool(self.ends or self.strings)

    def first_end(self, output: Sequence[int], num_new: int) -> tuple[int, str] | None:
        """(length of the output at its first end among the last `num_new` tokens, why); or None.

        The token that ends it counts as output; a stop string may begin in earlier tokens.
        """
        for length in range(len(output) - num_new + 1, len(output) + 1):
            token = output[length - 1]
            if token in self.ends:
                return length, f"token {token}"
            found = self._string_in(output[:length])
            if found is not None:
                return length, f"string {found!r}"
        return None

    def _string_in(self, output: Sequence[int]) -> str | None:
        if not self.strings or self._detokenize is None:
            return None
        text = self._detokenize(output)
        return next((s for s in self.strings if s in text), None)
