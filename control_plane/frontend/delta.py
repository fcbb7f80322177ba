"""What a sample gained since its client was last told, before it becomes a message; knows no stream and no protocol."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from blockplane.protos import logprobs as columns
from blockplane.protos.errors import BlockplaneError
from blockplane.protos.finish import FinishReason
from blockplane.protos.logprobs import Logprobs


class Usage(NamedTuple):
    """Tokens of a whole sample; `num_cached_tokens` of the prompt were found in the prefix cache and not computed."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


class Delta(NamedTuple):
    """A bare tuple, since there is one for every message of the token path.

    Attributes:
        logprobs: those of `token_ids`; None = none are asked for, or no token came.
        prompt_logprobs: of the prompt's next tokens, from its second on.
        outcome: why the sample ended, or the error that ended it; None = it goes on.
        usage: at the end alone.
        stop_text: the stop text that ended it, if one did.
    """

    token_ids: list[int]
    text: str
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    outcome: FinishReason | BlockplaneError | None = None
    usage: Usage | None = None
    stop_text: str | None = None


def join(deltas: Sequence[Delta]) -> Delta:
    """Those of one sample, one after the other, as a single one; at least one."""
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    prompt_logprobs = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    return deltas[-1]._replace(
        token_ids=list(chain.from_iterable(delta.token_ids for delta in deltas)),
        text="".join([delta.text for delta in deltas]),
        logprobs=columns.join(logprobs) if logprobs else None,
        prompt_logprobs=columns.join(prompt_logprobs) if prompt_logprobs else None,
    )
