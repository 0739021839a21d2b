"""JSON as people write it reads as the JSON that they mean; mistakes are named with their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.config import parse_lenient, read_json
from tiermem.errors import ConfigError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
GAPS = st.sampled_from(
    ["", " ", "\t", "\n", "\r\n", "/* { */", "/**/", "// ] \n", "# , \r\n", '  # "a"\n\t']
)


@given(VALUES)
def test_what_json_writes_reads_as_json_reads_it(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, indent=1), json.dumps(value, ensure_ascii=False)):
        read = parse_lenient(text)
        assert read == value
        assert json.dumps(read) == json.dumps(json.loads(text))  # types too: 1 is not 1.0


@given(VALUES, st.data())
def test_comments_spaces_and_trailing_commas_change_nothing(value: Any, data: st.DataObject) -> None:
    def written(value: Any) -> str:
        if isinstance(value, dict):
            members = [
                f"{gap()}{json.dumps(k)}{gap()}:{gap()}{written(v)}{gap()}" for k, v in value.items()
            ]
            return "{" + ",".join(members) + last(members) + "}"
        if isinstance(value, list):
            items = [f"{gap()}{written(each)}{gap()}" for each in value]
            return "[" + ",".join(items) + last(items) + "]"
        return json.dumps(value)

    def gap() -> str:
        return data.draw(GAPS)

    def last(members: list[str]) -> str:
        return data.draw(st.sampled_from(["", f",{gap()}"])) if members else gap()

    text = f"{data.draw(st.sampled_from(['', chr(0xFEFF)]))}{gap()}{written(value)}{gap()}"
    assert parse_lenient(text) == value


@given(st.text(alphabet='{}[]:,"/*#\\ \n\t01eE.-+truefalsn\ufeff'))
def test_any_other_text_is_a_mistake_with_a_place(text: str) -> None:
    try:
        parse_lenient(text)
    except ConfigError as error:
        assert "line " in str(error)
        assert "column " in str(error)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ["expected a value", "line 1, column 1: the text ends"]),
        ('{\n  "a": 1\n  "b": 2\n}', ["expected , or }", "line 3, column 3", '"b": 2']),
        ('{\r\n\t"a": 1,\r\n\t"a": 2}', ["a is given twice", "line 3, column 2"]),
        ('{"io": {"depth": 1, "depth": 1}}', ["io.depth is given twice"]),
        ('{"a": [{"b": 1, "b": 1}]}', ["a.0.b is given twice"]),
        ('{"a": True}', ["JSON writes true", "column 7", "True"]),
        ('{"a": None}', ["JSON writes null"]),
        ("{'a': 1}", ["double quotes", "column 2"]),
        ("{a: 1}", ["double quotes", "column 2"]),
        ('{"a": .5}', ["-0.5"]),
        ('{"a": NaN}', ["JSON writes numbers"]),
        ('{"a": cpu}', ["double quotes", "cpu"]),
        ('{"a": "x\n"}', ["a string begins here", "column 7"]),
        ('{"a": "\\q"}', ["escape"]),
        ('{"a": 1} {}', ["the value has ended", "column 10"]),
        ('{"a": 1 /* }', ["comment begins here", "column 9"]),
        ('{"a" 1}', ["expected : after the key 'a'"]),
        ("[1,,2]", ["expected a value", "column 4"]),
        ("[" * 5000, ["levels of nesting"]),
    ],
)
def test_a_mistake_has_its_place_and_the_text_there(text: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lenient(text)
    for part in says:
        assert part in str(caught.value)


def test_a_comment_may_end_a_number_and_a_tab_may_stand_in_a_string() -> None:
    assert parse_lenient('[1//one\n,2/*two*/,3#three\n,"a\tb"]') == [1, 2, 3, "a\tb"]


def test_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf// why\r\n{"a": 1e9,}\r\n')
    assert read_json(path) == {"a": 1e9}
    path.write_text('{"a": }')
    with pytest.raises(ConfigError, match=r"config\.json is not JSON: expected a value .*column 7"):
        read_json(path)
