"""The script that compares the tables of two folders of results."""

import runpy

import pytest

from fragility_lab.paths import PROJECT

main = runpy.run_path(str(PROJECT / "tools/compare_tables.py"))["main"]
TABLE = "layer,mismatch,rests_until,seconds\n0,0.5,7,1.5\n1,0.25,9,2.5\n"


def compare_folders(tmp_path, capsys, old: str, new: str) -> tuple[int, str]:
    """Exit status and first line for one table in two folders."""
    for folder, text in (("old", old), ("new", new)):
        (tmp_path / folder / "tables").mkdir(parents=True)
        (tmp_path / folder / "tables" / "e5.csv").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "old"), str(tmp_path / "new")])
    return ended.value.code, capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("new", "status", "line"),
    [
        (TABLE, 0, "identical"),
        (TABLE.replace("2.5", "9.5"), 0, "equal but for seconds"),
        (TABLE.replace("rests", "cooldown"), 0, "equal but for the name of cooldown_until"),
        (TABLE.replace("0.25", "0.375"), 1, "DIFFERENT: mismatch by at most 0.125"),
        (TABLE.replace("mismatch", "m"), 1, "DIFFERENT: 2 rows of layer, mismatch, rests_until, seconds; 2 rows of"),
        ("layer\n0\n", 1, "DIFFERENT: 2 rows of"),
    ],
)
def test_one_table(tmp_path, capsys, new, status, line):
    code, text = compare_folders(tmp_path, capsys, TABLE, new)
    assert code == status and text.startswith(f"tables/e5.csv: {line}")


def test_a_table_of_one_folder_only(tmp_path, capsys):
    compare_folders(tmp_path, capsys, TABLE, TABLE)
    (tmp_path / "new/tables/e5.csv").unlink()
    with pytest.raises(SystemExit):
        main([str(tmp_path / "old"), str(tmp_path / "new")])
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"tables/e5.csv: only in {tmp_path}/old/tables" and last == "0 of 1 tables agree"
