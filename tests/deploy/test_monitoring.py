"""Dashboard, alerts and scraping name metrics, labels and files that exist."""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import grafana_foundation_sdk.models.dashboard as grafana
import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from kubernetes_checks import DEPLOY, ROOT, Manifest

DASHBOARD = json.loads((DEPLOY / "grafana" / "pagefleet.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
VARIABLES = [v for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
_SERIES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_ROW = re.compile(r"^\| `(pagefleet_\w+)` \| (\w+) \| (.*?) \|")


@cache
def metrics() -> dict[str, set[str]]:
    """Every series of a gateway with its labels, from the list that a test holds to the code."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / "cluster" / "METRICS.md").read_text().splitlines():
        row = _ROW.match(line)
        if row is None:
            continue
        name, kind, labels = row.groups()
        known = set(re.findall(r"`(\w+)`", labels))
        if "Replicas" in _section(line):
            known |= {"model_name", "replica"}
        for suffix in _SERIES[kind]:
            found[name + suffix] = known | ({"le"} if suffix == "_bucket" else set())
    return found


def _section(line: str) -> str:
    text = (ROOT / "cluster" / "METRICS.md").read_text()
    return text[: text.index(line)].rpartition("\n## ")[2].partition("\n")[0]


def parsed(query: str) -> Any:
    return promql_parser.parse(query.replace("$__rate_interval", "5m"))


def selectors(node: Any) -> Iterator[Any]:
    """Every selector of a parsed query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "args", "param", "vector_selector"):
        inner = getattr(node, name, None)
        for part in inner if isinstance(inner, list) else [inner]:
            if isinstance(part, promql_parser.Expr):
                yield from selectors(part)


def grouped_by(query: str) -> set[str]:
    return {
        label.strip()
        for labels in re.findall(r"\bby \(([^)]*)\)", query)
        for label in labels.split(",")
    }


def check(query: str) -> None:
    found = list(selectors(parsed(query)))
    assert found, query
    known: set[str] = set()
    for selector in found:
        assert selector.name in metrics(), f"{selector.name} is no metric of ours"
        labels = metrics()[selector.name]
        known |= labels
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels, f"{selector.name} has no label {matcher.name}"
    assert grouped_by(query) <= known, query


@pytest.mark.parametrize("query", QUERIES)
def test_a_panel_asks_for_what_there_is(query: str):
    check(query)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_watches_what_there_is(rule: Manifest):
    check(rule["expr"])
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
    assert used <= grouped_by(rule["expr"])


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable["name"])
def test_a_variable_has_values(variable: Manifest):
    query, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]).groups()
    check(query)
    assert label in metrics()[query.partition("{")[0]]


@pytest.mark.parametrize(
    "wrong",
    ["rate(pagefleet_nothing[5m])", 'pagefleet_kv_blocks{colour="red"}', "sum by (x) (up)"],
)
def test_a_wrong_query_is_found(wrong: str):
    with pytest.raises(AssertionError):
        check(wrong)


def test_what_every_gateway_tells_is_not_added_up_over_them():
    """The controller's figures: one of them is taken first, whatever comes after it."""
    theirs = r"pagefleet_(?:kv_\w+|num_\w+|queue\w+|lease\w+|blocks_\w+|replica_\w+|steps_total)"
    for query in QUERIES + [rule["expr"] for rule in RULES]:
        for found in re.finditer(theirs, query):
            inner = re.findall(r"\b(sum|max|count)\b", query[: found.start()])
            assert inner and inner[-1] == "max", query


def test_grafana_loads_it_and_loses_nothing():
    """Its own classes drop what they do not know."""
    model = grafana.Dashboard.from_json(DASHBOARD)
    assert list(lost(DASHBOARD, json.loads(JSONEncoder().encode(model)))) == []


def lost(written: Any, read: Any, path: str = "") -> Iterator[str]:
    """What was written and is not read; defaults may come on top."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            yield from lost(value, read.get(key), f"{path}.{key}")
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for number, pair in enumerate(zip(written, read, strict=True)):
            yield from lost(*pair, f"{path}.{number}")
    elif written != read:
        yield path


def test_panels_stand_side_by_side():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells


def test_legends_name_labels_that_are_left():
    for panel in PANELS:
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert shown <= grouped_by(target["expr"]), target


def test_both_forms_of_the_alerts_are_one():
    wrapped = yaml.safe_load((DEPLOY / "prometheus" / "prometheusrule.yaml").read_text())
    assert wrapped["spec"] == ALERTS


def test_prometheus_reads_the_alerts_beside_it():
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    for file in config["rule_files"]:
        assert (DEPLOY / "prometheus" / file).is_file()
    paths = {job.get("metrics_path", "/metrics") for job in config["scrape_configs"]}
    assert paths == {"/metrics"}
