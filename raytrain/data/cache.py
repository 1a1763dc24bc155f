"""A read-through cache of blocks on one machine, shared by all its processes.

Blocks and not whole shards: an epoch's order takes its blocks from all over the set, so the first
batch alone needs blocks of dozens of shards, and a cache smaller than the set would fetch whole
shards for one block each, again and again.

A copy is a Parquet file of one row group with page checksums, so a damaged one is found when it
is read; it is then fetched anew. Nothing that a killed process leaves behind is in the way: locks
end with their process, and a half-written file is overwritten by the next to hold its lock.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain.data.storage import DamageError, read_row_group
from raytrain.errors import RaytrainError
from raytrain.recipe.types import Input

_LOCKS = 1024  # more than threads of a machine that fetch at a time; each is an empty file
_EVICT_TO = 0.9  # make room for many blocks at once, as each time all files are listed
_SHARE_OF_DISK = 0.5
_SHARE_OF_MEMORY = 0.25  # Ray keeps its objects in shared memory too, without a look at the rest
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (a folder of ours in it, checked to be ours)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """A block to be had from the cache or its source.

    Attributes:
        key: names the block's content, in letters that a file name may have.
        rows: its number of rows.
        schema: its columns.
    """

    key: str
    rows: int
    schema: pa.Schema


@dataclass(frozen=True)
class NodeCache:
    """The cache in a folder.

    Attributes:
        folder: on this machine.
        max_bytes: most that the copies take together. The least recently used make room.
    """

    folder: Path
    max_bytes: int

    @classmethod
    def open(cls, folder: Path, max_bytes: int | None = None, share: float = 0.5) -> NodeCache:
        """Open the cache in a folder; an empty one where there is none.

        Args:
            folder: where.
            max_bytes: most that the copies take; None: by `share`.
            share: of what is free there or taken by the cache, 0 to 1.

        Raises:
            RaytrainError: the folder can't be made or isn't ours.
        """
        try:
            for name in ("blocks", "locks"):
                (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            ours = folder.stat().st_uid == os.getuid()
        except OSError as error:
            raise RaytrainError(
                f"input.cache: {folder} can't be made ({error.strerror}); set input.cache_dir to "
                "a folder that can, or input.cache to none"
            ) from error
        if not ours:
            raise RaytrainError(
                f"input.cache: {folder} belongs to another user; set input.cache_dir to a folder "
                "of your own"
            )
        if max_bytes is None:
            held = sum(size for _, size, _ in _copies(folder / "blocks"))
            max_bytes = int((shutil.disk_usage(folder).free + held) * share)
        return cls(folder, max_bytes)

    def get(self, wanted: Wanted, fetch: Callable[[], pa.Table]) -> pa.Table:
        """The block, from this machine or else from `fetch`, whose result is then kept.

        Where several threads or processes want a block that isn't here, one fetches it.
        """
        path = self.folder / "blocks" / f"{wanted.key}.parquet"
        if (table := self._find(path, wanted)) is not None:
            return table
        with self._lock(wanted.key) as temporary:
            if (table := self._find(path, wanted)) is not None:
                return table
            table = fetch()
            self._keep(table, temporary, path)
        return table

    def _find(self, path: Path, wanted: Wanted) -> pa.Table | None:
        try:
            with pa.OSFile(str(path)) as file:
                table = read_row_group(file, 0, wanted.rows, wanted.schema)
        except FileNotFoundError:
            return None
        except (DamageError, OSError) as error:
            _log.warning("%s: damaged (%s); fetched anew", path, error)
            path.unlink(missing_ok=True)
            return None
        with suppress(FileNotFoundError):  # evicted while we read it
            os.utime(path)  # the time of its last use
        return table

    @contextmanager
    def _lock(self, key: str) -> Iterator[Path]:
        """Hold one of the locks; yields a file that only its holder may write."""
        path = self.folder / "locks" / f"{zlib.crc32(key.encode()) % _LOCKS:03x}"
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path.with_suffix(".tmp")

    def _keep(self, table: pa.Table, temporary: Path, path: Path) -> None:
        try:
            pq.write_table(
                table,
                str(temporary),
                compression="NONE",
                use_dictionary=False,
                write_statistics=False,
                write_page_checksum=True,
            )
            size = temporary.stat().st_size
            if size <= self.max_bytes:
                self._reserve(size)
                temporary.replace(path)
        except OSError as error:
            # The disk may be filled by others; training can go on without the copy.
            warn_once(f"input.cache: {self.folder}: can't keep blocks ({error.strerror or error})")
        finally:
            temporary.unlink(missing_ok=True)

    def _reserve(self, size: int) -> None:
        """Count `size` bytes as used, and make room for them if need be.

        The count is kept in a file; one that a kill cut off is made anew.
        """
        with (self.folder / "used").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            used = int(text) if text.isdecimal() else self.max_bytes
            if used + size > self.max_bytes:
                used = self._evict(self.max_bytes - size)
            file.truncate(0)
            file.write(str(used + size))

    def _evict(self, most: int) -> int:
        """Remove the least recently used copies if there are over `most` bytes of them.

        A copy that is being read goes on being readable until it is closed.

        Returns:
            Bytes that are left.
        """
        copies = sorted(_copies(self.folder / "blocks"))
        used = sum(size for _, size, _ in copies)
        if used <= most:
            return used
        for _, size, path in copies:
            if used <= most * _EVICT_TO:
                break
            Path(path).unlink(missing_ok=True)
            used -= size
        return used


def _copies(folder: Path) -> Iterator[tuple[float, int, str]]:
    """Time of last use, size in bytes and path of each copy."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue  # just found damaged by another process
            yield status.st_mtime, status.st_size, entry.path


def cache_for(rules: Input, is_remote: bool) -> NodeCache | None:
    """The cache that a recipe's `input` section asks for; None where it asks for none.

    Raises:
        RaytrainError: its folder can't be made or isn't ours.
    """
    kind = rules.cache or ("disk" if is_remote else "none")
    if kind == "none":
        return None
    return _open_cache(kind == "ram", rules.cache_dir, rules.cache_gb)


@lru_cache(maxsize=4)
def _open_cache(ram: bool, folder: str | None, gigabytes: float | None) -> NodeCache:
    if folder is not None:
        place = Path(folder).expanduser().absolute()
    elif not ram:
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        place = Path(caches).expanduser() / "raytrain" / "blocks"
    elif _SHARED_MEMORY.is_dir():
        place = _SHARED_MEMORY / f"raytrain-{os.getuid()}"
    else:
        raise RaytrainError(
            f"input.cache ram: this machine has no {_SHARED_MEMORY}; use disk, or set "
            "input.cache_dir to a folder in memory"
        )
    max_bytes = None if gigabytes is None else int(gigabytes * 1e9)
    return NodeCache.open(place, max_bytes, _SHARE_OF_MEMORY if ram else _SHARE_OF_DISK)


@lru_cache(maxsize=64)
def warn_once(message: str) -> None:
    """Log a warning, the same text only once in a process."""
    _log.warning(message)
