"""Protobuf messages that no honest peer would send: random ones, and valid ones of which something is changed.

Knows no message of ours: all is read off the descriptors.
"""

import math
import random
import struct
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_KINDS = FieldDescriptor
_UNSIGNED_64 = {_KINDS.TYPE_UINT64, _KINDS.TYPE_FIXED64}
_SIGNED_64 = {_KINDS.TYPE_INT64, _KINDS.TYPE_SINT64, _KINDS.TYPE_SFIXED64}
_UNSIGNED_32 = {_KINDS.TYPE_UINT32, _KINDS.TYPE_FIXED32}
_FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, math.nan, math.inf, -math.inf]
_NUMBERS = [0, 1, 2, 3, 7, 16, 255, 256, 258, 1 << 15, 1 << 20]
_UNKNOWN_FIELD = b"\xf2\x3f\x03abc"
"""Number 1022, which no message has, and three bytes."""


def hostile_bytes(draw: random.Random, valid: Message) -> bytes:
    """What a broken peer may send in place of a message: often one that decodes, and sometimes not."""
    kind = draw.randrange(8)
    if kind == 0:
        return draw.randbytes(draw.randrange(64))
    if kind == 1:
        return _random_message(draw, type(valid)).SerializeToString()
    message = type(valid)()
    message.CopyFrom(valid)
    for _ in range(draw.randint(1, 3)):
        _change(draw, message)
    data = message.SerializeToString()
    if kind == 2:
        return data[: draw.randrange(len(data) + 1)]
    if kind == 3 and data:
        at = draw.randrange(len(data))
        return data[:at] + draw.randbytes(1) + data[at + 1 :]
    if kind == 4:
        return data + _UNKNOWN_FIELD
    return data


def _change(draw: random.Random, message: Message) -> None:
    """Set one field of the message, or of one inside it, to something else."""
    if not message.DESCRIPTOR.fields:
        return
    field = draw.choice(message.DESCRIPTOR.fields)
    inner = _messages(message, field)
    if inner and draw.random() < 0.8:
        _change(draw, draw.choice(inner))
    elif not field.is_repeated and draw.random() < 0.2:
        message.ClearField(field.name)
    else:
        _fill(draw, message, field)


def _messages(message: Message, field: FieldDescriptor) -> list[Message]:
    if field.type != _KINDS.TYPE_MESSAGE or field.message_type.GetOptions().map_entry:
        return []
    if field.is_repeated:
        return list(getattr(message, field.name))
    return [getattr(message, field.name)] if message.HasField(field.name) else []


def _random_message(draw: random.Random, kind: type[Message]) -> Message:
    message = kind()
    for field in message.DESCRIPTOR.fields:
        if draw.random() < 0.6:
            _fill(draw, message, field)
    return message


def _fill(draw: random.Random, message: Message, field: FieldDescriptor) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        values = getattr(message, field.name)
        if value.type == _KINDS.TYPE_MESSAGE:
            inner = values[_value(draw, key)]
            inner.CopyFrom(_random_message(draw, type(inner)))
        else:
            values[_value(draw, key)] = _value(draw, value)
    elif field.is_repeated:
        values = getattr(message, field.name)
        del values[draw.randint(0, len(values)) :]
        for _ in range(draw.choice([0, 1, 2, 3, 100])):
            if field.type == _KINDS.TYPE_MESSAGE:
                inner = values.add()
                inner.CopyFrom(_random_message(draw, type(inner)))
            else:
                values.append(_value(draw, field))
    elif field.type == _KINDS.TYPE_MESSAGE:
        inner = getattr(message, field.name)
        inner.CopyFrom(_random_message(draw, type(inner)))
    else:
        setattr(message, field.name, _value(draw, field))


def _value(draw: random.Random, field: FieldDescriptor) -> Any:
    kind = field.type
    if kind in (_KINDS.TYPE_FLOAT, _KINDS.TYPE_DOUBLE):
        return draw.choice([*_FLOATS, draw.uniform(-3, 3)])
    if kind == _KINDS.TYPE_BOOL:
        return draw.random() < 0.5
    if kind == _KINDS.TYPE_STRING:
        return draw.choice(["", "a", "\0", "request", "\U0001f9f1" * 50, "x" * 10_000])
    if kind == _KINDS.TYPE_BYTES:
        return _column(draw)
    return _integer(draw, kind)


def _integer(draw: random.Random, kind: int) -> int:
    num_bits = 64 if kind in _UNSIGNED_64 | _SIGNED_64 else 32
    is_unsigned = kind in _UNSIGNED_64 | _UNSIGNED_32
    least, most = (0, 2**num_bits - 1) if is_unsigned else (-(2 ** (num_bits - 1)), 2 ** (num_bits - 1) - 1)
    return draw.choice([least, most, most - 1, max(least, -1), *_NUMBERS, draw.randint(least, most)])


def _column(draw: random.Random) -> bytes:
    """Numbers of 32 bits, few or many, that may be negative or huge, or end inside one; or no numbers at all."""
    if draw.random() < 0.1:
        return draw.randbytes(draw.randrange(40))
    most = draw.choice([2, 16, 300, 2**31 - 1])
    least = draw.choice([0, 0, -1, -most])
    numbers = [draw.randint(least, most) for _ in range(draw.choice([0, 1, 2, 3, 10, 1000]))]
    data = struct.pack(f"<{len(numbers)}i", *numbers)
    return data[:-1] if draw.random() < 0.2 else data
