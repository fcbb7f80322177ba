"""The hot messages between frontend and engine, as frozen values; knows neither protobuf nor gRPC."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

from blockplane.protos.errors import BlockplaneError
from blockplane.protos.finish import FinishReason
from blockplane.protos.logprobs import Logprobs
from blockplane.protos.model import ModelInfo
from blockplane.protos.plan import Int32Array, no_rows
from blockplane.protos.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Submission:
    """A request on its way to the engine.

    Attributes:
        stream_id: the frontend's own number for the stream that waits for it.
        num_samples: how many continuations of the one prompt are asked for; the i-th goes to stream `stream_id + i`.
        priority: less comes first; a request that waits gains on all that come later.
        timeout_seconds: how long from now the caller waits; None = for ever.
        cache_salt: only requests of the same salt share cached prefixes.
        skip_prefix_cache: neither read cached prefixes nor leave any.
        caller: whoever asks, as the frontend knows them; empty = anybody.
        frontend_state: what the frontend needs to serve the rest if the stream is resumed; nobody else looks into it.
        traceparent: W3C trace context of the call; empty = it had none.
    """

    stream_id: int
    request_id: str
    prompt_token_ids: Int32Array
    params: SamplingParams
    num_samples: int = 1
    priority: int = 0
    timeout_seconds: float | None = None
    cache_salt: str = ""
    skip_prefix_cache: bool = False
    caller: str = ""
    frontend_state: bytes = b""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Resumption:
    """A request of an earlier stream, whose rest is to go on new ones: the i-th sample's on `stream_id + i`.

    `caller`: whoever asks; a request belongs to its caller.
    """

    stream_id: int
    request_id: str
    caller: str = ""


@dataclass(frozen=True, slots=True)
class FrontendBatch:
    """What a frontend has for the engine since its last message.

    `parked_stream_ids` are those whose clients read too slowly: they get no more tokens until `unparked_stream_ids` has
    them. `aborting_callers` are, for each of `aborted_request_ids`, whoever asks; none where nobody has a name.
    """

    submissions: tuple[Submission, ...] = ()
    aborted_stream_ids: tuple[int, ...] = ()
    aborted_request_ids: tuple[str, ...] = ()
    parked_stream_ids: tuple[int, ...] = ()
    unparked_stream_ids: tuple[int, ...] = ()
    resumptions: tuple[Resumption, ...] = ()
    aborting_callers: tuple[str, ...] = ()

    @property
    def aborts(self) -> Iterator[tuple[str, str]]:
        """The request ids to abort, each with whose requests are meant."""
        return zip_longest(self.aborted_request_ids, self.aborting_callers, fillvalue="")


@dataclass(frozen=True, slots=True)
class Resumed:
    """One sample of a resumed request: `token_ids`, int32, are its prompt and its output so far."""

    stream_id: int
    token_ids: Int32Array
    num_prompt_tokens: int
    num_samples: int
    frontend_state: bytes


@dataclass(frozen=True, slots=True)
class Ending:
    """A stream's end: a finish reason, or the error that ended it.

    `num_cached_tokens`: tokens of the prompt that were found in the prefix cache and not computed.
    """

    stream_id: int
    outcome: FinishReason | BlockplaneError
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """What is told of the next tokens of a stream's prompt; nothing can be of its first."""

    stream_id: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class ServingState:
    """What the engine can serve now; `model` is None while no worker is ready."""

    model: ModelInfo | None


@dataclass(frozen=True, slots=True)
class Delivery:
    """What the engine has for one frontend since its last message.

    `stream_ids` and `num_tokens` have one entry per stream that got tokens, `token_ids` all their ids end to end;
    `num_tokens` is None where each got one. `logprobs` are those of `token_ids`, None = nobody asks; `prompt_logprobs`
    may name a stream several times. `resumed` come before both and `endings` after them. `serving` is None where it did
    not change.
    """

    stream_ids: Int32Array = field(default_factory=no_rows)
    num_tokens: Int32Array | None = None
    token_ids: Int32Array = field(default_factory=no_rows)
    endings: tuple[Ending, ...] = ()
    serving: ServingState | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    resumed: tuple[Resumed, ...] = ()
