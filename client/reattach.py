"""A stream of deltas that outlives its connection: each token once, whatever breaks on its way. Knows no gRPC."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import TypeAlias

from blockplane.client.values import Delta
from blockplane.protos.errors import NotFoundError, UnavailableError

_PAUSE_SECONDS = 0.2

Deltas: TypeAlias = Generator[Delta, None, None]


def reattaching(
    generate: Callable[[], Deltas], resume: Callable[[Sequence[int]], Deltas], num_samples: int, seconds: float
) -> Deltas:
    """The deltas of a request, resumed where its call ends UNAVAILABLE, until nothing has come for `seconds` since.

    Args:
        generate: begins the request.
        resume: goes on with it behind as many tokens of each sample.
    """
    num_tokens, ended = [0] * num_samples, set[int]()
    begin: Callable[[], Deltas] = generate
    give_up: float | None = None
    while True:
        try:
            with closing(begin()) as deltas:
                for delta in deltas:
                    give_up = None
                    # The end of a sample is told by every call that streams the request.
                    if delta.sample_index in ended:
                        continue
                    num_tokens[delta.sample_index] += len(delta.token_ids)
                    if delta.finish_reason is not None:
                        ended.add(delta.sample_index)
                    yield delta
            return
        except UnavailableError:
            give_up = give_up or time.monotonic() + seconds
            if time.monotonic() >= give_up:
                raise
            begin = partial(resume, num_tokens)
        except NotFoundError:
            # It was lost before it reached the journal; as long as nothing of it was seen it may begin again.
            if begin is generate or any(num_tokens):
                raise
            begin = generate
        time.sleep(_PAUSE_SECONDS)
