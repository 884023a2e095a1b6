"""472 texts of public threads, diagnosed before any pattern was written with them in sight, and the answers now.

A row: `thread`, the cause that the thread established; `first`, how the first answer was judged against it; `cause`,
the one named now; `open`, where that is still not the thread's; `completed`,
where the thread gives only a part of the message, which was completed as the program prints it.
"""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from powertrain.doctor.diagnose import diagnose, first_error

CASES = [json.loads(line) for line in (Path(__file__).parent / "fresh_cases.jsonl").read_text().splitlines()]
JUDGED = {"right", "general", "wrong", "unknown"}


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_a_fresh_text(case: dict[str, str]) -> None:
    found = diagnose(case["text"])
    assert (found[0].cause.name if found else "unknown") == case["cause"], [one.cause.name for one in found]
    for one in found:
        for words in (one.message(), one.fix(), one.message("zh"), one.fix("zh")):
            assert words and not re.search(r"\{\w+\}", words), words
    if not found:
        first_error(case["text"])


def test_what_is_not_the_threads_cause_is_not_said_to_be_certain() -> None:
    for case in CASES:
        if case.get("open"):
            assert all(one.cause.confidence != "certain" for one in diagnose(case["text"])), case["id"]


def test_rows_are_whole_and_differ() -> None:
    assert len({case["id"] for case in CASES}) == len(CASES) == 472
    for case in CASES:
        assert case["url"].startswith("https://github.com/") and case["thread"] and len(case["text"]) < 2000
        assert case["first"] in JUDGED


def test_the_table_of_the_page_is_of_these_rows() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    for batch in range(1, 17):
        rows = [case for case in CASES if case["set"] == f"fresh {batch}"]
        count = Counter(case["first"] for case in rows)
        cells = [len(rows), *(count[judged] for judged in ("right", "general", "wrong", "unknown"))]
        assert f"| {batch} | " + " | ".join(map(str, cells)) + " |" in page, cells
