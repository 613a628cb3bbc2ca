"""The state-management server: which checkpoints exist, which are good, what can resume where.

`hyperopt-ckpt serve` starts it. The files stay the truth: everything here can be rebuilt from them,
and training never depends on it. Needs the extra `hyperopt-ckpt[server]`.
"""
