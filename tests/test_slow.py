"""The list of slow tests: its functions exist, are those that take longest, and are marked."""

import ast

import slow

from fragility_lab.paths import PROJECT

RESULTS = """<testsuites><testsuite>
<testcase classname="tests.a.test_b" name="test_long[1]" time="6.0" />
<testcase classname="tests.a.test_b" name="test_long[2]" time="4.0" />
<testcase classname="tests.a.test_b" name="test_many[x]" time="0.2" /><testcase classname="tests.a.test_b"
 name="test_many[y]" time="0.6" />
<testcase classname="tests.a.test_c" name="test_one" time="0.5" />
</testsuite></testsuites>"""


def test_listed_functions_are_there():
    for name in slow.listed():
        file, _, function = name.partition("::")
        tree = ast.parse((PROJECT / file).read_text(encoding="utf-8"))
        assert any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body), name


def test_slow_functions_are_those_that_take_longest_on_average(tmp_path):
    (tmp_path / "results.xml").write_text(RESULTS)
    seconds = slow.times(tmp_path / "results.xml")
    assert {name.split("::")[1]: sum(found) for name, found in seconds.items()} == {
        "test_long": 10.0, "test_many": 0.8, "test_one": 0.5,
    }  # fmt: skip
    assert slow.slow(seconds) == ["tests/a/test_b.py::test_long", "tests/a/test_c.py::test_one"]
    assert slow.slow({"one": [1.0], "other": [0.1]}) == ["one"]


def test_tests_of_listed_functions_are_marked_with_all_their_parameters():
    class Item:
        def __init__(self, nodeid):
            self.nodeid, self.marks = nodeid, []
            self.add_marker = self.marks.append

    one = min(slow.listed())
    items = [Item(one), Item(f"{one}[a-b]"), Item(f"{one}_too"), Item("tests/test_slow.py::test_listed")]
    slow.mark(items)
    assert [item.marks for item in items] == [["slow"], ["slow"], [], []]
