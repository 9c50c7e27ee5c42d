import json
import re

from benchmark_report import markdown_table
from run_all import FOLDER, KEPT, RESULTS, SECTIONS, choose, render

REPORT = {
    "benchmark": "engine, tiny",
    "machine": "A CPU, 2 cores",
    "command": "bench_engine.py --shape tiny",
    "load_before": 0.4,
    "rows": [
        {
            "case": "single",
            "metric": "ttft_ms",
            "ours": 12.345,
            "reference": None,
            "reference_name": "vLLM",
            "ratio": None,
        },
        {
            "case": "batch32",
            "metric": "tokens_per_s",
            "ours": 2890.4,
            "reference": 1445.2,
            "reference_name": "vLLM",
            "ratio": 2.0,
        },
    ],
}


def test_a_table_says_how_it_was_made():
    table = markdown_table(REPORT)
    assert table.startswith(
        "`bench_engine.py --shape tiny`, A CPU, 2 cores, load average 0.4 before it began.\n"
    )
    assert "| single | ttft_ms | 12.3 | - | - | vLLM |\n" in table
    assert "| batch32 | tokens_per_s | 2,890 | 1,445 | 2 | vLLM |\n" in table


def test_only_what_stands_between_the_marks_is_replaced():
    one, two = "<!-- table: one -->\n", "<!-- table: two -->\n"
    text = f"before\n{one}old\n<!-- end -->\nbetween\n{two}<!-- end -->\n"
    text = render(text, "one", "new\n")
    assert text == f"before\n{one}new\n<!-- end -->\nbetween\n{two}<!-- end -->\n"
    assert render(text, "three", "nowhere\n") == text


def test_every_benchmark_has_a_section():
    scripts = {path.name for path in FOLDER.glob("bench_*.py")}
    assert {section.script for section in SECTIONS} == scripts


def test_a_quick_run_leaves_out_what_has_no_short_form():
    assert all(section.quick is not None for section in choose([], is_quick=True))
    assert len(choose([], is_quick=False)) == len(SECTIONS)


def test_no_table_in_results_was_written_by_hand():
    text = RESULTS.read_text(encoding="utf-8")
    names = re.findall(r"<!-- table: (.+) -->", text)
    assert set(names) <= {section.name for section in SECTIONS}
    for name in names:
        path = KEPT / f"{name}.json"
        table = ""
        if path.exists():
            table = markdown_table(json.loads(path.read_text(encoding="utf-8")))
        assert f"<!-- table: {name} -->\n{table}<!-- end -->\n" in text, f"run `run_all.py {name}`"
