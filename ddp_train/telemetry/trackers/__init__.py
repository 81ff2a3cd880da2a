"""Trackers: TensorBoard, Weights & Biases, MLflow and yours receive what a run measures."""
