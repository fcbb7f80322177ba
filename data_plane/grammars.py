"""Which ids may come next where outputs must be structured: grammars, and each row's place in its own. Knows no logits.

A place follows from the output's tokens alone, so that a request which loses its row and gets another goes on as if
nothing had been.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par, get_bitmask_shape
from numpy.typing import NDArray

from blockplane.protos.config import Config
from blockplane.protos.errors import InvalidRequestError, ModelError
from blockplane.protos.grammars import compile_grammar, ending_ids, grammar_tokenizer
from blockplane.protos.model import ModelInfo
from blockplane.protos.plan import Int32Array
from blockplane.protos.structured import StructuredOutput
from blockplane.protos.threads import num_usable_cores

logger = logging.getLogger(__name__)

MAX_COMPILERS = 4
"""Threads at most that compile."""


class Grammars:
    """The structured outputs to which one worker holds its rows.

    A grammar is compiled beside the steps, from its request's admission on, while the prompt is computed. Where it is
    not done when the first token is drawn, the step waits for it: a step answers for each of its rows. Frontends have
    compiled it before within stated limits, and refused what exceeds them, so that there is little to wait for.

    Each row's is compiled for itself: copies of a matcher have in common what they learn of a text, and with it the
    counts that bound this, so that what fails one row would fail others.
    """

    def __init__(self, model: ModelInfo, num_threads: int) -> None:
        """Take over a model's vocabulary, which takes seconds where it is large; raises as `grammar_tokenizer` does."""
        self._tokenizer = grammar_tokenizer(model)
        self._ends = frozenset(ending_ids(model))
        self._compilers = ThreadPoolExecutor(min(num_threads, MAX_COMPILERS), "grammar")
        self._executor = LLExecutor(num_threads)

    def begin(self, structured: StructuredOutput, num_prompt_tokens: int) -> "RowGrammar":
        """A row that is admitted; its grammar is compiled from now on."""
        compiling = partial(self._compilers.submit, compile_grammar, self._tokenizer, structured)
        return RowGrammar(compiling, num_prompt_tokens, self._ends)

    def masks(self, places: Sequence["Place"]) -> NDArray[np.int32]:
        """What may come at each place: int32 [num_places, ceil(vocab_size / 32)], bit i % 32 of word i // 32 for id i.

        Nothing may come where a grammar failed, or behind an end of text or a draft that it forbids. Places of one row
        stand in their order.
        """
        bits = np.zeros(get_bitmask_shape(len(places), self._tokenizer.vocab_size), np.int32)
        for layer in _layers(places):
            reached = [
                (matcher, index)
                for index in layer
                if (matcher := places[index].grammar.reach(places[index].token_ids)) is not None
            ]
            if reached:
                fill_next_token_bitmask_par(self._executor, reached, bits)
            for matcher, index in reached:
                if matcher.is_error():
                    # The library's own answer is that the text may end.
                    bits[index] = 0
                    places[index].grammar.fail(len(places[index].token_ids))
        for place in places:
            place.grammar.settle(place.num_known)
        return bits


class RowGrammar:
    """One row's place in its grammar."""

    def __init__(
        self, compiling: Callable[[], "Future[LLMatcher]"], num_prompt_tokens: int, ends: frozenset[int]
    ) -> None:
        """`compiling` has somebody compile the grammar. `ends`: ids that end a text."""
        self._compiling, self._num_prompt_tokens, self._ends = compiling, num_prompt_tokens, ends
        self._compiled = compiling()
        self._matcher: LLMatcher | None = None
        """None = at the beginning of the output."""
        self._num_tokens = num_prompt_tokens
        """How many it has gone through, the prompt's included."""
        self._failed_len: int | None = None
        """Behind so many tokens it failed; None = it has not."""

    def reach(self, token_ids: Int32Array) -> LLMatcher | None:
        """The matcher behind these tokens, known ones and drafts, which begin with those of the last call.

        Waits for the compiler. None = nothing may come there.
        """
        if self._failed_len is not None:
            return None
        matcher = self._matcher = self._matcher or self._begin()
        if matcher is None:
            return None
        for token_id in token_ids[self._num_tokens :].tolist():
            if token_id in self._ends:
                return None
            if matcher.try_consume_tokens([token_id]) != 1:
                if matcher.is_error():
                    self.fail(self._num_tokens + 1)
                return None
            self._num_tokens += 1
        return matcher

    def fail(self, num_tokens: int) -> None:
        """The matcher failed behind so many tokens."""
        self._failed_len = num_tokens

    def settle(self, num_known: int) -> None:
        """Go back to behind the known tokens."""
        if self._failed_len is not None:
            if self._failed_len > num_known:
                # Behind a draft, which may never come; if it does, another one fails there too.
                self._failed_len, self._compiled = None, self._compiling()
                self._start_again()
        elif self._matcher is not None and self._num_tokens > num_known:
            # Some grammars know no way back.
            if self._matcher.rollback(self._num_tokens - num_known):
                self._num_tokens = num_known
            else:
                self._start_again()

    def end(self) -> None:
        """The row is released: what is not compiled yet need not be."""
        self._compiled.cancel()

    def _begin(self) -> LLMatcher | None:
        try:
            return self._compiled.result().deep_copy()
        except InvalidRequestError as error:
            logger.warning("a row ends, since a frontend let pass what does not compile: %s", error)
            self.fail(0)
            return None

    def _start_again(self) -> None:
        self._matcher, self._num_tokens = None, self._num_prompt_tokens


def load_grammars(config: Config, model: ModelInfo) -> Grammars | None:
    """What a worker of these settings holds its rows to grammars with; None = it does not, or the model has no way."""
    if config.structured_output == "off":
        return None
    try:
        return Grammars(model, config.num_threads or num_usable_cores())
    except ModelError as error:
        logger.warning("structured output is not served: %s", error)
        return None


@dataclass(frozen=True, slots=True)
class Place:
    """Behind tokens of a row, int32 [num_tokens], of which the first `num_known` are known and the others drafts."""

    grammar: RowGrammar
    token_ids: Int32Array
    num_known: int


def _layers(places: Sequence[Place]) -> Iterator[list[int]]:
    """The places' indices: first each row's first, then each one's second, and so on."""
    layers: list[list[int]] = []
    depth: dict[int, int] = {}
    for index, place in enumerate(places):
        at = depth[id(place.grammar)] = depth.get(id(place.grammar), -1) + 1
        if at == len(layers):
            layers.append([])
        layers[at].append(index)
    return iter(layers)
