"""YAML as the documents need it: YAML 1.2 scalars, places, and nothing that is lost in silence."""

from __future__ import annotations

import math

import pytest

from axonn_tune.errors import DocumentError
from axonn_tune.specs.document import Plain, read_config, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("25e9", 25e9),
        ("1e-05", 1e-5),
        ("-.5", -0.5),
        ("3.", 3.0),
        ("010", 10),
        ("+7", 7),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("=", "="),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        ("80b", "80b"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Plain) -> None:
    """Guards against PyYAML's YAML 1.1: `25e9` as text, `on` as True, `010` as 8, `1:30` as 90."""
    read = read_yaml(f"key: {text}", source="f").root.plain()
    assert read == {"key": value}
    assert isinstance(read, dict)
    assert type(read["key"]) is type(value)


def test_every_value_knows_its_line() -> None:
    """Guards the line numbers of errors, for mapping keys and list items alike."""
    root = read_yaml("# comment\na:\n  b:\n    1\nc:\n  - x\n  -\n    d: 2\n", source="f.yaml").root
    lines = {("a",): 2, ("a", "b"): 3, ("c",): 5, ("c", 0): 6, ("c", 1): 8, ("c", 1, "d"): 8}
    assert {location: root.nearest(location).line for location in lines} == lines
    assert str(root.nearest(("a", "b")).source) == "f.yaml"


def test_all_problems_are_collected() -> None:
    """Guards that a duplicate key, an alias, a merge key and a tag are refused, and all at once."""
    text = 'a: 1\na: 2\nb: &x {c: 1, c: 2}\nd: *x\ne:\n  <<: *x\nf: !!float 3\n? [g]\n: 4\n"<<": 5\n'
    reading = read_yaml(text, source="f")
    found = {(problem.path, problem.line): problem.message for problem in reading.problems}
    assert found["a", 2] == "key written twice, first in line 1"
    assert found["b.c", 3] == "key written twice, first in line 3"
    assert "aliases" in found["d", 4]
    assert "'extends'" in found["e", 6]
    assert "tags" in found["f", 7]
    assert "a key must be a word" in found["", 8]
    assert reading.root.mapping()["<<"].value == 5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: &x 4\nb: *x\n", {"a": 4, "b": 4}),
        ("a: &x {c: 1, d: 2}\nb:\n  d: 3\n  <<: *x\n", {"a": {"c": 1, "d": 2}, "b": {"c": 1, "d": 3}}),
        ("a: &x {c: 1}\nb: &y {c: 2, d: 3}\ne:\n  <<: [*x, *y]\n  f: 4\n", {"e": {"c": 1, "d": 3, "f": 4}}),
        ("a: &x [1, 2]\nb: [*x, 3]\n", {"b": ((1, 2), 3)}),
        ('a: !!str 8\nb: !!int "8"\nc: !!map {d: !!float 1}\n', {"a": "8", "b": 8, "c": {"d": 1}}),
        ('"<<": 5\n', {"<<": 5}),
    ],
)
def test_files_of_other_tools_have_aliases_merge_keys_and_tags(text: str, value: dict[str, object]) -> None:
    """Guards config files of frameworks, which PyYAML loads: no setting behind an alias is dropped."""
    read = read_config(text, source="f").plain()
    assert isinstance(read, dict)
    assert {key: read[key] for key in value} == value


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("a: 1\nb: *x\n", "b: alias *x has no anchor before it", 2),
        ("a: &x {b: *x}\n", "a.b: alias *x has no anchor before it", 1),
        ("a: 1\nb: !include x.yaml\n", "b: tags (!include) are not supported", 2),
        ("a: &x 4\nb:\n  <<: *x\n", "b: a merge key (<<) takes a mapping", 3),
        ("a: 1\na: 2\n", "a: key written twice", 2),
        (
            "a0: &a0 [1, 1]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}, *a{n}, *a{n}]\n" for n in range(30)),
            "more than 100,000 values by aliases",
            9,
        ),
    ],
)
def test_what_another_tools_file_cannot_state_is_refused_by_name(text: str, words: str, line: int) -> None:
    """Guards settings that cannot be read, which were left out unsaid, and files that unfold without end."""
    with pytest.raises(DocumentError) as caught:
        read_config(text, source="f")
    assert f"f:{line}: {words}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("", "the file is empty", None),
        ("# only a comment\n", "the file is empty", None),
        ("---\n", "the file is empty", None),
        ("a: b: c", "not valid YAML: mapping values are not allowed", 1),
        ("x:\n\ty: 1", "not valid YAML", 2),
        ("a: [1,\nb: 2", "not valid YAML", 2),
        ("a: *nothing\n---\nb: 1", "more than one document", 2),
        ("a: \x00", "control characters", None),
        ("[" * 100_000, "nested more than", 1),
        ("{a: " * 100_000, "nested more than", 1),
    ],
)
def test_unreadable_text_is_explained(text: str, words: str, line: int | None) -> None:
    """Guards the messages of texts that hold no document; PyYAML's C composer crashes on the deep ones."""
    with pytest.raises(DocumentError, match=words) as caught:
        read_yaml(text, source="f.yaml")
    assert caught.value.problems[0].line == line


def test_a_number_of_too_many_digits_is_a_problem() -> None:
    """Guards against Python's limit on integers of thousands of digits ending in a traceback."""
    (problem,) = read_yaml("a: " + "9" * 5000, source="f").problems
    assert (problem.path, "too many digits" in problem.message) == ("a", True)


def test_aliases_do_not_multiply() -> None:
    """Guards against a short file that expands to billions of values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 20)]
    assert len(read_yaml("\n".join(lines), source="f").problems) == 19 * 9
