"""A theorem on what the limits of a controller alone decide; no statement of the paper.

N blocks, at most b actions a step, a cooldown of c steps, a budget of A actions in all. The trigger fires at every step
from ``first`` on, and every step takes as many actions as it may. P = ceil(N / b) steps then suffice for a round over
all blocks.

Theorem. If c >= P and A >= N, every step k < P of the first round finds exactly the N - k b blocks that were not yet
chosen, so that after k steps min(N, k b) blocks are protected, whatever the priorities. Proof: a block chosen at step k
is available again at step k + c >= P, after the round. So no block is chosen twice in a round, and a step takes b
blocks as long as b are left.

Corollary. Round r finds the blocks of each step of round r - 1 exactly c steps later: by induction it chooses
them again, step by step. After A / N whole rounds all blocks have had equal numbers of actions. If the new epsilon
depends on a block's own actions alone, all blocks end at the same epsilon, whatever the priorities.

Neither holds without its condition: ``tests/core/test_forced_budget.py`` has a counterexample for each.
"""

from math import ceil

__all__ = ["forced_epsilon", "forced_protection", "protected_layer_steps"]


def forced_protection(blocks: int, per_step: int, cooldown: int, budget: int) -> bool:
    """True if the limits force which blocks are protected and for how long: c >= blocks / per_step, A >= blocks.

    The condition is not in the paper. Raises ValueError for ``blocks`` or ``per_step`` below 1.
    """
    if min(blocks, per_step) < 1:
        raise ValueError(f"blocks and actions a step must be at least 1, got {blocks} and {per_step}")
    return cooldown >= ceil(blocks / per_step) and budget >= blocks


def forced_epsilon(blocks: int, per_step: int, cooldown: int, budget: int) -> bool:
    """True if the limits also force the final epsilon of every block: A is a multiple of N, too.

    The condition is not in the paper. Raises ValueError for ``blocks`` or ``per_step`` below 1.
    """
    return forced_protection(blocks, per_step, cooldown, budget) and budget % blocks == 0


def protected_layer_steps(blocks: int, per_step: int, first: int, steps: int) -> int:
    """Layer-steps above the base epsilon in a run of ``steps``, where protection is forced: sum of min(N, k b).

    The formula is not in the paper; its number is: the limits of the paper (12 blocks, 2 a step, first step 24, 256
    steps) give the 2742 of its table of E5. Actions decided at step t apply from step t + 1 on.
    """
    return sum(min(blocks, k * per_step) for k in range(1, steps - first))
