"""Numbers of a run for Weights & Biases and MLflow, where Logging asks for it.

A resumed run goes on in the same place of theirs, which `trackers.json` remembers.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from brt import untrusted
from brt.config import Config
from brt.config_io import saved_json
from brt.errors import CheckpointError, ConfigError
from brt.training.metrics import Tracker
from brt.training.workdir import Workdir, write_json

Warn = Callable[[str], object]
Numbers = Mapping[str, float | int | None]


class _Service:
    """What both have in common: nothing that fails there stops a run.

    Args:
      module: of the service.
      warn: told once, after which the service gets nothing more.
    """

    name: str  # of the module, and of brt's extra
    _begin: Callable[[Config, Workdir, str | None], str]
    _log: Callable[[int, Mapping[str, float | int]], None]
    _end: Callable[[], None]

    def __init__(self, module: ModuleType, warn: Warn):
        self._module, self._warn, self._on = module, warn, True

    def refuses(self) -> str:
        """The reason why this service could record nothing as it is set up here, or ''."""
        return ""

    def write(self, step: int, numbers: Numbers) -> None:
        """Of what is finite."""
        finite = {tag: value for tag, value in numbers.items() if value is not None}
        self._tolerated(lambda: self._log(step, finite))

    def close(self) -> None:
        """Ends the run there."""
        self._tolerated(self._end)

    def begin(self, config: Config, workdir: Workdir, known: str | None) -> str | None:
        """Opens a run, or goes on in the one that is `known`; returns its id."""
        return self._tolerated(lambda: self._begin(config, workdir, known))

    def _tolerated(self, call: Callable[[], Any]) -> Any:
        try:
            return call() if self._on else None
        except Exception as error:  # of a network, a login, a server: whatever they raise
            self._on = False
            self._warn(f"{self.name} is off: {' '.join(str(error).split())}; metrics.jsonl goes on")
            return None


class _Wandb(_Service):
    name = "wandb"

    def _begin(self, config: Config, workdir: Workdir, known: str | None) -> str:
        self._run = self._module.init(
            project=config.logging.wandb_project, name=workdir.path.name, id=known,
            resume="allow", config=saved_json(config), dir=str(workdir.path),
        )  # fmt: skip
        return self._run.id

    def _log(self, step: int, numbers: Mapping[str, float | int]) -> None:
        self._run.log(dict(numbers), step=step)

    def _end(self) -> None:
        self._run.finish()


class _Mlflow(_Service):
    name = "mlflow"

    def refuses(self) -> str:
        """A database or a directory is opened, while a server is asked nothing yet."""
        where = self._module.get_tracking_uri()
        try:
            self._module.MlflowClient()
        except Exception as error:  # its own classes differ by version and kind of store
            return (
                f"MLflow cannot record at {where} ({' '.join(str(error).split())}); set "
                "MLFLOW_TRACKING_URI to a server, http://HOST:PORT, or to a database, "
                "sqlite:////PATH/mlflow.db, for which pip install 'brt[mlflow]'; or leave it out"
            )
        return ""

    def _begin(self, config: Config, workdir: Workdir, known: str | None) -> str:
        self._module.set_experiment(config.logging.mlflow_experiment)
        run = self._module.start_run(run_id=known, run_name=workdir.path.name)
        self._module.log_dict(saved_json(config), "config.json")
        return run.info.run_id

    def _log(self, step: int, numbers: Mapping[str, float | int]) -> None:
        self._module.log_metrics(dict(numbers), step=step)

    def _end(self) -> None:
        self._module.end_run()


def requested(config: Config, warn: Warn) -> list[_Service]:
    """The services that Logging names; nothing is told to them yet.

    Raises:
      ConfigError: what one needs is not installed, or it could record nothing.
    """
    names = {
        "Logging.wandb_project": (config.logging.wandb_project, _Wandb),
        "Logging.mlflow_experiment": (config.logging.mlflow_experiment, _Mlflow),
    }
    found = []
    for setting, (value, service) in names.items():
        if not value:
            continue
        try:
            module = importlib.import_module(service.name)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{setting} = {value!r} needs the extra {service.name}: "
                f"pip install 'brt[{service.name}]', or leave it out"
            ) from error
        made = service(module, warn)
        if reason := made.refuses():
            raise ConfigError(f"{setting} = {value!r}: {reason}")
        found.append(made)
    return found


def start(config: Config, workdir: Workdir, warn: Warn) -> Sequence[Tracker]:
    """Trackers for what is `requested`, begun, or gone on with; raises as that does.

    Raises:
      CheckpointError: trackers.json is damaged.
    """
    services, place = requested(config, warn), workdir.path / "trackers.json"
    if not services:
        return []
    before = known(place)
    ids = {s.name: s.begin(config, workdir, before.get(s.name)) for s in services}
    write_json(place, before | {name: run for name, run in ids.items() if run})
    return services


def known(place: Path) -> dict[str, str]:
    """What trackers.json remembers, by service; raises CheckpointError where it is damaged."""
    try:
        return untrusted.read_json(place, {str: str})
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{place} is damaged ({error}); delete it to begin new runs there"
        ) from error
