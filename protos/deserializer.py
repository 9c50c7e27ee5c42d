"""Reading requests off the wire so that a malformed one is the client's error, with its field.

gRPC answers INTERNAL when a deserializer raises, which blames the server for a client's bytes.
This one returns a `Malformed` value instead; the servicer raises its error like any other.
Knows the wire format and descriptors, nothing of what fields mean.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from .errors import InvalidArgument

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_DEPTH = 32

MessageT = TypeVar("MessageT", bound=Message)


@dataclass(frozen=True, slots=True)
class Malformed:
    """Stands where the request would; `error` says what is wrong with its bytes."""

    error: InvalidArgument


def make_deserializer(
    message_type: type[MessageT], max_bytes: int
) -> Callable[[bytes], MessageT | Malformed]:
    """A `request_deserializer` for grpc that never raises on what a client can send."""

    def deserialize(data: bytes) -> MessageT | Malformed:
        if len(data) > max_bytes:
            problem = f"the message has {len(data)} bytes, the limit is {max_bytes}"
            return Malformed(InvalidArgument("request", problem))
        message = message_type()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return Malformed(_find_fault(cast(Descriptor, message_type.DESCRIPTOR), data))
        return message

    return deserialize


def _find_fault(descriptor: Descriptor, data: bytes) -> InvalidArgument:
    """Why protobuf refused the bytes; only called once it has."""
    try:
        field = _find_invalid_utf8(descriptor, data, 0)
    except ValueError:
        field = None
    if field is None:
        return InvalidArgument("request", f"the bytes are no {descriptor.full_name}")
    return InvalidArgument(field, "not valid UTF-8")


def _find_invalid_utf8(descriptor: Descriptor, data: bytes, depth: int) -> str | None:
    """Path of the first string field that is not UTF-8; ValueError where the bytes are no wire."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deep")
    seen: dict[int, int] = {}
    for number, payload in _length_delimited_fields(data):
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        position = seen[number] = seen.get(number, -1) + 1
        fault = _fault_of(field, payload, depth)
        if fault is not None:
            is_repeated = field.default_value == []  # `label` is deprecated, `is_repeated` too new
            name = f"{field.name}[{position}]" if is_repeated else field.name
            return f"{name}.{fault}" if fault else name
    return None


def _fault_of(field: FieldDescriptor, payload: bytes, depth: int) -> str | None:
    """Path of the fault below `field`, empty if it is the field itself, None without one."""
    if field.type == FieldDescriptor.TYPE_STRING:
        try:
            payload.decode("utf-8")
        except UnicodeDecodeError:
            return ""
    elif field.message_type is not None:
        return _find_invalid_utf8(field.message_type, payload, depth + 1)
    return None


def _length_delimited_fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(field number, payload) of every length-delimited field of one message."""
    offset = 0
    while offset < len(data):
        tag, offset = _read_varint(data, offset)
        wire_type = tag & 7
        if wire_type == _VARINT:
            _, offset = _read_varint(data, offset)
        elif wire_type == _LENGTH:
            length, offset = _read_varint(data, offset)
            if offset + length > len(data):
                raise ValueError("a field ends behind its message")
            yield tag >> 3, data[offset : offset + length]
            offset += length
        elif wire_type in (_FIXED64, _FIXED32):
            offset += 8 if wire_type == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire_type}")


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """The value and the offset behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if offset >= len(data):
            raise ValueError("a varint ends behind its message")
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
    raise ValueError("a varint of more than 10 bytes")
