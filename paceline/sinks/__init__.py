"""Where a run's curves go beside its own files: TensorBoard, Weights & Biases, MLflow, one's own.

    metrics.jsonl ──► reader ──► feed (one thread a sink) ──► sink

The leader writes metrics.jsonl and feeds the sinks from it: the file is the queue. It is bounded by
nothing but the run's length and costs no memory, so a sink that is slow or gone delays nobody and,
once it is back, gets everything it has missed.
"""
