"""An example of a task in a user's file: the parity of rows of Training.segment_length bits."""

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import brt
from brt.data.preparation import Corpus
from brt.data.readers import RowReader, padded
from brt.data.tokenizers import ByteTokenizer
from brt.generation.search import choose
from brt.tasks.arguments import UNCONTROLLED
from brt.tasks.interface import Aux, LossInputs, Task
from brt.tasks.report import EvaluationResult, Metric
from brt.tasks.writers import Writer
from brt.types import TextBatch


class Store(list):
    fingerprint, lengths = "bits", property(lambda rows: np.array([len(row) for row in rows]))


class Reader(RowReader):
    def gather(self, rows, length):
        bits, valid = padded(rows, self.store.__getitem__, length, np.int32)
        return TextBatch(bits, valid, bits.sum(axis=1, keepdims=True) % 2, valid[:, :1], rows)


class Evaluator(NamedTuple):
    task: Task
    config: object
    batch: TextBatch
    total, unit, partial = 256, "row", False

    def __call__(self, variables, control=UNCONTROLLED, *, whole=True):
        _, aux = self.task.loss(self.config, variables.params, LossInputs(self.batch))
        metrics = {"bits_per_row": float(aux.nats / aux.count / np.log(2))}
        return None if control.stop() else EvaluationResult(metrics, f"{metrics}", {}, "parity")

    def sample(self, variables, step, control=UNCONTROLLED):
        return str(np.argmax(self.task.predict(self.config, variables.params, self.batch), axis=-1))


class Parity(Task):
    name, sections, model, data, generates_text = "parity", (), "model", "data", True
    metrics = table_metrics = (Metric("bits_per_row", "bits per row"),)

    def open(self, config, *, progress=True):
        draw, shape = np.random.default_rng(0).integers, (256, config.training.segment_length)
        splits = {x: Store(draw(0, 2, shape)) for x in ("train", "validation", "test")}
        return Corpus(Path(), ByteTokenizer(), splits)

    def reader(self, config, dataset, split="train"):
        return Reader(store=dataset.split(split), batch_size=config.training.batch_size)

    def initial_params(self, config, key):
        kernel = jax.random.normal(key, (config.training.segment_length, 32))
        return {"in": kernel, "out": jax.numpy.zeros((32, 2))}

    def predict(self, config, params, batch):
        return jax.numpy.cos(batch.tokens @ params["in"]) @ params["out"]

    def loss(self, config, params, inputs):
        batch = inputs.batch
        log_p = jax.nn.log_softmax(self.predict(config, params, batch)) * batch.scored
        nats = -jax.numpy.take_along_axis(log_p, batch.targets, axis=1).sum()
        return nats, Aux(nats, batch.scored.sum() * 1.0)

    def evaluator(self, request):
        rows = self.reader(request.config, request.dataset, request.split)
        return Evaluator(self, request.config, next(rows.one_epoch(256)))

    def writer(self, config, variables, tokenizer):
        def write(_, prompt, options):
            bits, key = np.array([[*map(int, prompt)]]), jax.random.key(options.seed or 0)
            logits = self.predict(config, variables.params, TextBatch(bits, *[None] * 4))
            yield f"{prompt}{choose(logits, key, options.sampling)[0]}"

        return type("ParityWriter", (Writer,), {"__call__": write})()


brt.register_task(Parity())
