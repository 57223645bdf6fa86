"""Records the texts that Hugging Face's `generate` writes with the models in
tests/data/huggingface.

    python tests/interop/huggingface/record_generation.py

The script needs torch and transformers (recorded with torch 2.13.0 and transformers 5.23.0).
"""

import json
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parents[2] / "data/huggingface"
MODELS = {"t5": "T5", "t5_gated": "T5", "bart": "Bart"}
CASES = (
    {"beams": 1, "max_length": 12},
    {"beams": 1, "max_length": 12, "no_repeat_ngram": 2, "min_length": 8},
    {"beams": 4, "max_length": 12},
    {"beams": 4, "max_length": 14, "length_penalty": 2.0, "no_repeat_ngram": 3, "min_length": 6},
    {"beams": 3, "max_length": 10, "early_stopping": "heuristic", "length_penalty": 0.6},
    {"beams": 2, "max_length": 10, "early_stopping": "never", "length_penalty": -0.5},
)
EARLY_STOPPING = {"yes": True, "heuristic": False, "never": "never"}


def main():
    import torch
    import transformers

    found = {"cases": json.dumps(CASES)}
    for name, family in MODELS.items():
        kind = getattr(transformers, f"{family}ForConditionalGeneration")
        model = kind.from_pretrained(DATA / name).eval()
        with np.load(DATA / name / "expected.npz") as stored:
            expected = dict(stored)
        source, mask = (torch.tensor(expected[k]).long() for k in ("source", "mask"))
        for number, case in enumerate(CASES):
            beams = case["beams"]
            out = model.generate(
                source, attention_mask=mask, do_sample=False, num_beams=beams,
                num_return_sequences=beams, max_length=case["max_length"],
                min_length=case.get("min_length", 0),
                length_penalty=case.get("length_penalty", 1.0) if beams > 1 else None,
                early_stopping=EARLY_STOPPING[case.get("early_stopping", "yes")] if beams > 1
                else None,
                no_repeat_ngram_size=case.get("no_repeat_ngram", 0),
                return_dict_in_generate=True, output_scores=True,
                # The cache of `generate` would have as many layers as the encoder.
                use_cache=False,
            )  # fmt: skip
            sequences = out.sequences.numpy().reshape(len(source), beams, -1)
            found[f"{name}/{number}/sequences"] = sequences.astype(np.int8)
            if beams > 1:
                found[f"{name}/{number}/scores"] = out.sequences_scores.numpy().reshape(-1, beams)
    np.savez_compressed(DATA / "generation.npz", **found)


if __name__ == "__main__":
    main()
