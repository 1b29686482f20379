"""Covering arrays hold every pair of settings with few rows, and the same rows each time."""

from itertools import combinations, product

from pairwise import covering

SETTINGS = {"strategy": "abcd", "optimizer": "xy", "clip": (None, 1.0), "accumulate": (1, 2, 3)}
ROWS = [dict(zip(SETTINGS, values, strict=True)) for values in product(*SETTINGS.values())]


def pairs(rows):
    return {pair for row in rows for pair in combinations(row.items(), 2)}


def test_each_pair_of_settings_meets_in_few_of_the_rows():
    found = covering(ROWS, lambda row: row)
    assert pairs(found) == pairs(ROWS)
    assert 12 <= len(found) <= 14  # the strategies alone meet the numbers in twelve
    assert found == [row for row in ROWS if row in found] == covering(ROWS, lambda row: row)


def test_a_row_with_a_pair_of_its_own_is_kept_and_no_row_is_needless():
    rows = [row for row in ROWS if row["strategy"] != "d" or row == ROWS[-1]]
    found = covering(rows, lambda row: row)
    assert ROWS[-1] in found
    assert all(pairs(row for row in found if row is not one) != pairs(rows) for one in found)
    assert covering([], lambda row: row) == []
