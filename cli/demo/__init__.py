"""The program behind `hyperopt-ckpt demo`: train, save, kill, reshard, resume, compare."""
