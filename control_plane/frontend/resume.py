"""How the samples of a resumed request go on where their client has them; knows neither gRPC nor messages.

The text that a client has with its first n tokens depends on these alone, not on the messages in which they came: it is
what pushing them tells. So they are pushed once more and what that tells is left out. Whatever they left open, a
character or the beginning of a stop text, is held back as it was then, and comes with the token that settles it.
"""

from collections.abc import Callable, Sequence

from blockplane.control_plane.frontend.delta import Delta
from blockplane.control_plane.frontend.engine_link import EngineLink
from blockplane.control_plane.frontend.output import Output
from blockplane.control_plane.frontend.requests import text_params_of_state
from blockplane.control_plane.frontend.sample import Sample
from blockplane.control_plane.frontend.text import Text
from blockplane.control_plane.frontend.token_stream import Reader, TokenStream
from blockplane.protos.errors import BlockplaneError, DataLossError, InvalidRequestError


async def resumed_streams(link: EngineLink, request_id: str, caller: str, reader: Reader) -> list[TokenStream]:
    """The streams of a request's samples, once the engine has said what was before.

    Raises:
        NotFoundError: the caller has no such request, or the engine does not keep it.
        UnavailableError: there is no engine to ask, or none any more.
    """
    streams = link.resume(request_id, caller, reader)
    first = streams[0]
    try:
        while first.resumed is None and not first.has_ended:
            await reader.filled.wait()
            reader.filled.clear()
    except BaseException:
        for stream in streams:
            link.close(stream)
        raise
    num_samples = 0 if first.resumed is None else first.resumed.num_samples
    for stream in streams[num_samples:]:
        link.leave(stream)
    if not num_samples:
        outcome = first.take().outcome
        assert isinstance(outcome, BlockplaneError)
        raise outcome
    # More may have come with it.
    reader.filled.set()
    return streams[:num_samples]


def resumed_samples(
    streams: Sequence[TokenStream],
    from_tokens: Sequence[int],
    text: Text,
    stop: Callable[[TokenStream], None],
) -> tuple[list[Sample], list[tuple[int, Delta]]]:
    """The samples behind `streams`, each of which holds what it is resumed with, and by index what is new of that.

    Args:
        from_tokens: how many tokens of each sample its client has; of those not named it has none.

    Raises:
        DataLossError: that is more than there are.
        InvalidRequestError: more samples are named than there are.
    """
    if len(from_tokens) > len(streams):
        raise InvalidRequestError(
            f"from_tokens names {len(from_tokens)} samples of {len(streams)}; leave the rest out.", "from_tokens"
        )
    samples, deltas = [], []
    for index, (stream, num_had) in enumerate(zip(streams, [*from_tokens, *[0] * len(streams)], strict=False)):
        resumed = stream.resumed
        assert resumed is not None
        token_ids = resumed.token_ids.tolist()
        prompt, output_ids = token_ids[: resumed.num_prompt_tokens], token_ids[resumed.num_prompt_tokens :]
        params = text_params_of_state(resumed.frontend_state)
        output = Output(text, prompt, params)
        output.push(output_ids[:num_had])
        if output.num_tokens < num_had:
            raise DataLossError(
                f"{num_had} tokens of sample {index} are said to have arrived, and {output.num_tokens} are known; send"
                " the request anew."
            )
        sample = Sample(index, len(prompt), stream, output, stop, params.is_whole)
        if (delta := sample.tell(output_ids[num_had:])) is not None:
            deltas.append((index, delta))
        samples.append(sample)
    return samples, deltas
