"""Training for `girih.train` and `girih.compare`: recipes, the trainer, the folder and the processes of a
run."""
