"What strategies do with what is rounded, and with optimizers that need whole parameters. (contract/test_every_strategy.py has the rest.)"
import pytest
from strategies import *


@pytest.mark.parametrize('strategy', STRATEGIES[1:])
def test_bf16_is_that_of_ddp(world3, strategy):
    pairs = [('bf16', list(OPTS)[STRATEGIES[1:].index(strategy)])]  # what is rounded does not know which optimizer steps
    ddp, m = (world3(fits, ctx_of(s), pairs)[0] for s in ('ddp', strategy))
    for k in ddp: assert diff(ddp[k].weights, m[k].weights) < 2e-6


class OwnStep:
    "A step of one's own, which needs to know the whole parameter"
    @staticmethod
    def step(p, lr, **kwargs): p.data.sub_(p.grad.data/p.grad.data.abs().max(), alpha=lr)


def own_opt(params, lr, **kwargs): return Optimizer(params, [OwnStep.step], lr=lr)


def with_own(ctx=None): return fit('plain', own_opt, ctx)


@pytest.mark.parametrize('strategy', STRATEGIES[1:])
def test_a_step_of_ones_own(world3, strategy):
    one = with_own()
    for m in world3(with_own, ctx_of(strategy)): assert diff(one.weights, m.weights) < 1e-7
