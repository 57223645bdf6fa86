"""Sends the metrics of a run to Weights & Biases and MLflow, if the config section Logging says so.

These services have runs, too: one run in the service has the metrics of one training run. The id of
the run in the service is stored in trackers.json in the run directory, so that a resumed training
run continues the same run in the service. The file also says which directory it was written for: a
moved directory keeps its runs in the services, and a copy begins new ones.
"""

import importlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from brt import untrusted
from brt.config import Config
from brt.config_io import saved_json
from brt.errors import CheckpointError, ConfigError
from brt.formatting import one_line
from brt.training.metrics import Tracker
from brt.training.workdir import Workdir, write_json

Warn = Callable[[str], object]
Metrics = Mapping[str, float | int | None]
_PLACE = {"host": str, "path": str, "inode": str}
_IDS = {"wandb?": str, "mlflow?": str, "directory?": _PLACE}


class _Service:
    """A tracking service, whose failures never stop a run; `warn` is called at the first one."""

    name: str  # The Python module, and the extra of brt that installs the module, have this name.
    _begin: Callable[[Config, Workdir, str | None], str]
    _log: Callable[[int, Mapping[str, float | int]], None]
    _end: Callable[[], None]

    def __init__(self, module: ModuleType, warn: Warn):
        self._module, self._warn, self._on = module, warn, True

    def refuses(self) -> str:
        """Returns the reason why the service cannot record metrics here; "" if it can."""
        return ""

    def write(self, step: int, metrics: Metrics) -> None:
        """Sends the metrics of a step to the service, except for metrics that are not finite."""
        finite = {tag: value for tag, value in metrics.items() if value is not None}
        self._tolerated(lambda: self._log(step, finite))

    def close(self) -> None:
        self._tolerated(self._end)

    def begin(self, config: Config, workdir: Workdir, run_id: str | None) -> str | None:
        """Starts or continues a run in the service; returns its id, or None after a failure."""
        return self._tolerated(lambda: self._begin(config, workdir, run_id))

    def _tolerated(self, call: Callable[[], Any]) -> Any:
        try:
            return call() if self._on else None
        # Problems of network, login and server raise errors of many classes, so all are caught.
        except Exception as error:
            self._on = False
            reason = " ".join(str(error).split())
            self._warn(f"{self.name} is off: {reason}; metrics.jsonl is still written")
            return None


class _Wandb(_Service):
    name = "wandb"

    def _begin(self, config: Config, workdir: Workdir, run_id: str | None) -> str:
        self._run = self._module.init(
            project=config.logging.wandb_project, name=one_line(workdir.path.name), id=run_id,
            resume="allow", config=saved_json(config), dir=str(workdir.path),
        )  # fmt: skip
        return self._run.id

    def _log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        self._run.log(dict(metrics), step=step)

    def _end(self) -> None:
        self._run.finish()


class _Mlflow(_Service):
    name = "mlflow"

    def refuses(self) -> str:
        """Tries to open MLflow's database or directory; a server is not contacted."""
        where = self._module.get_tracking_uri()
        try:
            self._module.MlflowClient()
        # The classes of MLflow's errors depend on its version and on the kind of store, so errors
        # of all classes are caught.
        except Exception as error:
            return (
                f"MLflow cannot record at {where} ({' '.join(str(error).split())}); set "
                "MLFLOW_TRACKING_URI to a server, http://HOST:PORT, or to a database, "
                "sqlite:////PATH/mlflow.db, for which pip install 'brt[mlflow]'; or leave it out"
            )
        return ""

    def _begin(self, config: Config, workdir: Workdir, run_id: str | None) -> str:
        self._module.set_experiment(config.logging.mlflow_experiment)
        run = self._module.start_run(run_id=run_id, run_name=one_line(workdir.path.name))
        self._module.log_dict(saved_json(config), "config.json")
        return run.info.run_id

    def _log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        self._module.log_metrics(dict(metrics), step=step)

    def _end(self) -> None:
        self._module.end_run()


def requested(config: Config, warn: Warn) -> list[_Service]:
    """Returns the tracking services that the config asks for, without starting runs in them.

    ConfigError is raised if one is not installed, or cannot record anything on this machine.
    """
    settings = {
        "Logging.wandb_project": (config.logging.wandb_project, _Wandb),
        "Logging.mlflow_experiment": (config.logging.mlflow_experiment, _Mlflow),
    }
    services = []
    for setting, (value, service_class) in settings.items():
        if not value:
            continue
        try:
            module = importlib.import_module(service_class.name)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{setting} = {value!r} needs the extra {service_class.name}: "
                f"pip install 'brt[{service_class.name}]', or leave it out"
            ) from error
        service = service_class(module, warn)
        if reason := service.refuses():
            raise ConfigError(f"{setting} = {value!r}: {reason}")
        services.append(service)
    return services


def start(config: Config, workdir: Workdir, warn: Warn) -> Sequence[Tracker]:
    """Starts a run in each tracking service that the config asks for, and returns the services.

    If the run directory was trained before, the service continues its earlier run.
    """
    services, file = requested(config, warn), workdir.path / "trackers.json"
    if not services:
        return []
    earlier, place = read(file), _place(workdir)
    if _is_copy(earlier.get("directory"), place):
        names = " and ".join(service.name for service in services)
        where = earlier["directory"]["path"]
        warn(f"{workdir.path} is a copy of {where} and begins a new run in {names}")
        earlier = {}
    ids = {s.name: s.begin(config, workdir, earlier.get(s.name)) for s in services}
    known = {name: run_id for name, run_id in ids.items() if run_id}
    write_json(file, {**earlier, **known, "directory": place})
    return services


def _place(workdir: Workdir) -> dict[str, Any]:
    """Returns what identifies a run directory, as JSON. A copy has another path and inode."""
    path = os.fsencode(workdir.path.resolve()).decode(errors="backslashreplace")
    inode = str(workdir.path.stat().st_ino)
    return {"host": socket.gethostname(), "path": path, "inode": inode}


def _is_copy(saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
    """Returns True if a run directory (`now`) is a copy of the one that trackers.json names.

    A renamed directory keeps its inode, also on a disk that another machine mounts. On the same
    machine, a directory that has replaced the original is the original, wherever it is.
    """
    if saved is None or saved["inode"] == now["inode"]:
        return False
    if saved["host"] != now["host"]:
        return True
    return saved["path"] != now["path"] and os.path.exists(Path(saved["path"], "trackers.json"))


def read(file: Path) -> dict[str, Any]:
    """Returns the ids of the services' runs, and the "directory"; {} without trackers.json."""
    try:
        return untrusted.read_json(file, _IDS)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is damaged ({error}); delete it to begin new runs there"
        ) from error
