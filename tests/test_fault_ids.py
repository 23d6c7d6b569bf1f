"""Every grave kind of fault that servers like this one are known for has a test that is named after it.

The ids are those of the project's list of known faults: OA the API, CT chat templates, SA sampling, ST streams, OB what
operators see, SE security, SH health and overload, RD sessions and Redis.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

GRAVE = {
    "OA": "01 02 03 04 05 07 08 09 11 12 13 14 16",
    "CT": "01 03 04",
    "SA": "01 02 03 04 05 07",
    "ST": "01 03 04 05 06 08 10 11",
    "OB": "01",
    "SE": "01 02 03 04 05 06 08",
    "SH": "01 02 04 05 06",
    "RD": "01 02 03 04 06",
}
IDS = [f"{kind}_{number}" for kind, numbers in GRAVE.items() for number in numbers.split()]
ID = re.compile(r"(?<![a-z])(?:" + "|".join(GRAVE) + r")_\d\d(?=_|$)", re.IGNORECASE)


def names_by_id() -> dict[str, list[str]]:
    """id -> the tests that name it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for fault in ID.findall(node.name):
                    found[fault.upper()].append(f"{path.name}::{node.name}")
    return found


@pytest.fixture(scope="module")
def named() -> dict[str, list[str]]:
    return names_by_id()


@pytest.mark.parametrize("fault", IDS)
def test_there_is_a_test_named_after(fault: str, named: dict[str, list[str]]) -> None:
    assert named[fault], f"no test is named after {fault.replace('_', '-')}"


if __name__ == "__main__":  # the table
    for fault, names in sorted(names_by_id().items()):
        print(fault.replace("_", "-"), *names, sep="\n  ")
