"""Run the shipped model under the real `lm_eval`, offline, on tasks made here; `make harness` starts this.

The test suite leaves it out, because lm_eval needs datasets, pyarrow and scikit-learn.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}

KEYS = (48213, 90175, 33442)
QUESTION = "{{text}}\n\nWhat is the pass key? The pass key is"


def main() -> int:
    """Return 0 if the model generates every key, and rates it likelier than a wrong key; otherwise 1."""
    import lm_eval

    import tessera
    from tessera.core.files import DEMO_MODEL
    from tessera.measure.judge.harness import adapter

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.jsonl"
        filler = "".join(f"line {i} of filler.\n" for i in range(20))
        rows = [
            {"text": f"{filler}The pass key is {k}. Remember it.\n{filler}", "key": str(k), "wrong": str(k + 11111)}
            for k in KEYS
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}
        answers = {
            "task": "keys_answered",
            "output_type": "generate_until",
            "doc_to_text": QUESTION,
            "doc_to_target": " {{key}}",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 8},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        }
        choices = {
            "task": "keys_chosen",
            "output_type": "multiple_choice",
            "doc_to_text": QUESTION,
            "doc_to_choice": "{{[key, wrong]}}",
            "doc_to_target": 0,
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        model = tessera.load(str(DEMO_MODEL), attention="kascade")
        tasks = [task | data for task in (answers, choices)]
        found = lm_eval.simple_evaluate(adapter(model), tasks=tasks, log_samples=False)["results"]
    scores = found["keys_answered"]["exact_match,none"], found["keys_chosen"]["acc,none"]
    print(f"answered {scores[0]:.0%}, chosen {scores[1]:.0%} of {len(KEYS)} keys")
    return 0 if scores == (1.0, 1.0) else 1


if __name__ == "__main__":
    sys.exit(main())
