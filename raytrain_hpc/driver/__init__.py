"""The driver process of a run: cluster, workers and their health, recorded metrics, published checkpoints."""
