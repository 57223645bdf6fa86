"""What is looked at while a model trains: figures on held-out data, samples, its inner state."""

from brt.training.looks.protocol import Looks
from brt.training.run import Run
from brt.training.workdir import Workdir


def build(run: Run, workdir: Workdir) -> Looks:
    """The looks that fit the run's objective."""
    if run.config.training.objective == "seq2seq":
        from brt.training.looks import seq2seq

        return seq2seq.Looks(run, workdir)
    if run.config.training.objective == "masked_language_modeling":
        from brt.training.looks import masked_language_modeling

        return masked_language_modeling.Looks(run)
    if run.config.training.objective == "ctc":
        from brt.training.looks import ctc

        return ctc.Looks(run, workdir)
    if run.config.training.objective in ("classification", "regression", "spans"):
        from brt.training.looks import heads

        return heads.Looks(run, workdir)
    from brt.training.looks import language_modeling

    return language_modeling.Looks(run)
