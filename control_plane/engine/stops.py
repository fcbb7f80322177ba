"""Which token ids end a running request's text, so that one look tells whether any of a step's tokens does.

Knows neither rows nor reasons: a token that is to be looked at need not end anything.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockplane.protos.errors import ProtocolError
from blockplane.protos.plan import Int32Array

BoolArray: TypeAlias = NDArray[np.bool_]


class Stops:
    """The stop ids of all requests with rows, and the ends of text, which stop nearly everyone."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        # How many requests have each token id among their stops.
        self._num_stops = np.zeros(vocab_size, np.int32)
        # An id that the model's logits do not reach ends nothing.
        self._num_stops[[token_id for token_id in eos_token_ids if token_id < vocab_size]] = 1
        # Whether an answered id is one to look at, at id + 1, so that one gather tells for all rows: it stops somebody,
        # or is none of the model's. Ids below -1 count from the table's end.
        self._is_to_see = np.ones(2 * vocab_size + 2, bool)
        self._is_to_see[1 : vocab_size + 1] = self._num_stops > 0

    def expect(self, stop_token_ids: Sequence[int]) -> None:
        """A request of these stops has a row from now on."""
        for token_id in stop_token_ids:
            self._num_stops[token_id] += 1
            self._is_to_see[token_id + 1] = True

    def forget(self, stop_token_ids: Sequence[int]) -> None:
        """It has a row no more."""
        for token_id in stop_token_ids:
            self._num_stops[token_id] -= 1
            self._is_to_see[token_id + 1] = self._num_stops[token_id] > 0

    def are_to_see(self, token_ids: Int32Array) -> BoolArray:
        """bool, which of a step's tokens somebody may stop at, or are none of the model's, such as a failed row's -1.

        Raises ProtocolError if one is so far off that it cannot be told.
        """
        try:
            flags: BoolArray = self._is_to_see[token_ids.astype(np.intp) + 1]
        except IndexError:
            raise unknown_token() from None
        return flags

    def check(self, token_ids: Int32Array) -> None:
        """Raise ProtocolError unless all these are the model's, or -1."""
        if bool(((token_ids < -1) | (token_ids >= self.vocab_size)).any()):
            raise unknown_token()


def unknown_token() -> ProtocolError:
    return ProtocolError("the worker sampled a token id that its model does not have; run the same model everywhere.")
