"""Rewrite a checkpoint for another topology, streaming and without torch.

`plan_reshard` says what it takes, `execute_reshard` does it.
"""

from ckpt.reshard.execute import ReshardResult, execute_reshard
from ckpt.reshard.plan import ReshardPlan, plan_reshard

__all__ = ["ReshardPlan", "ReshardResult", "execute_reshard", "plan_reshard"]
