"""Trains all cases as one of several processes.

`test_processes.py` starts this program. The first process prints the losses of each case as a line
of JSON.
"""

import argparse
import json
from pathlib import Path

from sharded_cases import CASES, MESHES, STEPS, curve, with_optimizer

from brt import distributed
from brt.distributed import processes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", type=Path, required=True)
    distributed.add_flags(parser)
    args = parser.parse_args()
    distributed.start(args)
    with processes.explain_peer_errors():
        train(args.place)


def train(directory: Path) -> None:
    """Trains all cases, one after another."""
    for name in CASES:
        place = directory / name
        if processes.is_first():
            place.mkdir()
        processes.wait_for_all("place")
        config = with_optimizer(CASES[name](place), "adafactor", STEPS)
        nats, _ = curve(config, MESHES["data_fsdp_tensor"], STEPS)
        if processes.is_first():
            print(json.dumps({"case": name, "nats": nats}), flush=True)
    processes.wait_for_all("end")


if __name__ == "__main__":
    main()
