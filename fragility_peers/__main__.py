"""Carry out one task: ``python -m fragility_peers task.json answer.json``."""

import json
import sys
from pathlib import Path

import torch

from fragility_peers.tasks import carry_out

if __name__ == "__main__":
    torch.set_num_threads(1)  # so that seconds can be compared
    task, answer = map(Path, sys.argv[1:])
    answer.write_text(json.dumps(carry_out(json.loads(task.read_text()))))
