"""The rewriting of the queue on small modules: what matches, what is said when it does not."""

import pytest

from patches.errors import QueueError
from patches.queue import Edit, Patch
from patches.rewrite import apply_patch, enclosing

MODULE = '''"""A docstring."""

from __future__ import annotations

import os


class Kitchen:
    def cook(self, meal):
        pot = fetch("gas", size=3)  # the big one
        return pot.boil(
            meal,  # raw
            minutes=4,
        )

    def clean(self):
        fetch("water")


def fetch(what, size=1):
    return os.path.join(what, str(size))
'''


def edit(find, replace, count=1, within=None, imports=(), leave=None, module="kitchen.py"):
    return Edit(find, replace, {module: count}, leave, within, imports)


def apply(*edits, sources=None):
    patch = Patch("group", "name", "purpose", "never", edits)
    return apply_patch(patch, sources or {"kitchen.py": MODULE})


def test_a_match_is_rewritten_and_all_else_stays_to_the_letter():
    result = apply(edit('fetch("gas", $$$REST)', 'fetch("induction", $$$REST)'))["kitchen.py"]
    assert result == MODULE.replace('"gas"', '"induction"')


def test_arguments_keep_their_layout_and_comments():
    result = apply(edit("pot.boil($$$ARGS)", "steam(pot.boil($$$ARGS))"))["kitchen.py"]
    assert result == MODULE.replace("pot.boil(", "steam(pot.boil(").replace("        )\n", "        ))\n")


def test_an_argument_can_be_added_after_a_trailing_comma():
    result = apply(edit("pot.boil($$$ARGS)", "pot.boil($$$ARGS, lid=True)"))["kitchen.py"]
    assert "minutes=4, lid=True)" in result


def test_an_edit_can_be_confined_to_one_definition():
    result = apply(edit("fetch($$$A)", "order($$$A)", within="Kitchen.clean"))["kitchen.py"]
    assert 'order("water")' in result and 'fetch("gas"' in result


def test_an_import_goes_behind_docstring_and_future_imports_and_only_once():
    line = "from pantry import order"
    twice = [edit("fetch($A)", "order($A)", imports=(line,)), edit("os.path", "os.path", imports=(line,))]
    result = apply(*twice)["kitchen.py"]
    assert result.count(line) == 1
    assert result.index("__future__") < result.index(line) < result.index("import os\n")


def test_a_wrong_count_names_pattern_counts_and_places():
    with pytest.raises(QueueError) as error:
        apply(edit("fetch($$$A)", "order($$$A)", count=1))
    text = str(error.value)
    assert "group/name: kitchen.py: looked for 'fetch($$$A)' 1 time(s), found 2" in text
    assert "kitchen.py:10 in Kitchen.cook" in text and "kitchen.py:17 in Kitchen.clean" in text


def test_no_match_names_the_nearest_candidates_in_other_modules_too():
    sources = {"kitchen.py": MODULE, "cellar.py": "def fetch_wine(shelf):\n    return fetch_bottle(shelf, cool=True)\n"}
    with pytest.raises(QueueError, match=r"(?s)found 0.*candidate cellar.py:2 in fetch_wine"):
        apply(edit("fetch_bottle($SHELF)", "buy($SHELF)"), sources=sources)


def test_a_vanished_definition_names_the_nearest():
    with pytest.raises(QueueError, match=r"no definition 'Kitchen.cooks' in this release; nearest: .*Kitchen.cook"):
        apply(edit("fetch($$$A)", "order($$$A)", within="Kitchen.cooks"))


def test_a_vanished_module_names_the_nearest():
    with pytest.raises(QueueError, match=r"rooms/kitchen.py: no such module in this release; nearest: kitchen.py"):
        apply(edit("fetch($$$A)", "order($$$A)", module="rooms/kitchen.py"))


def test_an_edit_of_the_whole_package_refuses_a_match_that_nobody_decided_on():
    sources = {"kitchen.py": MODULE, "attic.py": "def look():\n    return os.path.sep\n"}
    everywhere = edit("os.path.$NAME", "paths.$NAME", leave={})
    with pytest.raises(QueueError, match=r"attic.py:2: 'os.path.\$NAME' also matches here \(in look\)"):
        apply(everywhere, sources=sources)
    left = edit("os.path.$NAME", "paths.$NAME", leave={"attic.py": "nobody goes there"})
    result = apply(left, sources=sources)
    assert "paths.join" in result["kitchen.py"] and result["attic.py"] == sources["attic.py"]


def test_a_replacement_that_breaks_the_module_is_refused():
    with pytest.raises(QueueError, match="the rewritten module is not Python"):
        apply(edit("fetch($A)", "fetch($A"))


def test_a_replacement_with_an_unbound_name_is_refused():
    with pytest.raises(QueueError, match=r"uses \$B, which its pattern does not bind"):
        apply(edit("fetch($A)", "fetch($B)"))


def test_text_before_a_match_may_hold_any_characters():
    sources = {"kitchen.py": MODULE.replace("A docstring.", "Ünïcode ✨ 日本")}
    result = apply(edit("pot.boil($$$ARGS)", "pot.fry($$$ARGS)"), sources=sources)
    assert result["kitchen.py"] == sources["kitchen.py"].replace("boil", "fry")


def test_the_innermost_definition_of_a_line():
    assert enclosing(MODULE, 10) == "Kitchen.cook"
    assert enclosing(MODULE, 5) == "<module>"


def test_a_match_inside_another_is_refused_and_matches_side_by_side_are_not():
    with pytest.raises(QueueError, match=r"group/name: kitchen.py:2: .*lies inside the one that begins on line 1"):
        apply(edit("f($X)", "g($X)", count=2), sources={"kitchen.py": "f(\n    f(1))\n"})
    beside = apply(edit("a.$X", "b.$X", count=2), sources={"kitchen.py": "a.f(a.g())\n"})
    assert beside["kitchen.py"] == "b.f(b.g())\n"


def test_an_unbound_name_is_refused_with_the_patch_and_for_many_arguments_too():
    with pytest.raises(QueueError, match=r"group/name: kitchen.py: .* uses \$\$\$B, which its pattern does not bind"):
        apply(edit('fetch("water")', "fetch($$$B)"))


def test_a_module_that_is_not_python_does_not_stop_the_report_on_another():
    sources = {"kitchen.py": MODULE, "template.py": "print 'fetch_wine(shelf)'\n"}
    with pytest.raises(QueueError, match=r"(?s)found 0.*candidate template.py:1 in <module>"):
        apply(edit("fetch_wine(shelf)", "buy(shelf)"), sources=sources)
