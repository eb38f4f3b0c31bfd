"""Metric sinks: TensorBoard, Weights & Biases, MLflow and user-defined ones.

    metrics.jsonl ──► PointReader ──► SinkThread (one per sink) ──► Sink

The leader writes metrics.jsonl and feeds every sink from it, so the file is the queue. It needs no
memory: a sink that is slow or unreachable delays nobody and receives what it missed once it is
back.
"""
