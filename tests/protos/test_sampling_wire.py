"""Sampling parameters on the wire: what no peer of ours sends is a protocol error, absent and empty are two things."""

import pytest
from wire_values import CUT, sent

from blockplane.protos import sampling_wire as wire
from blockplane.protos.errors import ProtocolError
from blockplane.protos.sampling import SamplingParams
from blockplane.protos.structured import StructuredOutput
from blockplane.v1 import engine_pb2 as pb


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias_token_ids", "allowed_token_ids"])
def test_a_truncated_column_of_sampling_parameters_is_a_protocol_error(field: str) -> None:
    with pytest.raises(ProtocolError, match="7 bytes"):
        wire.sampling_from_proto(pb.SamplingSettings(**{field: CUT}))
    with pytest.raises(ProtocolError, match="7 bytes"):
        wire.sampling_from_proto(pb.SamplingSettings(bad_words=[CUT]))


def test_a_logit_bias_whose_columns_differ_in_length_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="logit bias"):
        wire.sampling_from_proto(pb.SamplingSettings(logit_biases=[1.0]))


def test_no_allowed_ids_and_all_allowed_are_two_things() -> None:
    for allowed_token_ids in (None, ()):
        params = SamplingParams(1, allowed_token_ids=allowed_token_ids)
        assert wire.sampling_from_proto(sent(wire.sampling_to_proto(params))) == params


def test_a_structured_output_of_a_later_version_is_a_protocol_error_and_none_is_none() -> None:
    with pytest.raises(ProtocolError, match="'xml'"):
        wire.sampling_from_proto(pb.SamplingSettings(structured=pb.StructuredOutput(kind="xml", text="<a/>")))
    assert wire.sampling_from_proto(pb.SamplingSettings(max_tokens=1)).structured is None
    params = SamplingParams(1, structured=StructuredOutput("json_object"))
    assert wire.sampling_from_proto(sent(wire.sampling_to_proto(params))) == params
