"""What a key may use, over a clock of the test's own."""

from __future__ import annotations

import pytest

from services.gateway.tenants.limits import Limits, Meter, duration


def test_requests_of_a_minute_then_one_for_each_share_of_it() -> None:
    meter = Meter(Limits(requests_per_minute=6))
    assert [meter.begin(0.0) for _ in range(6)] == [None] * 6
    refused = meter.begin(0.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(10)
    assert meter.begin(9.9) is not None
    assert meter.begin(10.0) is None
    assert meter.begin(10.0) is not None
    assert [meter.begin(1e6) for _ in range(7)].count(None) == 6, "no more than a minute's worth is saved up"


def test_a_refused_request_costs_nothing() -> None:
    meter = Meter(Limits(requests_per_minute=60, concurrent=1))
    assert meter.begin(0.0) is None
    for _ in range(100):
        assert meter.begin(0.0) is not None
    meter.end()
    assert meter.begin(0.0) is None
    assert meter.headers(0.0)["x-ratelimit-remaining-requests"] == "58"


def test_requests_at_a_time() -> None:
    meter = Meter(Limits(concurrent=2))
    assert [meter.begin(0.0), meter.begin(0.0)] == [None, None]
    assert meter.begin(0.0) is not None
    meter.end()
    assert meter.begin(0.0) is None


def test_output_is_paid_for_afterwards() -> None:
    meter = Meter(Limits(tokens_per_minute=100))
    assert meter.begin(0.0) is None
    assert meter.take_prompt(60, 0.0) is None
    meter.take_output(70, 0.0)
    refused = meter.begin(0.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(31 * 0.6)
    assert meter.begin(31 * 0.6 + 0.001) is None
    assert meter.take_prompt(50, 31 * 0.6 + 0.001) is not None


def test_a_prompt_beyond_a_minutes_worth_waits_for_a_full_bucket() -> None:
    meter = Meter(Limits(tokens_per_minute=100))
    assert meter.take_prompt(500, 0.0) is None
    assert meter.take_prompt(500, 60.0) is not None
    assert meter.take_prompt(500, 60.0 * 6) is None


def test_without_limits_nothing_is_refused_or_told() -> None:
    meter = Meter(Limits())
    for _ in range(1000):
        assert meter.begin(0.0) is None
        assert meter.take_prompt(10**9, 0.0) is None
    assert meter.headers(0.0) == {}


def test_what_is_left_is_told_as_openai_does() -> None:
    meter = Meter(Limits(requests_per_minute=60, tokens_per_minute=6000))
    meter.begin(0.0)
    meter.take_prompt(100, 0.0)
    assert meter.headers(0.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5900",
        "x-ratelimit-reset-tokens": "1s",
    }
    assert [duration(seconds) for seconds in (0, 0.0123, 1.5, 90, 360)] == ["0ms", "13ms", "2s", "1m30s", "6m0s"]
