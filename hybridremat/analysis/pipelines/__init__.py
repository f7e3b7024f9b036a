"""Plans of pipelines: where a model is cut into stages, and what each of them recomputes."""
