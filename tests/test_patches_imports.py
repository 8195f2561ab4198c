"""What an edit imports must exist, and its name must be free where it is used."""

import pytest

from patches import imports
from patches.errors import QueueError
from patches.queue import Edit, Patch
from patches.rewrite import apply_patch


def apply(text, statement="from pantry import order", find="fetch($A)", replace="order($A)", count=1, **others):
    edit = Edit(find, replace, {"m.py": count}, None, None, (statement,) if statement else ())
    return apply_patch(Patch("group", "name", "purpose", "never", (edit,)), {"m.py": text, **others})["m.py"]


@pytest.mark.parametrize(
    "text",
    [
        "def order():\n    pass\n\nfetch(1)\n",
        "order = 1\nfetch(1)\n",
        "from shop import order\nfetch(1)\n",
        "import shop as order\nfetch(1)\n",
        "class order:\n    pass\n\nfetch(1)\n",
    ],
)
def test_a_name_that_the_module_has_already_is_refused(text):
    with pytest.raises(QueueError, match=r"group/name: m.py: .*another 'order' at its top level"):
        apply(text)


@pytest.mark.parametrize(
    "text",
    [
        "def cook(order):\n    fetch(1)\n",
        "def cook():\n    fetch(1)\n    order = 2\n",
        "def cook():\n    from shop import order\n    return fetch(1)\n",
        "def cook():\n    order = 1\n    def inner():\n        fetch(1)\n",
        "def cook():\n    return [fetch(order) for order in range(3)]\n",
        "cook = lambda order: fetch(1)\n",
        "@decorated\ndef cook(*order):\n    fetch(1)\n",
    ],
)
def test_a_name_that_the_function_around_a_match_has_for_itself_is_refused(text):
    with pytest.raises(QueueError, match=r"has its own 'order', which would hide the imported one"):
        apply(text)


@pytest.mark.parametrize(
    "text",
    [
        "def cook():\n    fetch(1)\n\ndef other(order):\n    return order\n",
        "class Kitchen:\n    def order(self):\n        return fetch(1)\n",
        "def cook(kitchen):\n    kitchen.order = fetch(1)\n",
        "from pantry import order\nfetch(1)\norder(2)\n",
    ],
)
def test_the_same_name_elsewhere_does_no_harm(text):
    assert "order(1)" in apply(text) and apply(text).count("from pantry import order") == 1


def test_our_modules_names_are_looked_up(tmp_path):
    folder = tmp_path / "openrlhf" / "kitchen"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("if True:\n    stove = 1\n\ndef cook():\n    hidden = 2\n")
    (folder / "lazy.py").write_text("def __getattr__(name):\n    return name\n")

    def check(statement, before=""):
        imports.check_names(before, f"{statement}\n", {"cellar.py": "wine = 1\n"}, tmp_path)

    for good in (
        "kitchen import stove, cook",
        "kitchen import lazy",
        "kitchen.lazy import anything",
        "cellar import wine",
    ):
        check(f"from openrlhf.{good}")
    with pytest.raises(QueueError, match=r"openrlhf.kitchen has no 'hidden'"):
        check("from openrlhf.kitchen import stove, hidden")
    with pytest.raises(QueueError, match=r"no module openrlhf.attic, neither ours nor upstream's"):
        check("from openrlhf.attic import box")
    # What upstream's text had before is upstream's own affair.
    check("from openrlhf.attic import box", before="from openrlhf.attic import box\n")


def test_an_edit_that_imports_what_we_do_not_have_names_the_patch():
    with pytest.raises(QueueError, match=r"group/name: m.py: .*openrlhf.device has no 'no_such_name'"):
        apply("fetch(1)\n", "from openrlhf.device import no_such_name")


def test_an_import_in_a_replacement_is_looked_up_too():
    with pytest.raises(QueueError, match=r"openrlhf.device has no 'no_such_name'"):
        apply(
            "from shop import no_such_name\n", None, "from shop import $$$NAMES", "from openrlhf.device import $$$NAMES"
        )
