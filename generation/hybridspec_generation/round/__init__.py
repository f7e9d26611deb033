"""One round of HybridSpec (Algorithm 1), a step a file, in this order:

proposal.py    1      drafter -> proposal block, confidence, entropy
selector.py    2-4    prefix probabilities -> nominal length w0 -> Stage-0 length u
stage0.py      5      Layer 0 up to the router boundary on u tokens
correction.py  6-11   routing correction -> verification length w
stage1.py      12     resume at Layer 0's experts, remaining layers, next tokens
acceptance.py  13-14  accepted prefix, emitted tokens, next anchor
commit.py      15-16  advance K/V, convolution windows, GDN states and the drafter's context
"""

from functools import partial

from .acceptance import accept
from .commit import commit
from .context import Round, eager_switch
from .correction import correct
from .proposal import propose
from .selector import select
from .stage0 import stage0
from .stage1 import stage1


def run_round(r: Round) -> None:
    """Emit at least one token: draft, choose a length, verify that many tokens, commit the accepted ones."""
    propose(r)
    select(r)
    r.switch(r.state.stage0_length, partial(stage0, r))
    correct(r)
    r.switch(r.state.verify_length, partial(verify, r))


def verify(r: Round, w: int) -> None:
    """Everything that depends on the verification length w."""
    stage1(r, w)
    accept(r, w)
    commit(r, w)


__all__ = ["Round", "eager_switch", "run_round", "verify"]
