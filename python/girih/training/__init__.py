"""How `girih.train` and `girih.compare` train: recipes, the trainer, the folder of a run, its processes."""
