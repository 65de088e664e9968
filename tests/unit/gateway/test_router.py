"""Which workers a request goes to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.gateway.router import Needs, NoRoute, Route, WorkerView, choose, choose_successor, longest_request
from services.protocol import Fingerprint, Role, WorkerInfo

FINGERPRINT = Fingerprint(wire_version=1, model="m", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=16)
NEEDS = Needs(num_computed_tokens=100, num_total_tokens=200)


def worker(name: str, role: Role, *, assigned: int = 0, dtype: str = "float32", **info: Any) -> WorkerView:
    fields: dict[str, Any] = {"capacity_tokens": 1000, "num_blocks": 100, "num_free_blocks": 100} | info
    fingerprint = Fingerprint(
        **{name: getattr(FINGERPRINT, name) for name in FINGERPRINT.__struct_fields__} | {"dtype": dtype}
    )
    described = WorkerInfo(
        role=role, incarnation=name, state="ready", model_name="m", fingerprint=fingerprint, **fields
    )
    return WorkerView(f"http://{name}", described, assigned)


def names(route: Route | NoRoute) -> tuple[str | None, str | None]:
    assert isinstance(route, Route), route
    return (
        route.decode.info.incarnation if route.decode else None,
        route.prefill.info.incarnation if route.prefill else None,
    )


def test_the_least_loaded_of_each_side_is_paired() -> None:
    workers = [
        worker("d1", "decode", num_requests=3),
        worker("d2", "decode", num_requests=1),
        worker("p1", "prefill", assigned=2),
        worker("p2", "prefill", num_requests=1),
    ]
    assert names(choose(workers, NEEDS)) == ("d2", "p2")


def test_between_equally_loaded_the_emptier_pool() -> None:
    workers = [worker("d1", "decode", num_free_blocks=10), worker("d2", "decode", num_free_blocks=90)]
    assert names(choose(workers, NEEDS)) == ("d2", None)


def test_load_is_what_others_gave_a_worker_and_what_we_have_on_it_now() -> None:
    """Requests of ours that it counted when it was asked may have ended since, and others may have begun."""
    info = worker("d", "decode", num_requests=7).info
    assert WorkerView("u", info, num_assigned=0, num_assigned_then=5).load == 2
    assert WorkerView("u", info, num_assigned=9, num_assigned_then=5).load == 11
    assert WorkerView("u", info, num_assigned=3, num_assigned_then=9).load == 3


def test_kv_that_means_something_else_is_never_shipped_and_the_field_is_named() -> None:
    workers = [worker("d", "decode"), worker("p", "prefill", dtype="bfloat16")]
    route = choose(workers, NEEDS)
    assert names(route) == ("d", None)
    assert isinstance(route, Route)
    assert "dtype" in route.why_local


def test_a_decode_worker_is_paired_with_the_prefill_worker_that_matches() -> None:
    workers = [worker("d", "decode"), worker("p1", "prefill", dtype="bfloat16"), worker("p2", "prefill", assigned=9)]
    assert names(choose(workers, NEEDS)) == ("d", "p2")


def test_a_worker_that_does_both_is_not_paired() -> None:
    assert names(choose([worker("b", "both"), worker("p", "prefill")], NEEDS)) == ("b", None)


def test_a_worker_too_small_is_not_asked() -> None:
    workers = [worker("d1", "decode", capacity_tokens=199), worker("d2", "decode", capacity_tokens=200, assigned=9)]
    assert names(choose(workers, NEEDS)) == ("d2", None)
    small = [worker("d", "decode"), worker("p", "prefill", capacity_tokens=99)]
    assert names(choose(small, NEEDS)) == ("d", None), "a prefill worker that cannot hold the prompt"


def test_one_last_token_is_made_by_prefill_alone() -> None:
    one = Needs(num_computed_tokens=100, num_total_tokens=101, one_token=True)
    assert names(choose([worker("d", "decode"), worker("p", "prefill")], one)) == (None, "p")
    assert names(choose([worker("d", "decode")], one)) == ("d", None)


def test_busy_workers_are_passed_over_and_all_busy_is_said() -> None:
    workers = [worker("d1", "decode"), worker("d2", "decode", assigned=1), worker("p", "prefill")]
    assert names(choose(workers, NEEDS, busy={"d1"})) == ("d2", "p")
    for busy in ({"d1", "d2"}, {"p"}):
        route = choose(workers, NEEDS, busy=busy)
        assert isinstance(route, NoRoute)
        assert route.all_busy


def test_after_a_failure_another_prefill_worker_and_then_none() -> None:
    workers = [worker("d", "decode"), worker("p1", "prefill"), worker("p2", "prefill", assigned=5)]
    assert names(choose(workers, NEEDS, avoid={"p1"})) == ("d", "p2")
    assert names(choose(workers, NEEDS, avoid={"p1", "p2"})) == ("d", None)


def test_a_decode_worker_that_failed_is_used_again_when_there_is_no_other() -> None:
    workers = [worker("d1", "decode"), worker("d2", "decode", assigned=5)]
    assert names(choose(workers, NEEDS, avoid={"d1"})) == ("d2", None)
    assert names(choose(workers[:1], NEEDS, avoid={"d1"})) == ("d1", None)


def test_without_a_decode_side_there_is_no_route() -> None:
    route = choose([worker("p", "prefill")], NEEDS)
    assert isinstance(route, NoRoute)
    assert not route.all_busy


def test_the_longest_request_is_what_some_decode_side_holds() -> None:
    workers = [
        worker("p", "prefill"),
        worker("d", "decode", capacity_tokens=50),
        worker("b", "both", capacity_tokens=70),
    ]
    assert longest_request(workers) == 70
    assert longest_request(workers[:1]) == 0


def test_a_stream_moves_to_the_least_loaded_worker_that_can_take_its_kv() -> None:
    leaving = worker("d1", "decode")
    others = [
        leaving,
        worker("p1", "prefill"),
        worker("d2", "decode", num_requests=2),
        worker("d3", "both", num_requests=1),
        worker("d4", "decode", capacity_tokens=150),
        worker("d5", "decode", dtype="bfloat16"),
    ]
    taken = choose_successor(others, NEEDS, leaving)
    assert taken is not None
    assert taken.info.incarnation == "d3"
    taken = choose_successor(others, NEEDS, leaving, busy={"d3"})
    assert taken is not None
    assert taken.info.incarnation == "d2"
    assert choose_successor(others, NEEDS, leaving, busy={"d2", "d3"}) is None


def test_a_worker_that_has_the_prompt_already_is_asked_first_while_it_has_room() -> None:
    workers = [worker("d1", "decode", assigned=5), worker("d2", "decode"), worker("p", "prefill")]
    near = replace(NEEDS, near="d1")
    assert names(choose(workers, NEEDS)) == ("d2", "p")
    assert names(choose(workers, near)) == ("d1", "p")
    assert names(choose(workers, near, busy={"d1"})) == ("d2", "p")
    assert names(choose(workers, near, avoid={"d1"})) == ("d2", "p")
