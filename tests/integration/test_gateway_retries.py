"""A worker fails a request at each point of its life: the answer is whole all the same, and shows no seam."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from services.protocol import Failure
from tests.support.stub_system import StubSystem, stub_system
from tests.support.stub_worker import Behaviour
from tests.support.text_model import make_text_model

TEXT = "naïve 漢字 answers go on where they stood"


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubSystem]:
    model = make_text_model(tmp_path_factory.mktemp("model") / "m")
    with stub_system(model, ["prefill", "prefill", "decode", "decode"], recovery_wait_s=8.0) as system:
        yield system


@pytest.fixture(autouse=True)
def whole_again(stubs: StubSystem) -> Iterator[None]:
    stubs.says(TEXT)
    yield
    for worker in stubs.workers:
        worker.plan.clear()
        worker.calls.clear()
        worker.state = "ready"
    stubs.assert_idle()
    stubs.wait(lambda: len(stubs.gateway.cluster.workers()) == 4, "every worker is usable again")


def failure(kind: Any) -> Failure:
    return Failure(message=f"{kind} as planned", kind=kind)


def all_of(stubs: StubSystem, role: Any, behaviour: Behaviour) -> None:
    """The first call that any worker of this role gets."""
    for worker in stubs.of_role(role):
        worker.plan.append(behaviour)


def shown(stubs: StubSystem, **fields: Any) -> str:
    """The streamed text, checked to be one clean stream."""
    stream = stubs.client.completions.create(
        model="stub", prompt="a b c", stream=True, **({"max_tokens": 200} | fields)
    )
    choices = [chunk.choices[0] for chunk in stream]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    return "".join(choice.text for choice in choices)


PREFILL_FAILURES = {
    "answers 503": Behaviour(status=503),
    "reset before it answers": Behaviour(reset_before_answer=True),
    "says unavailable": Behaviour(fail_after=(0, failure("unavailable"))),
    "says internal": Behaviour(fail_after=(0, failure("internal"))),
    "cut before the first token": Behaviour(cut_after=0),
}


@pytest.mark.parametrize("name", PREFILL_FAILURES)
def test_a_prefill_worker_that_fails_is_replaced_by_the_other(stubs: StubSystem, name: str) -> None:
    first = stubs.of_role("prefill")[0]
    # Twice, because a connection that breaks before any answer may only have been stale: it costs no attempt.
    first.plan.extend([PREFILL_FAILURES[name]] * 2)
    assert shown(stubs) == TEXT
    (call,) = stubs.of_role("prefill")[1].calls
    assert call.request.handoff is not None
    assert call.request.handoff.attempt == 2


def test_when_every_prefill_worker_fails_decode_computes_the_prompt(stubs: StubSystem) -> None:
    all_of(stubs, "prefill", Behaviour(cut_after=0))
    assert shown(stubs) == TEXT
    last = [call for worker in stubs.of_role("decode") for call in worker.calls if call.ended == "finished"]
    assert [call.request.handoff for call in last] == [None]


def test_a_transfer_that_decode_gives_up_on_is_tried_from_elsewhere(stubs: StubSystem) -> None:
    """Prefill has shown the first token; the rest comes from another pair without a break."""
    all_of(stubs, "decode", Behaviour(fail_after=(0, failure("transfer"))))
    assert shown(stubs) == TEXT
    used = [worker for worker in stubs.of_role("prefill") if worker.calls]
    assert len(used) == 2, "not the sender that failed"


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("how", ["cut", "internal", "unavailable"])
def test_a_decode_worker_that_fails_in_mid_stream_leaves_no_seam(stubs: StubSystem, num_tokens: int, how: Any) -> None:
    """Whatever the client has been given is neither repeated nor lost, half a character included."""
    behaviour = Behaviour(cut_after=num_tokens) if how == "cut" else Behaviour(fail_after=(num_tokens, failure(how)))
    first, second = stubs.of_role("decode")
    first.plan.append(behaviour)
    assert shown(stubs) == TEXT
    (again,) = second.calls
    given = again.request.work.output_token_ids
    assert given == second.output[: len(given)]
    # What prefill and decode say at the same moment may come in either order.
    assert len(given) in ((0, 1) if num_tokens == 0 else (num_tokens,))
    assert again.request.work.sampling == first.calls[0].request.work.sampling
    assert again.request.work.request_id != first.calls[0].request.work.request_id


def test_the_deadline_covers_all_attempts(stubs: StubSystem) -> None:
    first, second = stubs.of_role("decode")
    first.plan.append(Behaviour(cut_after=3))
    shown(stubs)
    assert second.calls[0].request.work.deadline_s < first.calls[0].request.work.deadline_s


def test_a_worker_that_dies_after_the_last_token_changes_nothing(stubs: StubSystem) -> None:
    for fields, ends in (({"max_tokens": 4}, "length"), ({"max_tokens": 200}, "stop")):
        all_of(stubs, "decode", Behaviour(lose_finish=True))
        answer = stubs.complete(**fields).json()["choices"][0]
        assert answer["finish_reason"] == ends
        assert TEXT.startswith(answer["text"])
        assert sum(len(worker.calls) for worker in stubs.of_role("decode")) == 1
        for worker in stubs.workers:
            worker.plan.clear()
            worker.calls.clear()


def test_one_token_left_after_a_failure_is_prefills_alone(stubs: StubSystem) -> None:
    stubs.of_role("decode")[0].plan.append(Behaviour(cut_after=3))
    answer = stubs.complete(max_tokens=4).json()
    assert answer["usage"]["completion_tokens"] == 4
    last = [call for worker in stubs.of_role("prefill") for call in worker.calls if call.request.handoff is None]
    assert len(last) == 1
    assert len(last[0].request.work.output_token_ids) == 3


def test_what_is_invalid_is_not_tried_again(stubs: StubSystem) -> None:
    refusal = Failure(message="never", kind="invalid", param="logit_bias")
    all_of(stubs, "decode", Behaviour(fail_after=(0, refusal), accept=True))
    response = stubs.complete()
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")
    assert sum(len(worker.calls) for worker in stubs.workers) == 1
    assert len(stubs.gateway.cluster.workers()) == 4, "and nobody is suspected for it"


def test_a_field_that_the_gateway_made_up_is_not_the_clients_fault(stubs: StubSystem) -> None:
    refusal = Failure(message="in use", kind="invalid", param="request_id")
    stubs.of_role("prefill")[0].plan.append(Behaviour(fail_after=(0, refusal)))
    assert shown(stubs) == TEXT


def test_a_deadline_that_passes_on_a_worker_is_a_504(stubs: StubSystem) -> None:
    all_of(stubs, "decode", Behaviour(fail_after=(0, failure("deadline")), accept=True))
    response = stubs.complete()
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_attempts_are_bounded_and_the_client_is_told(stubs: StubSystem) -> None:
    for _ in range(5):
        all_of(stubs, "decode", Behaviour(fail_after=(0, failure("internal")), accept=True))
    response = stubs.complete()
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert sum(len(worker.calls) for worker in stubs.of_role("decode")) == 3
    assert len(stubs.record(response)["attempts"]) == 3


def test_after_the_first_byte_a_failure_of_all_attempts_is_an_event(stubs: StubSystem) -> None:
    for _ in range(5):
        all_of(stubs, "decode", Behaviour(fail_after=(2, failure("internal"))))
    response = stubs.complete(max_tokens=200, stream=True)
    assert response.status_code == 200
    assert '"error"' in response.text
    assert "[DONE]" not in response.text
    assert '"finish_reason":"' not in response.text


def test_a_worker_that_is_stopping_sends_nobody_away(stubs: StubSystem) -> None:
    """It says so before the gateway has looked again."""
    stubs.of_role("decode")[0].plan.append(Behaviour(busy=True))
    stubs.of_role("prefill")[0].plan.append(Behaviour(busy=True))
    assert shown(stubs) == TEXT


def test_a_worker_that_was_restarted_is_taken_back(stubs: StubSystem) -> None:
    decode = stubs.of_role("decode")[0]
    server = stubs.servers[stubs.workers.index(decode)]
    stubs.thread.run(server.stop())
    assert shown(stubs) == TEXT
    decode.incarnation = "another life"
    stubs.thread.run(server.start())
    stubs.wait(lambda: any(w.info.incarnation == "another life" for w in stubs.gateway.cluster.workers()), "it is back")
    stubs.of_role("decode")[1].state = "draining"
    stubs.wait(lambda: len(stubs.gateway.cluster.workers()) == 3, "the other one is out")
    assert shown(stubs) == TEXT


def test_a_request_in_flight_outlives_the_only_decode_worker(stubs: StubSystem) -> None:
    """It waits for the restart, then goes on where it stood."""
    first, second = stubs.of_role("decode")
    second.state = "draining"
    stubs.wait(lambda: len(stubs.gateway.cluster.workers()) == 3, "one decode worker is left")
    server = stubs.servers[stubs.workers.index(first)]

    async def dies() -> None:
        if first.calls[-1].num_tokens == 4:
            await server.stop()

    async def restart() -> None:
        first.incarnation += "+"
        await server.start()

    first.plan.append(Behaviour(cut_after=4))
    stubs.of_role("decode")[0].plan.append(Behaviour())
    assert shown(stubs) == TEXT
