"""Metric sinks: TensorBoard, Weights & Biases, MLflow and user-defined ones.

    metrics.jsonl, then committed steps ──► SinkThread (one per sink) ──► Sink

A sink that is slow or unreachable delays nobody, and receives from the run's file what it missed
once it is back.
"""
