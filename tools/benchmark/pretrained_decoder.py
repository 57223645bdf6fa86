"""Compares brt with transformers on a pretrained decoder: tokens per second of greedy generation
and of scoring a text, in one process, in float32.

    python tools/benchmark/pretrained_decoder.py --model=SmolLM2-135M --text=novel.txt

Both read the same files, and take turns, so that other work on the machine slows both down alike.
The script needs torch and transformers in addition to brt. Texts of generation fit into the window,
so both must write the same tokens, which the script checks.

For scoring, brt reads the text once, with the keys and values of the window carried from segment to
segment. transformers reads it in two ways: in pieces of the model's context that do not overlap,
where the first tokens of a piece see little context, and in pieces of twice the window of which the
second half counts, where every token sees at least the window.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from conditions import report
from flags import parser


class Result(NamedTuple):
    """The times of one task.

    Attributes:
      tokens: the number of tokens that were written or scored.
      seconds: the seconds of each round, by name of the program.
      notes: results to show, such as losses, by name of the program.
    """

    tokens: int
    seconds: dict[str, list[float]]
    notes: dict[str, str]


def take_turns(functions: dict[str, Callable[[], Any]], rounds: int) -> tuple[dict, dict]:
    """Runs all functions in each round; returns the seconds of each round, and the last results.

    An additional first round, in which programs are compiled, is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    results = {}
    for round_ in range(rounds + 1):
        for name, function in functions.items():
            begin = time.perf_counter()
            results[name] = function()
            if round_:
                seconds[name].append(time.perf_counter() - begin)
    return seconds, results


