"""Training runs: the plan, the model and its loaders, and how a run ends or resumes."""
