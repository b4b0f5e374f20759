"""SQL tool on a SQLite database: a private writable copy, or a read-only file."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

from raypo.tools.calls import ToolError

LOOK_EVERY = 50
"""Number of SQLite VM instructions between two checks of the deadline. It is small, because a
single instruction may search a long string."""
_TOLD_PRAGMAS = {"table_info", "table_xinfo", "table_list", "index_list", "foreign_key_list"}
_READING = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_TEMPORARY = {
    sqlite3.SQLITE_CREATE_TEMP_INDEX,
    sqlite3.SQLITE_CREATE_TEMP_TABLE,
    sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
    sqlite3.SQLITE_CREATE_TEMP_VIEW,
}
"""Authorizer actions for temporary objects, whose files `MAX_PAGES` does not bound."""
_VIRTUAL = {sqlite3.SQLITE_CREATE_VTABLE, sqlite3.SQLITE_DROP_VTABLE}
_NATIVE_CODE = {"fts3_tokenizer", "load_extension"}
"""Functions that make SQLite run native code, at an address or in a file that the query names."""
_FULL_TEXT = ("content", "data", "docsize", "config", "idx", "segdir", "segments", "stat")
"""Endings of the internal tables of a full-text table."""
MAX_PAGES = 65536
"""Size limit of a writable copy: 256 MB at the usual page size."""
MAX_TEMPORARY_BYTES = 256 << 20
"""Size limit of SQLite's temporary files in this process, with which it sorts and groups rows."""
MEASURE_EVERY_S = 0.02
_LIMITS = {
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,  # no other files by ATTACH or VACUUM INTO
    sqlite3.SQLITE_LIMIT_LENGTH: 10**5,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 10**5,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


class Database:
    """SQLite database with the tool `sql`.

    A writable copy is for one episode. Several episodes can share a read-only database. A query
    cannot open other files, and its only lasting effects are changes to a writable copy. It is
    interrupted at the time limit, when its caller is cancelled, or (on Linux) when SQLite's
    temporary files, which `MAX_PAGES` does not bound, become too large.

    One thread runs the queries, one at a time, for all event loops.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        writable: bool = False,
        time_limit_s: float = 5.0,
        max_rows: int = 100,
        max_chars: int = 10_000,
    ) -> None:
        """Open the database.

        Args:
            path: A database file.
            writable: True lets queries change a copy in memory, which `close` discards. False opens
                the database read-only.
            time_limit_s: Time limit of a query, in seconds.
            max_rows: Maximum number of rows in a result. The result says if rows were left out.
            max_chars: Maximum length of a result in characters.

        Raises:
            ValueError: the file is not a SQLite database.
        """
        self._time_limit_s, self._max_rows, self._max_chars = time_limit_s, max_rows, max_chars
        self._thread = ThreadPoolExecutor(1)  # one query at a time, for all event loops
        address = f"{Path(path).resolve().as_uri()}?mode=ro"
        try:
            connection = sqlite3.connect(address, uri=True, check_same_thread=False)
            connection.execute("SELECT count(*) FROM sqlite_master")
            if writable:
                copy = sqlite3.connect(":memory:", check_same_thread=False)
                connection.backup(copy)
                connection.close()
                connection = copy
        except sqlite3.Error as error:
            raise ValueError(f"{path}: cannot be opened as a SQLite database ({error}).") from None
        connection.isolation_level = None  # autocommit: no implicit transactions
        connection.execute(f"PRAGMA max_page_count = {MAX_PAGES}")
        for limit, most in _LIMITS.items():
            connection.setlimit(limit, most)
        if sys.version_info >= (3, 12):  # a second barrier, which Python 3.11 does not offer
            connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
            connection.setconfig(sqlite3.SQLITE_DBCONFIG_ENABLE_FTS3_TOKENIZER, False)
        self._writing = _Writing(connection) if writable else None
        connection.set_authorizer(self._writing or _may_read)
        self._connection = connection

    async def sql(self, query: str) -> str:
        """Runs one SQL statement (SQLite) on the database and returns the rows, a header first,
        columns separated by |.

        Args:
            query: The statement.

        Raises:
            ToolError: the statement is wrong, not allowed or took too long.
        """
        loop, is_left = asyncio.get_running_loop(), threading.Event()
        try:
            return await loop.run_in_executor(self._thread, self._run, query, is_left)
        except asyncio.CancelledError:
            is_left.set()
            raise

    def close(self) -> None:
        """Close the file or discard the copy."""
        self._thread.shutdown(cancel_futures=True)
        self._connection.close()

    def _run(self, query: str, is_left: threading.Event) -> str:
        begin, reason = time.monotonic(), ""
        measured = begin

        def is_over() -> bool:
            nonlocal reason, measured
            now = time.monotonic()
            if now > begin + self._time_limit_s:
                reason = f" after {self._time_limit_s:g} s: the time limit"
            elif now > measured + MEASURE_EVERY_S:
                measured = now
                if _temporary_bytes() > MAX_TEMPORARY_BYTES:
                    reason = ": it sorts or groups more data than fits into the temporary files"
            return is_left.is_set() or bool(reason)

        self._connection.set_progress_handler(is_over, LOOK_EVERY)
        try:
            if self._writing is not None:
                self._writing.check(self._connection, query)
            with closing(self._connection.execute(query)) as cursor:
                return self._told(cursor)
        except (sqlite3.Error, sqlite3.Warning, UnicodeError) as error:
            raise ToolError(f"SQL error: {error}{reason}") from None

    def _told(self, cursor: sqlite3.Cursor) -> str:
        """Format the result. Only the rows that it shows are fetched."""
        if cursor.description is None:
            changed = cursor.rowcount
            return f"done, {changed} rows changed" if changed >= 0 else "done"
        text, is_cut = "|".join(name for name, *_ in cursor.description), False
        for number, row in enumerate(cursor):
            is_cut = number == self._max_rows or len(text) > self._max_chars
            if is_cut:
                break
            text += "\n" + "|".join("NULL" if cell is None else str(cell) for cell in row)
        is_cut = is_cut or len(text) > self._max_chars
        return text[: self._max_chars] + ("\n... (cut)" if is_cut else "")


class _Writing:
    """Authorizer of a writable copy.

    It denies connection settings, temporary files, native code, and to create or drop virtual
    tables. A query may change a full-text table, but not the internal tables in which SQLite keeps
    its index in a binary format.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        tables = "SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE VIRTUAL TABLE%'"
        self._virtual = {name.lower() for (name,) in connection.execute(tables)}
        self._internal = {f"{name}_{end}" for name in self._virtual for end in _FULL_TEXT}
        self._is_checking = False

    def check(self, connection: sqlite3.Connection, query: str) -> None:
        """Compile a query without running it, to deny its changes to internal tables.

        When a query runs, the full-text tables compile statements that change these tables.

        Raises:
            sqlite3.Error: the query is wrong or not allowed.
        """
        self._is_checking = True
        try:
            connection(query)
        finally:
            self._is_checking = False

    def __call__(self, action: int, name: str | None, other: str | None, *_: str | None) -> int:
        """Authorize an action, whose table or function is `name` or `other`."""
        is_denied = (
            (action == sqlite3.SQLITE_PRAGMA and name not in _TOLD_PRAGMAS)
            or action in _TEMPORARY | _VIRTUAL
            or _runs_native_code(action, other)
            or (self._is_checking and self._changes_internal(action, name, other))
        )
        return sqlite3.SQLITE_DENY if is_denied else sqlite3.SQLITE_OK

    def _changes_internal(self, action: int, *names: str | None) -> bool:
        if action in _READING | {sqlite3.SQLITE_PRAGMA, sqlite3.SQLITE_ANALYZE}:
            return False
        # If a full-text table had another name, so would its internal tables.
        renames = action == sqlite3.SQLITE_ALTER_TABLE
        fixed = self._internal | self._virtual if renames else self._internal
        return any(name is not None and name.lower() in fixed for name in names)


def _may_read(action: int, name: str | None, other: str | None, *_: str | None) -> int:
    """Authorize an action on a read-only database that episodes share: only reading is allowed."""
    is_told = action == sqlite3.SQLITE_PRAGMA and name in _TOLD_PRAGMAS
    is_reading = action in _READING and not _runs_native_code(action, other)
    return sqlite3.SQLITE_OK if is_told or is_reading else sqlite3.SQLITE_DENY


def _temporary_bytes() -> int:
    """Return the size of SQLite's temporary files in this process. They have no names any more."""
    files, size = "/proc/self/fd", 0
    with suppress(FileNotFoundError):  # not Linux
        for number in os.listdir(files):
            with suppress(OSError):  # closed in the meantime
                if "/etilqs_" in os.readlink(f"{files}/{number}"):
                    size += os.stat(f"{files}/{number}").st_size
    return size


def _runs_native_code(action: int, function: str | None) -> bool:
    return action == sqlite3.SQLITE_FUNCTION and (function or "").lower() in _NATIVE_CODE
