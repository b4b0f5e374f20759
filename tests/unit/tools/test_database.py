import asyncio
import sqlite3
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from raypo.tools.calls import ToolError
from raypo.tools.database import Database

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT sum(x) FROM n"


@pytest.fixture
def path(tmp_path) -> Path:
    with closing(sqlite3.connect(tmp_path / "cities.db")) as connection, connection:
        connection.execute("CREATE TABLE city (name TEXT, people INTEGER)")
        connection.executemany(
            "INSERT INTO city VALUES (?, ?)", [("Bern", 134), ("Oslo", 709), ("Nowhere", None)]
        )
    return tmp_path / "cities.db"


def ask(database: Database, *queries: str) -> list[str]:
    async def answers() -> list[str]:
        return [await database.sql(query) for query in queries]

    with closing(database):
        return asyncio.run(answers())


def test_rows_come_with_a_header(path):
    query = "SELECT name, people FROM city ORDER BY people"
    assert ask(Database(path), query) == ["name|people\nNowhere|NULL\nBern|134\nOslo|709"]


def test_the_tables_can_be_looked_at(path):
    tables, columns = ask(
        Database(path), "SELECT name FROM sqlite_master", "PRAGMA table_info(city)"
    )
    assert tables == "name\ncity"
    assert "0|name|TEXT" in columns


def test_a_copy_is_changed_and_the_file_is_not(path):
    before = path.read_bytes()
    done, count = ask(
        Database(path, writable=True), "DELETE FROM city", "SELECT count(*) AS n FROM city"
    )
    assert (done, count) == ("done, 3 rows changed", "n\n0")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("DELETE FROM city", "not authorized"),
        ("CREATE TEMP TABLE city AS SELECT 'Bern' AS name, 1 AS people", "not authorized"),
        ("BEGIN", "not authorized"),
        ("SAVEPOINT here", "not authorized"),
        ("SELEC 1", "syntax error"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("ATTACH DATABASE 'other.db' AS other", "not authorized|too many attached"),
        ("VACUUM INTO 'other.db'", "authoriz|too many attached"),
        ("PRAGMA journal_mode = WAL", "not authorized"),
        ("SELECT load_extension('x')", "not authorized|no such function"),
        ("SELECT length(zeroblob(1000000000))", "too big"),
        ("SELECT ?", "binding"),
        ("SELECT " + ", ".join("1" * 101), "too many columns"),
    ],
)
def test_what_is_not_allowed_is_told(path, monkeypatch, query, problem):
    monkeypatch.chdir(path.parent)
    with pytest.raises(ToolError, match=problem):
        ask(Database(path), query)
    assert not Path("other.db").exists()


@pytest.mark.parametrize("query", ["ATTACH DATABASE 'other.db' AS other", "VACUUM INTO 'other.db'"])
def test_a_copy_reaches_no_file_either(path, monkeypatch, query):
    monkeypatch.chdir(path.parent)
    with pytest.raises(ToolError, match=r"too many attached"):
        ask(Database(path, writable=True), query)
    assert not Path("other.db").exists()


@pytest.fixture
def texts(path) -> Path:
    """A file with full-text tables, one of which a trigger keeps."""
    with closing(sqlite3.connect(path)) as connection, connection:
        try:
            connection.executescript(
                "CREATE VIRTUAL TABLE note USING fts4(body); INSERT INTO note VALUES ('hello');"
                "CREATE VIRTUAL TABLE Old USING fts3(body); INSERT INTO Old VALUES ('hello');"
                "CREATE TRIGGER noted AFTER INSERT ON city"
                " BEGIN INSERT INTO note VALUES (new.name); END;"
            )
        except sqlite3.OperationalError as error:
            pytest.skip(f"this SQLite has no full-text tables: {error}")
    return path


NATIVE = """
import asyncio, sys
from raypo.tools.calls import ToolError
from raypo.tools.database import Database

async def ask(database):
    for query in sys.argv[3:]:
        try:
            print(await database.sql(query), flush=True)
        except ToolError as error:
            print(type(error).__name__, error, flush=True)

asyncio.run(ask(Database(sys.argv[1], writable=sys.argv[2] == "writable")))
"""


