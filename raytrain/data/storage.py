"""Reading the files of a ShardSet, from a local folder or an object store, through passing faults.

pyarrow's file systems do the reading. What they lack is added here: patience with faults that
pass, and one clear line for those that last.
"""

from __future__ import annotations

import errno
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from raytrain.errors import RaytrainError

PATIENCE_SECONDS = 120.0
"""How long a read is tried again: a run that waits loses less than one that ends."""
OPENING_PATIENCE_SECONDS = 10.0
"""The same for a manifest: the address may be wrong, and a person waits."""
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 15.0

T = TypeVar("T")

# Words of the AWS SDK, which reach Python as the text of an OSError.
_AWS = "AWS Error "
_PASSING = re.compile(
    _AWS + r"(NETWORK_CONNECTION|REQUEST_TIMEOUT|SLOW_DOWN|THROTTLING|SERVICE_UNAVAILABLE"
    r"|INTERNAL_FAILURE|UNKNOWN \(HTTP status (408|429|5\d\d)\))"
)
_DENIED = re.compile(
    _AWS + r"(ACCESS_DENIED|INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN_ID|UNRECOGNIZED_CLIENT"
    r"|MISSING_AUTHENTICATION_TOKEN|INVALID_SIGNATURE|SIGNATURE_DOES_NOT_MATCH|REQUEST_EXPIRED"
    r"|REQUEST_TIME_TOO_SKEWED|UNKNOWN \(HTTP status (401|403)\))"
)


class DamageError(Exception):
    """Data that was read isn't what was written; the message is the reason."""


@dataclass(frozen=True)
class Folder:
    """A folder to read from.

    Attributes:
        uri: absolute local path, or an address that pyarrow knows, such as
            ``s3://bucket/folder?region=eu-west-1``. It must hold no credentials, as it is
            written into the records of runs.
    """

    uri: str

    @property
    def is_remote(self) -> bool:
        """Whether reading goes over a network that pyarrow knows of."""
        return "://" in self.uri and not self.uri.startswith("file://")

    def address(self, path: str) -> str:
        """How a person is told of the file at `path`."""
        if "://" not in self.uri:
            return f"{self.uri}/{path}"
        parts = urlsplit(self.uri)
        return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{path}", query=""))

    def read(self, path: str, patience: float = PATIENCE_SECONDS) -> bytes:
        """The content of a file; raises as `use` does."""
        content: bytes = self.use(path, lambda file: file.read(), patience)
        return content

    def use(
        self, path: str, action: Callable[[pa.NativeFile], T], patience: float = PATIENCE_SECONDS
    ) -> T:
        """Open a file and return what `action` makes of it, from the start again after a fault.

        Args:
            path: relative to the folder.
            action: reads from the open file.
            patience: seconds after which a passing fault is taken for a lasting one.

        Raises:
            FileNotFoundError: no such file.
            RaytrainError: the folder can't be reached, or not with these rights.
            Exception: whatever else `action` raises.
        """

        def attempt() -> T:
            filesystem, root = _locate(self.uri)
            with filesystem.open_input_file(f"{root}/{path}") as file:
                return action(file)

        try:
            return _persist(attempt, patience)
        except FileNotFoundError:
            raise
        except OSError as error:
            if not _is_of_storage(error):
                raise
            raise RaytrainError(self._tell(error, path, patience)) from error

    def _tell(self, error: OSError, path: str, patience: float) -> str:
        """What a person should read of an error of the storage."""
        where, reason = self.address(path), _details(first_line(error))
        if is_passing(error):
            return (
                f"{where}: no answer in {patience:.0f} s ({reason}); check the address and the "
                "network, then run the same command to go on"
            )
        if isinstance(error, PermissionError):
            return f"{where}: access denied ({reason}); change its permissions"
        denied = _DENIED.search(str(error))
        return (
            f"{where}: {'access denied' if denied else 'cannot be read'} ({reason}); check the "
            "address, and that AWS_ACCESS_KEY_ID, AWS_PROFILE or this machine's role may read it"
        )

    def lacks_bucket(self) -> str | None:
        """The name of the bucket where the whole bucket is known to be missing, else None."""
        if not self.is_remote:
            return None
        filesystem, root = _locate(self.uri)
        bucket = root.split("/")[0]
        try:
            missing = filesystem.get_file_info(bucket).type == pafs.FileType.NotFound
        except OSError:
            return None  # who may read files needn't be allowed to ask for buckets
        return bucket if missing else None


def read_row_group(file: pa.NativeFile, index: int, rows: int, schema: pa.Schema) -> pa.Table:
    """Read the columns of `schema` of one row group of a Parquet file.

    The checksums of the pages find any flipped bit in them. Footers and page headers have none:
    there a flipped bit shows in the file's structure, the schema or the number of rows.

    Raises:
        DamageError: it isn't what was written.
        OSError: it can't be read.
    """
    try:
        # Pre-buffering makes one request of neighbouring columns.
        with pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=True) as parquet:
            table = parquet.read_row_group(index, columns=schema.names, use_threads=False)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and _is_of_storage(error):
            raise
        raise DamageError(first_line(error)) from error
    if not table.schema.equals(schema):
        raise DamageError("it has other columns")
    if table.num_rows != rows:
        raise DamageError(f"it has {table.num_rows} rows instead of {rows}")
    return table


def is_passing(error: OSError) -> bool:
    """Whether an error may go away when the same thing is tried again a little later."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return error.errno == errno.ESTALE or bool(_PASSING.search(str(error)))


def _is_of_storage(error: OSError) -> bool:
    """Whether the storage failed, so that nothing is known of the data."""
    return is_passing(error) or isinstance(error, PermissionError) or _AWS in str(error)


def first_line(error: Exception) -> str:
    """What an error says, without what else stands below it."""
    return (str(error) or type(error).__name__).splitlines()[0]


def _persist(action: Callable[[], T], patience: float) -> T:
    """Try again after passing faults, with exponential back-off and full jitter.

    Full jitter: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015. The
    AWS SDK has itself tried for about 6 s before we hear of a fault.
    """
    deadline = time.monotonic() + patience
    longest = FIRST_WAIT_SECONDS
    while True:
        wait = random.uniform(0, longest)  # noqa: S311 (no secret)
        try:
            return action()
        except OSError as error:
            if not is_passing(error) or time.monotonic() + wait > deadline:
                raise
        time.sleep(wait)
        longest = min(2 * longest, LONGEST_WAIT_SECONDS)


def _details(reason: str) -> str:
    """The part of an SDK's message that tells a person something."""
    tail = reason.rpartition("Details: ")[2].rpartition(_AWS)[2]
    return tail.removesuffix("No response body.").rstrip(" :.")


@lru_cache(maxsize=16)
def _locate(uri: str) -> tuple[pafs.FileSystem, str]:
    if "://" not in uri:
        return pafs.LocalFileSystem(), uri
    if urlsplit(uri).username is not None:
        raise RaytrainError(
            f"{uri.partition('://')[0]}://...: has credentials in it, which the records of a run "
            "would keep; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"
        )
    filesystem, root = pafs.FileSystem.from_uri(uri)
    return filesystem, root.rstrip("/")


def absolute(uri: str | Path) -> str:
    """An address as it is, a local path made absolute."""
    return str(uri) if "://" in str(uri) else str(Path(uri).expanduser().absolute())
