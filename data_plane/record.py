"""A worker's record on disk: attaches, plans, results and reloads, in their order. Knows not what they mean.

The file begins with MAGIC; each entry is a `RecordEntry` behind its length, a little-endian uint32. What clients said
is in there: only the user that runs the worker may read it.
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from google.protobuf.message import DecodeError

from blockplane.protos.errors import ConfigurationError
from blockplane.v1 import engine_pb2 as pb

MAGIC = b"blockplane record 1\n"
_LENGTH_BYTES = 4


class Record:
    """A file that a worker appends to. What stood in it stays, but for an entry that was not written to its end."""

    def __init__(self, path: str) -> None:
        """Raises ConfigurationError: the path is a link or holds something else, or another worker's record."""
        self._path = path
        try:
            self._file = _open(path)
        except OSError as error:
            raise self._failure(error) from error

    def attach(self, model_fingerprint: bytes, configure: pb.Configure) -> None:
        """What follows belongs to this attach."""
        attach = pb.RecordedAttach(model_fingerprint=model_fingerprint, configure=configure)
        self._append(pb.RecordEntry(attach=attach))

    def plan(self, plan: pb.StepPlan) -> None:
        """Written before the plan is carried out: what kills a worker is on record."""
        self._append(pb.RecordEntry(plan=plan))

    def result(self, result: pb.StepResult) -> None:
        self._append(pb.RecordEntry(result=result))

    def reload(self, model: str, model_fingerprint: bytes) -> None:
        """What follows was computed with other weights."""
        self._append(pb.RecordEntry(reload=pb.RecordedReload(model=model, model_fingerprint=model_fingerprint)))

    def close(self) -> None:
        self._file.close()

    def _append(self, entry: pb.RecordEntry) -> None:
        """Raises ConfigurationError where the disk takes no more."""
        data = entry.SerializeToString()
        try:
            self._file.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
            self._file.flush()
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> ConfigurationError:
        reason = "another worker writes it" if isinstance(error, BlockingIOError) else error.strerror
        return ConfigurationError(
            f"cannot write the record {self._path}: {reason}; set record to a file of this worker's own, or to none."
        )


def _open(path: str) -> BinaryIO:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    file = os.fdopen(descriptor, "r+b")
    try:
        _take(file)
    except BaseException:
        file.close()
        raise
    return file


def _take(file: BinaryIO) -> None:
    """Make the file ours, and stand behind its last whole entry."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or (status.st_size and file.read(len(MAGIC)) != MAGIC):
        raise OSError(0, "it holds something else")
    os.fchmod(file.fileno(), 0o600)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not status.st_size:
        file.write(MAGIC)
    for _ in _entries(file):
        pass
    file.truncate()


def read_record(path: str) -> Iterator[pb.RecordEntry]:
    """Every whole entry of a record, in order.

    Raises:
        ConfigurationError: the file cannot be read, or holds something else.
    """
    try:
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ConfigurationError(f"{path} is no record of a worker; name the file that record was set to.")
            for data in _entries(file):
                yield pb.RecordEntry.FromString(data)
    except OSError as error:
        raise ConfigurationError(f"cannot read the record {path}: {error.strerror}.") from error
    except DecodeError as error:
        raise ConfigurationError(f"the record {path} is damaged: {error}.") from error


def _entries(file: BinaryIO) -> Iterator[bytes]:
    """The bytes of every whole entry; the file then stands behind the last one."""
    while True:
        start = file.tell()
        length = file.read(_LENGTH_BYTES)
        num_bytes = int.from_bytes(length, "little")
        data = file.read(num_bytes)
        if len(length) < _LENGTH_BYTES or len(data) < num_bytes:
            file.seek(start)
            return
        yield data
