"""/metrics under llama-server's names: each with its type and help, and the sums of what requests were answered."""

from prometheus_client.parser import text_string_to_metric_families

from tests.engine.serve.serving import serving

COUNTERS = {
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "prompt_seconds_total",
    "tokens_predicted_total",
    "tokens_predicted_seconds_total",
    "n_decode_total",
    "n_tokens_max",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_drafts_total",
}
GAUGES = {
    "prompt_tokens_seconds",
    "predicted_tokens_seconds",
    "requests_processing",
    "requests_deferred",
    "n_busy_slots_per_decode",
}


def test_llama_servers_names_have_types_help_and_the_sums_of_timings() -> None:
    with serving() as served, served.http() as client:
        timings = [
            client.post("/completion", json={"prompt": "abcd", "n_predict": count}).json()["timings"]
            for count in (1, 4, 8)
        ]
        answer = client.get("/metrics")
    assert int(answer.headers["process-start-time-unix"]) > 1_600_000_000
    kinds, values = {}, {}
    for line in answer.text.splitlines():
        if line.startswith("# TYPE llamacpp:"):
            name, kind = line.removeprefix("# TYPE llamacpp:").split()
            kinds[name] = kind
            assert f"# HELP llamacpp:{name} " in answer.text
        elif line.startswith("llamacpp:"):
            name, value = line.removeprefix("llamacpp:").split()
            values[name] = float(value)
    assert kinds == dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(GAUGES, "gauge")
    assert values.keys() == kinds.keys()
    assert values["prompt_tokens_total"] == sum(each["prompt_n"] for each in timings) == 12
    assert values["tokens_predicted_total"] == 13 and values["n_tokens_max"] == 12
    assert values["n_decode_total"] >= 13 and values["n_busy_slots_per_decode"] == 1
    assert values["requests_processing"] == values["requests_deferred"] == 0
    assert values["predicted_tokens_seconds"] > 0
    assert list(text_string_to_metric_families(answer.text))


def test_rates_are_those_since_the_last_reading() -> None:
    with serving() as served, served.http() as client:
        client.post("/completion", json={"prompt": "abcd", "n_predict": 4})
        first, second = (client.get("/metrics").text for _ in range(2))
    for name in ("predicted_tokens_seconds", "prompt_tokens_seconds"):
        assert f"llamacpp:{name} 0.0\n" not in first and f"llamacpp:{name} 0.0\n" in second
    assert "llamacpp:tokens_predicted_total 4\n" in second


def test_they_are_zero_before_the_first_request() -> None:
    with serving() as served, served.http() as client:
        text = client.get("/metrics").text
    assert "llamacpp:predicted_tokens_seconds 0.0" in text and "llamacpp:n_tokens_max 0\n" in text