@pytest.mark.parametrize("mode", ["writable", "read-only"])
def test_no_query_makes_sqlite_run_native_code(texts, mode):
    """In a process of its own, which SQLite would crash."""
    queries = [
        "SELECT fts3_tokenizer('zz', x'4141414141414141')",
        "SELECT FTS3_Tokenizer('simple', x'4141414141414141')",
        "CREATE VIRTUAL TABLE f USING fts3(a, tokenize=zz)",
        "SELECT * FROM note WHERE note MATCH 'hello'",
        "UPDATE old_segdir SET root = x'00ff'",
        "SELECT * FROM old WHERE old MATCH 'hello'",
        "SELECT 'the end'",
    ]
    command = [sys.executable, "-c", NATIVE, str(texts), mode, *queries]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "AAAA" not in done.stdout
    assert done.stdout.count("ToolError SQL error: not authorized") >= 3
    assert done.stdout.endswith("the end\n")


DENIED = "not authorized|may not|reserved for internal use"
"""By the authorizer, or since Python 3.12 by SQLite itself."""


@pytest.mark.parametrize(
    "query",
    [
        "UPDATE old_segdir SET root = x'00ff'",
        "WITH x AS (SELECT 1) DELETE FROM OLD_SEGMENTS",
        "INSERT INTO note_stat VALUES (1, x'ff')",
        "EXPLAIN DELETE FROM note_content",
        "DROP TABLE note_segdir",
        "ALTER TABLE note_segdir RENAME TO mine",
        "ALTER TABLE note RENAME TO mine",
        "CREATE TABLE old_stat (id INTEGER, value BLOB)",
        "CREATE TRIGGER t AFTER INSERT ON note_segdir BEGIN DELETE FROM city; END",
        "DROP TABLE note",
    ],
)
def test_the_inside_of_full_text_tables_is_not_changed(texts, query):
    with pytest.raises(ToolError, match=DENIED):
        ask(Database(texts, writable=True), query)


def test_a_trigger_does_not_change_the_inside_of_full_text_tables_either(texts):
    trigger = (
        "CREATE TRIGGER t AFTER INSERT ON city BEGIN"
        " INSERT INTO old VALUES ('b'); UPDATE old_segdir SET root = x'00ff'; END"
    )
    with pytest.raises(ToolError, match=DENIED):
        ask(Database(texts, writable=True), trigger, "INSERT INTO city VALUES ('Rome', 2)")


def test_full_text_tables_of_a_copy_are_searched_and_changed(texts):
    *_, found, rows = ask(
        Database(texts, writable=True),
        "INSERT INTO old VALUES ('another')",
        "BEGIN",
        "INSERT INTO city VALUES ('Rome', 2)",
        "UPDATE note SET body = 'hello again' WHERE body = 'hello'",
        "COMMIT",
        "INSERT INTO note(note) VALUES ('optimize')",
        "ANALYZE",
        "SELECT * FROM note WHERE note MATCH 'rome OR again' ORDER BY body",
        "SELECT count(*) FROM old_segdir",
    )
    assert found == "body\nRome\nhello again"
    assert rows == "count(*)\n2"


def test_a_copy_has_no_tables_on_the_disk(path):
    with pytest.raises(ToolError, match="not authorized"):
        ask(Database(path, writable=True), "CREATE TEMP TABLE t AS SELECT randomblob(90000)")


@pytest.mark.skipif(sys.platform != "linux", reason="temporary files are not measured elsewhere")
@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize(
    "query",
    [
        "SELECT randomblob(5000) AS y FROM n ORDER BY y",
        "SELECT count(DISTINCT randomblob(5000)) FROM n",
    ],
)
def test_a_query_that_fills_the_temporary_folder_is_ended(path, monkeypatch, query, writable):
    monkeypatch.setattr("raypo.tools.database.MAX_TEMPORARY_BYTES", 10**7)
    rows = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 1000000)"
    database = Database(path, writable=writable, time_limit_s=60)

    async def twice() -> str:
        with pytest.raises(ToolError, match="more data than fits into the temporary files"):
            await database.sql(f"{rows} {query}")
        return await database.sql("SELECT name FROM city ORDER BY name LIMIT 1")

    with closing(database):
        assert asyncio.run(twice()) == "name\nBern"


