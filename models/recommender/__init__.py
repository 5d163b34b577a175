"""Data of recommender models: Criteo's files, a synthetic set, metrics, overlapped stages, and a baseline."""
