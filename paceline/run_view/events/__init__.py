"""Events of a run: followed live, listed, and folded into its end and the spans of its samples."""
