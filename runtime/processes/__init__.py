"""Several processes that run one program."""
