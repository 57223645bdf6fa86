"""Records the texts that Hugging Face's `generate` writes with a model made of tables.

    python tests/generation/record_beam_search.py tests/data/beam_search.npz

The script needs torch and transformers (recorded with torch 2.13.0 and transformers 5.23.0). The
logits of the next token are the sum, in this order, of three table entries: one for the source and
the last token, one for the token before the last, and one for the position. A search that confuses
beams or sources therefore writes other texts.
"""

import json
import sys

import numpy as np

SOURCES, VOCABULARY, LENGTH = 16, 24, 24
T5 = {"start": 0, "eos": 1, "pad": 0, "forced_bos": None, "forced_eos": None}
BART = {"start": 2, "eos": 2, "pad": 1, "forced_bos": 0, "forced_eos": 2}
EARLY_STOPPING = {"yes": True, "heuristic": False, "never": "never"}


def tables(rng):
    """Returns the tables as float32. The end token is likely enough that text lengths vary."""
    found = {
        "last": rng.normal(size=(SOURCES, VOCABULARY, VOCABULARY)) * 1.5,
        "before": rng.normal(size=(VOCABULARY, VOCABULARY)),
        "position": rng.normal(size=(LENGTH, VOCABULARY)) * 0.5,
    }
    found["position"][:, [T5["eos"], BART["eos"]]] += 1.5
    return {name: np.float16(table).astype(np.float32) for name, table in found.items()}


def cases():
    """Yields Decoding's fields and the special token ids: default values and random mixtures."""
    for beams, ids in ((1, T5), (1, BART), (4, BART), (6, T5)):
        yield {"beams": beams, "max_length": 14}, ids
    published = {"beams": 4, "length_penalty": 2.0, "no_repeat_ngram": 3, "early_stopping": "yes"}
    yield {**published, "min_length": 6, "max_length": 20}, T5
    yield {**published, "min_length": 10, "max_length": 16}, BART
    yield {"beams": 4, "max_length": 2}, BART  # The search ends with the first written token.
    yield {"beams": 6, "max_length": 3}, BART
    shorter = {"beams": 6, "max_length": 20, "length_penalty": -0.5}
    yield {**shorter, "early_stopping": "never"}, BART
    rng = np.random.default_rng(3)
    for i in range(15):
        yield (
            {
                "beams": int(rng.choice([2, 4, 6])),
                "length_penalty": float(rng.choice([-1.0, 0.0, 0.6, 1.0, 2.0])),
                "early_stopping": ("yes", "heuristic", "never")[i % 3],
                "max_length": int(rng.choice([6, 12, 20])),
                "min_length": int(rng.choice([0, 3, 5])),
                "no_repeat_ngram": int(rng.choice([0, 1, 2, 3])),
            },
            {**(T5, BART)[i % 2], "forced_eos": (None, (T5, BART)[i % 2]["eos"])[i // 2 % 2]},
        )
    yield {"beams": 1, "no_repeat_ngram": 2, "min_length": 8, "max_length": 20}, T5


def record(arrays):
    """Yields sequences (int [B, N, L]) and scores (float32 [B, N]) of `generate` for every case."""
    import torch
    from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

    class TableConfig(PretrainedConfig):
        model_type = "table"

    class TableModel(PreTrainedModel, GenerationMixin):
        config_class = TableConfig

        def __init__(self, config):
            super().__init__(config)
            self.anchor = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, source=None, **_):
            last, position = input_ids[:, -1], input_ids.shape[1] - 1
            before = input_ids[:, -2] if position else torch.zeros_like(last)
            logits = weights["last"][source, last] + weights["before"][before]
            return CausalLMOutput(logits=(logits + weights["position"][position])[:, None])

        def prepare_inputs_for_generation(self, input_ids, source=None, **_):
            return {"input_ids": input_ids, "source": source}

    weights = {name: torch.from_numpy(array) for name, array in arrays.items()}
    model = TableModel(TableConfig(vocab_size=VOCABULARY)).eval()
    for decoding, ids in cases():
        beams = decoding["beams"]
        written = model.generate(
            torch.full((SOURCES, 1), ids["start"]),
            source=torch.arange(SOURCES),
            generation_config=GenerationConfig(
                num_beams=beams,
                num_return_sequences=beams,
                length_penalty=decoding.get("length_penalty", 1.0),
                early_stopping=EARLY_STOPPING[decoding.get("early_stopping", "yes")],
                max_length=decoding["max_length"],
                min_length=decoding.get("min_length", 0),
                no_repeat_ngram_size=decoding.get("no_repeat_ngram", 0),
                eos_token_id=ids["eos"],
                pad_token_id=ids["pad"],
                forced_bos_token_id=ids["forced_bos"],
                forced_eos_token_id=ids["forced_eos"],
                do_sample=False,
                use_cache=False,
                return_dict_in_generate=True,
                output_scores=True,
            ),
        )
        sequences = written.sequences.reshape(SOURCES, beams, -1).numpy()
        scores = written.sequences_scores.numpy() if beams > 1 else np.full(SOURCES, np.nan)
        yield padded(sequences, decoding["max_length"], ids), scores.reshape(SOURCES, beams)


def padded(sequences, length, ids):
    """Pads sequences to one length, because `generate` repeats the end token if pad = 0."""
    full = np.full((*sequences.shape[:2], length), ids["pad"], np.int32)
    for index in np.ndindex(sequences.shape[:2]):
        ends = np.flatnonzero(sequences[index][1:] == ids["eos"])
        kept = sequences[index][: ends[0] + 2] if ends.size else sequences[index]
        full[index][: len(kept)] = kept
    return full


def main(path):
    arrays = tables(np.random.default_rng(0))
    found = {name: array.astype(np.float16) for name, array in arrays.items()}
    found["cases"] = np.array(json.dumps([{"decoding": d, "ids": ids} for d, ids in cases()]))
    for i, (sequences, scores) in enumerate(record(arrays)):
        found[f"sequences{i}"] = sequences.astype(np.uint8)
        found[f"scores{i}"] = scores.astype(np.float32)
    np.savez_compressed(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
