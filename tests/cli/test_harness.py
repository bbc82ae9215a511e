"""`lohan eval --tasks` against the harness's own model class on the same folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import transformers as hf

from tests.support.model_folders import save_tokenizer
from tests.support.training_runs import assert_refused

TASKS = {
    "colour_choice": """
task: colour_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: ["red", "green", "dark blue"]
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "colour_text": """
task: colour_text
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{question}} and then some more of it, so that there are windows"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "colour_answer": """
task: colour_answer
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    import torch

    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=260,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.5,
            bos_token_id=259,
            eos_token_id=257,
            pad_token_id=258,
        )
    )
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model", bos=True)
    rows = [
        {"question": f"what colour is thing {n}?", "label": n % 3, "answer": "x"} for n in range(9)
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "tasks").mkdir()
    for name, text in TASKS.items():
        text = text.replace("DATA", str(folder / "data.jsonl"))
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    return folder


def test_results_equal_those_of_the_harness(lohan, place, monkeypatch):
    """Every metric of tasks of all three kinds, to rounding."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expected = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(place / "model"), "max_length": 47, "dtype": "float32"},
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(place / "tasks")),
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
    )["results"]
    words = (
        "--tasks",
        ",".join(TASKS),
        "--tasks-dir",
        place / "tasks",
        "--host",
        "64MiB",
        "--batch",
        4,
        "--seq",
        48,
        "--ssd",
        place,
        "--json",
    )
    ended = lohan("eval", place / "model", *words)
    assert ended.code == 0, ended
    actual = json.loads(ended.out)
    assert actual.keys() == set(TASKS)
    for task, metrics in actual.items():
        scores = {k: v for k, v in expected[task].items() if "stderr" not in k}
        scores = {k.removesuffix(",none"): v for k, v in scores.items() if isinstance(v, float)}
        assert metrics == pytest.approx(scores, rel=1e-4), task
    assert {"acc", "acc_norm"} <= actual["colour_choice"].keys()


@pytest.fixture
def without_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)


def test_rejects_combinations_of_options_without_a_meaning(lohan, place, without_harness):
    words = ("eval", place / "model", "--host", "64MiB")
    assert_refused(lohan(*words), "--data or --tasks")
    assert_refused(
        lohan(*words, "--tasks", "a", "--data", place / "data.jsonl"), "give one of them"
    )
    assert_refused(lohan(*words, "--tasks", "a"), r"pip install 'lohan\[eval\]'")
    assert_refused(
        lohan(*words, "--data", place / "data.jsonl", "--limit", 3), "--limit goes with --tasks"
    )
