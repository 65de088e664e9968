"""`tools` and `tool_choice`: what may be called, and every mistake named."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.errors import InvalidRequest
from services.gateway.tools.definitions import read_tool_use


def tool(name: Any = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | function}


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ("weather", None, "tools"),
        ([5], None, "tools[0]"),
        ([{"type": "web_search"}], None, "tools[0]"),
        ([tool() | {"more": 1}], None, "tools[0]"),
        ([tool("a b")], None, "tools[0].function.name"),
        ([tool(5)], None, "tools[0].function.name"),
        ([tool("a" * 65)], None, "tools[0].function.name"),
        ([tool(parameters=[])], None, "tools[0].function.parameters"),
        ([tool(parameters="{}")], None, "tools[0].function.parameters"),
        ([tool(description=5)], None, "tools[0].function.description"),
        ([tool(colour="red")], None, "tools[0].function.colour"),
        ([tool(), tool()], None, "tools"),
        ([tool(f"f{i}") for i in range(129)], None, "tools"),
        ([tool()], "always", "tool_choice"),
        ([tool()], {"type": "function", "function": {"name": "time"}}, "tool_choice"),
        ([tool()], {"type": "allowed_tools"}, "tool_choice"),
        (None, "required", "tool_choice"),
        ([], {"type": "function", "function": {"name": "weather"}}, "tool_choice"),
    ],
)
def test_a_mistake_is_named(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_tool_use(tools, choice, None)
    assert refused.value.param == param


def test_what_may_be_called() -> None:
    both = [tool("weather", strict=True, description=None), tool("time", parameters={"type": "object"})]
    auto = read_tool_use(both, None, None)
    assert (auto.names, auto.mode, auto.one_only) == (("weather", "time"), "auto", False)
    assert auto.definitions == [tool("weather"), tool("time", parameters={"type": "object"})]
    assert read_tool_use(both, "required", False).one_only
    named = read_tool_use(both, {"type": "function", "function": {"name": "time"}}, None)
    assert (named.names, named.mode, named.one_only) == (("time",), "required", True)
    for nothing in (
        read_tool_use(both, "none", None),
        read_tool_use([], "auto", None),
        read_tool_use(None, None, True),
    ):
        assert (nothing.names, nothing.definitions) == ((), None)