def test_a_query_whose_single_steps_are_long_is_ended(path):
    texts = "hex(zeroblob(45000 - x)), hex(zeroblob(22000)) || '1'"
    rows = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 2000)"
    begin = time.monotonic()
    with pytest.raises(ToolError, match="the time limit"):
        ask(Database(path, time_limit_s=0.2), f"{rows} SELECT sum(instr({texts})) FROM n")
    assert time.monotonic() - begin < 30


def test_an_endless_query_is_ended_and_the_next_one_is_answered(path):
    database = Database(path, time_limit_s=0.2)

    async def twice() -> str:
        with pytest.raises(ToolError, match=r"interrupted after 0\.2 s: the time limit"):
            await database.sql(ENDLESS)
        return await database.sql("SELECT 1")

    with closing(database):
        assert asyncio.run(twice()) == "1\n1"


def test_a_query_whose_caller_stops_waiting_is_ended(path):
    database = Database(path, time_limit_s=100)

    async def cancelled() -> str:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(database.sql(ENDLESS), 0.2)
        return await database.sql("SELECT 1")

    begin = time.monotonic()
    with closing(database):
        assert asyncio.run(cancelled()) == "1\n1"
    assert time.monotonic() - begin < 30


def test_a_query_that_is_left_ends_no_other_of_another_event_loop(path):
    database = Database(path, time_limit_s=100)
    begun, goes_on = threading.Event(), threading.Event()

    def one() -> int:
        begun.set()
        return int(goes_on.wait(60))

    database._connection.create_function("one", 0, one)
    held = ENDLESS.replace("SELECT 1", "SELECT one()").replace("FROM n)", "FROM n WHERE x < 9999)")

    async def left() -> None:
        await asyncio.wait_for(database.sql("SELECT 1"), 0.05)

    with closing(database), ThreadPoolExecutor() as pool:
        answer = pool.submit(asyncio.run, database.sql(held))
        assert begun.wait(60)
        with pytest.raises(TimeoutError):
            asyncio.run(left())  # it waits for its turn
        goes_on.set()
        assert answer.result() == "sum(x)\n49995000"


def test_one_database_serves_event_loop_after_event_loop(path):
    async def together(database: Database) -> list[str]:
        return await asyncio.gather(*(database.sql("SELECT 1") for _ in range(3)))

    with closing(Database(path)) as database:
        for _ in range(2):
            assert asyncio.run(together(database)) == ["1\n1"] * 3


def test_no_more_rows_are_read_than_are_told(path):
    database = Database(path, time_limit_s=100, max_chars=10**5)
    tracemalloc.start()
    rows = "SELECT printf('%.*c', 90000, 'x') FROM (SELECT 1 UNION SELECT 2 UNION SELECT 3), city"
    (told,) = ask(database, rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert told.endswith("... (cut)")
    assert peak < 7 * 10**5


def test_a_copy_grows_only_so_far(path, monkeypatch):
    monkeypatch.setattr("raypo.tools.database.MAX_PAGES", 1000)
    fill = "CREATE TABLE t AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) "
    with pytest.raises(ToolError, match="database or disk is full"):
        ask(Database(path, writable=True, time_limit_s=60), fill + "SELECT zeroblob(90000) FROM n")


def test_long_answers_are_cut_and_say_so(path):
    many = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n"
    wide = "SELECT printf('%.*c', 90, 'x') AS x"
    rows, cells = ask(Database(path, max_rows=3, max_chars=50), many, wide)
    assert rows == "x\n1\n2\n3\n... (cut)"
    assert cells == "x\n" + "x" * 48 + "\n... (cut)"


def test_what_is_no_database_is_refused(tmp_path):
    (tmp_path / "text.db").write_text("this is a text and no database, whatever its name says" * 50)
    for path in (tmp_path / "text.db", tmp_path / "missing.db"):
        with pytest.raises(ValueError, match="cannot be opened as a SQLite database"):
            Database(path)
