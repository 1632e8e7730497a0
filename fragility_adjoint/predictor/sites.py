"""Sites: which part of a Transformer a place belongs to, such as "norm", "scores" or "mlp".

They are found from the tree of modules and from the kernels that ran. No names of classes or modules are used.
"""

from collections import defaultdict
from collections.abc import Sequence

import pandas as pd
from torch import nn

from fragility_adjoint.predictor.recorder import ErrorRecorder, Place
from fragility_core.models.paths import block_of, is_norm, within

SUMS = {"add", "add_", "radd", "sub", "sub_", "rsub", "addcmul"}
COLUMNS = ("name", "kind", "site", "layer", "module", "stream", "ends", "block_output")
NORMS = {"layer_norm", "rms_norm", "group_norm"}
SOFTMAX = {"softmax", "to"}  # models that compute the softmax in fp32 cast its result down


def attention_sites(places: Sequence[Place]) -> list[str]:
    """The sites of the kernels of one attention branch, given in the order in which they ran.

    The last product of two computed tensors gives the context. If an earlier one is rounded too, it gives the scores;
    the kernels between the two belong to scores and softmax.
    """
    products = [i for i, place in enumerate(places) if place.product == "values"] or [len(places)]
    first, last = products[0], products[-1]
    sites = []
    for i, place in enumerate(places):
        if place.product == "weights":
            sites.append("projection")
        elif i == last:
            sites.append("context")
        elif first <= i < last:
            sites.append("softmax" if place.name in SOFTMAX else "scores")
        else:
            sites.append("attention")
    return sites


class Sites:
    """The sites of all places of ``recorder`` in ``model``."""

    def __init__(self, model: nn.Module, recorder: ErrorRecorder):
        self.places, self.roles, self.ends = list(recorder.places), recorder.roles, recorder.ends
        self.modules = dict(model.named_modules())
        self.blocks = [block_of(place.module) for place in self.places]
        in_blocks = (i for i, place in enumerate(self.places) if self.blocks[i] and place.kind == "kernel")
        self.first_in_block = next(in_blocks, len(self.places))
        attending = filter(None, map(block_of, recorder.roles["attention"]))
        self.attention_branches = {(path, branch) for path, _, branch in attending}
        self.branches = [(block[0], block[2]) if block else None for block in self.blocks]
        branches = defaultdict(list)
        for i, place in enumerate(self.places):
            if self.branches[i] in self.attention_branches and place.kind == "kernel" and not self._in_norm(place):
                branches[self.branches[i]].append(i)
        self.attention = {
            i: site
            for indices in branches.values()
            for i, site in zip(indices, attention_sites([self.places[i] for i in indices]))
        }

    def _in_norm(self, place: Place) -> bool:
        return is_norm(self.modules[place.module]) or (place.kind == "kernel" and place.name in NORMS)

    def site(self, i: int) -> str:
        """The site of the place with number ``i``."""
        place = self.places[i]
        if self._in_norm(place):
            return "norm"
        if place.kind == "weight" and isinstance(self.modules[place.module], nn.Embedding):
            return "embedding"
        if (branch := self.branches[i]) is None:
            before = place.kind == "kernel" and i < self.first_in_block
            return "embedding" if before else "head"
        if place.module in self.roles["router"]:
            return "router"
        if i in self.attention:
            return self.attention[i]
        if branch in self.attention_branches:
            return "projection"  # a weight
        return "residual" if not branch[1] and place.name in SUMS else "mlp"

    def table(self) -> pd.DataFrame:
        """One row per place, with these columns:

        - ``name``, ``kind``, ``module`` and ``stream`` of ``recorder.Place``;
        - ``site``, and ``layer``, the number of the block (missing outside of blocks);
        - ``ends``, the path of the outermost module whose call ended with this kernel ("" for other kernels);
        - ``block_output``, whether the kernel is the last one of a block.
        """
        numbers = range(len(self.places))
        ends = [self.ends.get(i, "") for i in numbers]
        output = [bool(block and end and within(block[0], end)) for block, end in zip(self.blocks, ends)]
        layers = pd.array([block[1] if block else None for block in self.blocks], dtype="Int64")
        sites = [self.site(i) for i in numbers]
        rows = pd.DataFrame(self.places, columns=Place._fields)
        return rows.assign(site=sites, layer=layers, ends=ends, block_output=output)[list(COLUMNS)]