class Programs:
    """The same decoder in brt and in transformers."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        import brt

        torch.set_num_threads(args.threads)
        self.args, self.torch = args, torch
        self.theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
        self.ours = brt.load(args.model, bindings={"Model.window": args.window, "Window.sinks": 4})
        self.ids = np.asarray(self.ours.tokenizer.encode(args.text.read_text()), np.int32)

    def generation(self, texts: int) -> Result:
        """Measures greedy generation of `texts` texts at once, which continue the same prompt."""
        import jax

        from brt.config import Sampling
        from brt.generation.session import Session

        count, prompt = self.args.tokens, self.ids[: self.args.prompt]
        bos = self.ours.tokenizer.bos_id
        session = Session(
            self.ours.config, self.ours._saved.variables, bos_id=bos, lanes=texts,
            known_ids=self.ours.tokenizer.vocab_size,
        )  # fmt: skip
        inputs = self.torch.tensor(
            np.tile(np.append(bos, prompt), (texts, 1)), dtype=self.torch.long
        )

        def ours() -> np.ndarray:
            session.forget()
            session.read(prompt)
            pieces = session.write(count, Sampling(temperature=0.0), jax.random.key(0))
            return np.concatenate(list(pieces), axis=1)

        def theirs() -> np.ndarray:
            with self.torch.inference_mode():
                written = self.theirs.generate(
                    inputs, attention_mask=self.torch.ones_like(inputs), do_sample=False,
                    max_new_tokens=count, pad_token_id=0,
                )  # fmt: skip
            return written[:, inputs.shape[1] :].numpy()

        seconds, written = take_turns({"brt": ours, "transformers": theirs}, self.args.rounds)
        size = min(x.shape[1] for x in written.values())
        same = np.array_equal(written["brt"][:, :size], written["transformers"][:, :size])
        notes = {"brt": "the same tokens" if same else "OTHER TOKENS", "transformers": ""}
        return Result(texts * size, seconds, notes)

    def different(self, texts: int) -> Result:
        """Measures greedy generation after prompts of half to twice as many tokens as --prompt."""
        from brt.data.tokenizers import StreamDecoder

        count, tokenizer = self.args.tokens, self.ours.tokenizer
        lengths = np.linspace(self.args.prompt // 2, 2 * self.args.prompt, texts).astype(int)
        pieces = np.split(self.ids, np.cumsum(lengths))[:texts]
        prompts = [tokenizer.decode_bytes(piece).decode() for piece in pieces]
        how = {"max_tokens": count, "temperature": 0.0}
        rows = [[tokenizer.bos_id, *tokenizer.encode(prompt)] for prompt in prompts]
        padded = np.zeros((2, texts, max(map(len, rows))), np.int64)  # ids, and the mask of tokens
        for i, row in enumerate(rows):
            padded[:, i, -len(row) :] = row, np.ones(len(row))
        ids, mask = self.torch.tensor(padded)

        end_ids, tokens = self.ours.config.model.end_ids, [0] * texts

        def theirs() -> list[str]:
            with self.torch.inference_mode():
                written = self.theirs.generate(
                    ids, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=0
                )
            new = written[:, ids.shape[1] :].numpy()
            # A column of True follows, so that every text has an end.
            ends = np.argmax(np.c_[np.isin(new, end_ids), np.ones(texts, bool)], axis=1)
            tokens[:] = ends.tolist()
            return [StreamDecoder(tokenizer).decode(row[: ends[i]]) for i, row in enumerate(new)]

        functions = {
            "brt": lambda: self.ours.generate(prompts, **how),
            "brt, one after another": lambda: [self.ours.generate(p, **how) for p in prompts],
            "transformers": theirs,
        }
        seconds, found = take_turns(functions, self.args.rounds)
        same = {
            name: sum(a == b for a, b in zip(found["brt"], other, strict=True))
            for name, other in found.items()
        }
        notes = {name: f"{number} of {texts} texts are the same" for name, number in same.items()}
        return Result(sum(tokens), seconds, notes | {"brt": ""})

    def scoring(self) -> Result:
        """Measures the scoring of a text."""
        ids = self.ids[: self.args.scored]

        def ours() -> float:
            return float(np.mean(self.ours.token_bits(ids)))

        def pieces(size: int, stride: int) -> float:
            """Returns the mean bits of pieces of `size` tokens, whose last `stride` count."""
            bits, torch = [], self.torch
            bos = self.ours.tokenizer.bos_id
            text = torch.tensor(np.append(bos, ids), dtype=torch.long)
            for end in range(min(size, len(ids)), len(ids) + stride, stride):
                end = min(end, len(ids))
                begin = max(0, end - size)
                with torch.inference_mode():
                    logits = self.theirs(text[None, begin:end]).logits[0]
                own = torch.nn.functional.cross_entropy(
                    logits, text[begin + 1 : end + 1], reduction="none"
                )
                bits.append(own[-(end - sum(map(len, bits))) :])
                if end == len(ids):
                    break
            return float(torch.cat(bits).mean()) / math.log(2)

        window, context = self.args.window, self.theirs.config.max_position_embeddings
        functions = {
            "brt": ours,
            f"transformers, pieces of {context}": lambda: pieces(context, context),
            f"transformers, pieces of {2 * window}": lambda: pieces(2 * window, window),
        }
        seconds, found = take_turns(functions, self.args.rounds)
        return Result(len(ids), seconds, {k: f"{v:.4f} bits per token" for k, v in found.items()})


def show(title: str, result: Result) -> dict[str, Any]:
    """Prints the table of a task; returns its figures."""
    print(f"\n{title}\n| program | tokens per second | brt is faster by | |\n|---|---|---|---|")
    found = {}
    for name, own in result.seconds.items():
        ratios = [a / b for a, b in zip(own, result.seconds["brt"], strict=True)]
        rate, ratio = result.tokens / statistics.median(own), statistics.median(ratios)
        found[name] = {"tokens_per_second": rate, "ratio": ratio, "note": result.notes[name]}
        print(f"| {name} | {rate:,.1f} | {ratio:.2f} | {result.notes[name]} |")
    return found


def main() -> None:
    flags = parser(
        __doc__, window=512, prompt=(64, "tokens of the prompt"), tokens=(128, "to generate"),
        scored=(16384, "tokens of the text to score"), rounds=3,
        threads=(os.cpu_count(), "threads of torch"), different=(16, "prompts of different texts"),
    )  # fmt: skip
    flags.add_argument("--model", required=True, help="a directory in Hugging Face's format")
    flags.add_argument("--text", type=Path, required=True, help="the text to continue and to score")
    flags.add_argument("--texts", type=int, nargs="*", default=[1, 16], help="texts at once")
    args = flags.parse_args()
    programs = Programs(args)
    found = {}
    for texts in args.texts:
        title = f"greedy generation, {texts} at once, {args.tokens} tokens after {args.prompt}"
        found[title] = show(title, programs.generation(texts))
    title = f"greedy generation after {args.different} different prompts, {args.tokens} tokens"
    found[title] = show(title, programs.different(args.different))
    title = f"scoring {min(args.scored, len(programs.ids)):,} tokens, window {args.window}"
    found[title] = show(title, programs.scoring())
    report(args, found, {args.model: programs.ours.config.model})


if __name__ == "__main__":
    main()
