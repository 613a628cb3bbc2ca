"""The `hyperopt-ckpt` command."""
